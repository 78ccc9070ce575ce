"""The workers of all hosts, and what their records say."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.hosts import Host, Hosts
from tests.hosts.runs import is_running
from tests.hosts.worker import Record, records

__all__ = ["Crew", "Member", "curve", "recovery_s"]

BUCKET_S = 5.0


@dataclass
class Member:
    """A worker, in all its lives: one that ends with its host's Ray node is started again, as Serve would do it."""

    host: Host
    name: str
    file: Path
    process: subprocess.Popen[bytes] | None = None
    raylet: int = 0
    starts: int = 0
    _records: list[Record] = field(default_factory=list)
    _offset: int = 0

    @property
    def log(self) -> Path:
        """What it says."""
        return self.file.with_suffix(".log")

    def records(self) -> list[Record]:
        """All of its records so far."""
        more, self._offset = records(self.file, self._offset)
        self._records += more
        return self._records

    def full_hits(self, since: float) -> list[Record]:
        """Its loads since a time that brought all of a prompt that everybody asks for."""
        return [r for r in self._latest(since) if r.kind == "load" and r.prompt is not None and r.loaded == r.asked]

    def works(self, since: float) -> bool:
        """Whether since a time it has had such a hit, one of a conversation, and stored all it wanted to."""
        latest = self._latest(since)
        conversed = any(r.kind == "load" and r.prompt is None and r.loaded == r.asked for r in latest)
        stored = any(r.kind == "store" and r.hit == r.asked for r in latest)
        return conversed and stored and bool(self.full_hits(since))

    def _latest(self, since: float) -> list[Record]:
        everything = self.records()
        first = bisect_right(everything, since, key=lambda record: record.at)
        return everything[first:]


class Crew:
    """Workers on all hosts, kept running.

    Attributes:
        fallen: workers that ended though the raylet they hang on runs, with their exit status.
    """

    def __init__(self, hosts: Hosts, fleet: str, seed: int, *, per_host: int) -> None:
        self._hosts = hosts
        self._fleet = fleet
        self._seed = seed
        self.fallen: list[tuple[str, int]] = []
        self.members = [
            Member(host, f"{host.name}{number}", host.temp_dir / f"worker-{number}.jsonl")
            for host in hosts.hosts
            for number in range(per_host)
        ]

    def tend(self) -> None:
        """Start those that have ended, on hosts whose Ray node is up; end those whose node is another by now."""
        for member in self.members:
            process, raylet = member.process, member.host.raylet
            if process is not None and raylet is not None and member.raylet != raylet:
                process.kill()  # Ray ends its own workers when their raylet is gone, but no others
                process.wait(60.0)
                member.process = None
            elif process is not None and process.poll() is not None:
                if is_running(member.raylet):
                    self.fallen.append((member.name, process.returncode))
                member.process = None
            if member.process is None and raylet is not None:
                self._start(member, raylet)

    def _start(self, member: Member, raylet: int) -> None:
        seed = self._seed + sum(map(ord, member.name))
        member.starts += 1
        member.raylet = raylet
        member.process = self._hosts.run(
            member.host, sys.executable, "-m", "tests.hosts.worker",
            f"--ray={self._hosts.ray_address}", f"--host={member.host.address}", f"--fleet={self._fleet}",
            f"--seed={seed}", f"--file={member.file}", output=member.log,
        )  # fmt: skip

    def all_work(self, since: float) -> bool:
        """Whether every worker has found, loaded and stored since a time."""
        return all(member.works(since) for member in self.members)

    def stop(self) -> None:
        """Let all finish what they do, and end."""
        running = [member.process for member in self.members if member.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(60.0)

    def records(self) -> list[Record]:
        """All records of all, in order."""
        return sorted((record for member in self.members for record in member.records()), key=lambda r: r.at)


def curve(all_records: Iterable[Record], since: float) -> list[tuple[int, float]]:
    """For each 5 s, the number of lookups and the share of the blocks they asked for that came."""
    lookups: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    came: Counter[int] = Counter()
    for record in all_records:
        bucket = int((record.at - since) // BUCKET_S)
        if record.kind == "lookup":
            lookups[bucket] += 1
            asked[bucket] += record.asked
        elif record.kind == "load":
            came[bucket] += record.loaded
    buckets = range(max(asked, default=-1) + 1)
    return [(lookups[n], min(1.0, came[n] / max(1, asked[n]))) for n in buckets]


def recovery_s(crew: Crew, healed_at: float) -> float:
    """How long after a time the last of the workers had its first full hit; until now if one has had none."""
    firsts = [min((r.at for r in member.full_hits(healed_at)), default=time.time()) for member in crew.members]
    return max(firsts) - healed_at
