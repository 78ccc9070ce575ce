"""An engine process under constant work: looks prefixes up, loads them, checks every byte, stores what is missing.

All workers follow one plan that depends on the clock alone: some prompts that everybody asks for, and conversations
that grow by a turn every few seconds, end, and are followed by others. So they keep finding each other's blocks.

Every operation is a line of JSON in the worker's own file.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvfleet
from kvfleet import BlockLayout, Client, ModelSpec
from kvfleet.core.block import split
from kvfleet.errors import DeadlineExceededError, KvFleetError
from tests.workload import content

__all__ = ["BLOCK_BYTES", "GRACE_S", "LOAD_TIMEOUT_S", "LOOKUP_TIMEOUT_S", "MODEL", "POPULAR", "Record", "records"]

BLOCK_TOKENS = 16
BLOCK_BYTES = 128 << 10
MODEL = ModelSpec(
    model_id="hosts",
    weight_revision="1",
    layout=BlockLayout.opaque(block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, inner_order="words"),
)
LOOKUP_TIMEOUT_S = 0.5
LOAD_TIMEOUT_S = 3.0
GRACE_S = 2.0  # what an operation may take beyond its deadline: the machine is busy, and stalls whole processes
GIVE_BACK_S = 1.25  # after its deadline a store makes one call more, to give back what it has reserved
TOTALS_S = 5.0
PAUSE_S = 0.05  # between operations, so that some time is left for the fleet itself

# the plan
POPULAR = 3  # prompts that everybody asks for
POPULAR_BLOCKS = 4
CONVERSATIONS = 8  # at a time
TURN_S = 2.0
TURN_BLOCKS = 2
TURNS = 12


def tokens(number: int, num_blocks: int) -> npt.NDArray[np.uint32]:
    """Token ids of whole blocks; no two numbers have one in common."""
    ids: npt.NDArray[np.uint32] = np.arange(num_blocks * BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number << 12)
    return ids


def popular(number: int) -> npt.NDArray[np.uint32]:
    """A prompt that everybody asks for."""
    return tokens(number, POPULAR_BLOCKS)


def conversation(number: int, at_s: float) -> npt.NDArray[np.uint32]:
    """The prompt of one of the conversations at a time: it begins with a popular one."""
    life_s = TURNS * TURN_S
    generation, age_s = divmod(at_s + number * life_s / CONVERSATIONS, life_s)
    turns = 1 + int(age_s / TURN_S)
    own = POPULAR + (int(generation) * CONVERSATIONS + number) % 900_000
    return np.concatenate([popular(number % POPULAR), tokens(own, turns * TURN_BLOCKS)])


@dataclass(frozen=True)
class Record:
    """One operation.

    Attributes:
        at: when it ended, seconds since the epoch.
        process: the worker's.
        kind: lookup, load or store; overdue, if one has not ended in time, at the time it was noticed; failed, if
            one raised; totals, of its client since that was made; end, if the worker left as it was told to.
        prompt: number of the popular prompt, None if it was another.
        seconds: how long it took.
        asked: blocks asked for or to be stored.
        hit: blocks found, or stored.
        loaded: blocks that came.
        wrong: blocks that came with wrong bytes.
        late: it ended later than its deadline and the grace allow.
        outcomes: blocks by outcome, or by reason why a store dropped them.
    """

    at: float
    process: int
    kind: str
    prompt: int | None = None
    seconds: float = 0.0
    asked: int = 0
    hit: int = 0
    loaded: int = 0
    wrong: int = 0
    late: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)


def records(path: Path, offset: int = 0) -> tuple[list[Record], int]:
    """What a worker has written from a byte offset on, and where that ends."""
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().rpartition(b"\n")[0].splitlines(keepends=True)
    return [Record(**json.loads(line)) for line in lines], offset + sum(map(len, lines)) + bool(lines)


class Journal:
    """The worker's file, and the watch over the operation under way."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._limits: dict[object, float] = {}  # of operations under way, monotonic
        threading.Thread(target=self._watch, daemon=True).start()

    def write(self, kind: str, **facts: Any) -> None:
        """Add a record: one write, so that a line is there or not."""
        line = json.dumps({"at": time.time(), "process": os.getpid(), "kind": kind, **facts})
        os.write(self._file, f"{line}\n".encode())

    @contextmanager
    def operation(self, kind: str, prompt: int | None, limit_s: float) -> Iterator[dict[str, Any]]:
        """Time an operation that must end within `limit_s`, and record it with the facts put into the dict."""
        facts: dict[str, Any] = {}
        started = time.monotonic()
        operation = object()
        self._limits[operation] = started + limit_s
        yield facts
        self._limits.pop(operation, None)
        seconds = time.monotonic() - started
        self.write(kind, prompt=prompt, seconds=round(seconds, 4), late=seconds > limit_s, **facts)

    def _watch(self) -> None:
        """Tell of an operation that is late and may never end, and where it hangs."""
        while True:
            time.sleep(0.2)
            for operation, limit in tuple(self._limits.items()):
                if time.monotonic() > limit and self._limits.pop(operation, None) is not None:
                    self.write("overdue", late=True)
                    faulthandler.dump_traceback(all_threads=True)


class Worker:
    """Works until told to stop."""

    def __init__(self, client: Client, journal: Journal, store_timeout_s: float, rng: random.Random) -> None:
        self._client = client
        self._journal = journal
        self._store_timeout_s = store_timeout_s
        self._rng = rng
        self._storing: threading.Thread | None = None

    def work(self) -> None:
        """One request: look its prompt up, load what is there, store the rest if no store is under way."""
        number = None
        if self._rng.random() < 0.4:
            number = self._rng.randrange(POPULAR)
            prompt = popular(number)
        else:
            # The first conversations are asked for more often than the last ones.
            chosen = min(self._rng.randrange(CONVERSATIONS), self._rng.randrange(CONVERSATIONS))
            prompt = conversation(chosen, time.time())
        loaded = self._load(number, prompt)
        if loaded * BLOCK_TOKENS < len(prompt) and not (self._storing and self._storing.is_alive()):
            self._storing = threading.Thread(target=self._store, args=(number, prompt, loaded))
            self._storing.start()

    def finish(self) -> None:
        """Wait for the last store."""
        if self._storing is not None:
            self._storing.join()

    def _load(self, number: int | None, prompt: npt.NDArray[np.uint32]) -> int:
        keys = split(MODEL.keys(prompt))
        # Twice its timeout until the node is attached.
        with self._journal.operation("lookup", number, 2 * LOOKUP_TIMEOUT_S + GRACE_S) as facts:
            hit = self._client.lookup(prompt)
            facts |= {"asked": hit.asked_blocks, "hit": hit.num_blocks}
            if hit.missing is not None:
                facts["outcomes"] = {hit.missing.value: hit.asked_blocks - hit.num_blocks}
        if not hit.num_blocks:
            return 0
        right: dict[int, bool] = {}  # by index: one that went during its copy is taken again from elsewhere

        def take(index: int, view: npt.NDArray[np.uint8]) -> None:
            right[index] = bool((view == content(keys[index], view.nbytes)).all())

        with self._journal.operation("load", number, LOAD_TIMEOUT_S + GRACE_S) as facts:
            tokens_loaded = self._client.load(hit, take, LOAD_TIMEOUT_S)
            loaded = tokens_loaded // BLOCK_TOKENS
            assert len(tokens_loaded.outcomes) == hit.num_blocks
            outcomes = Counter(outcome.value for outcome in tokens_loaded.outcomes)
            facts |= {"asked": hit.asked_blocks, "hit": hit.num_blocks, "loaded": loaded, "outcomes": outcomes}
            facts["wrong"] = sum(not right[index] for index in range(loaded))
        return loaded

    def totals(self) -> None:
        """Record what the client has counted."""
        stats = self._client.stats()
        self._journal.write("totals", asked=stats.asked_blocks, hit=stats.hit_blocks, outcomes=stats.outcomes)

    def _store(self, number: int | None, prompt: npt.NDArray[np.uint32], start: int) -> None:
        keys = split(MODEL.keys(prompt))

        def put(index: int, view: npt.NDArray[np.uint8]) -> None:
            view[:] = content(keys[index], view.nbytes)

        limit_s = self._store_timeout_s + GIVE_BACK_S + GRACE_S
        with self._journal.operation("store", number, limit_s) as facts:
            task = self._client.store(prompt, put, start_block=start)
            facts["asked"] = len(keys) - start
            try:
                result = task.wait(4 * limit_s)
            except DeadlineExceededError:
                return  # late enough to be told; the next store would only wait behind it
            facts["hit"] = result.stored + result.already
            facts["outcomes"] = {result.reason: result.dropped} if result.dropped else {}


def main() -> None:
    """Join, work, and leave when told to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    arguments = parser.parse_args()
    from tests.hosts.agent import join_ray

    join_ray(arguments.ray, arguments.host)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    fleet = None
    while fleet is None and not stop.is_set():
        try:
            fleet = kvfleet.connect(arguments.fleet, address=arguments.ray)
        except KvFleetError as error:  # its directory is starting again
            print(f"not joined yet: {error}", file=sys.stderr)  # noqa: T201
            stop.wait(0.5)
    if fleet is None:
        return
    assert fleet.config.lookup_timeout_s == LOOKUP_TIMEOUT_S
    journal = Journal(arguments.file)
    rng = random.Random(arguments.seed ^ os.getpid())
    worker = Worker(fleet.client(MODEL), journal, fleet.config.store_timeout_s, rng)
    totals_at = 0.0
    while not stop.wait(PAUSE_S):
        if time.monotonic() > totals_at:
            worker.totals()
            totals_at = time.monotonic() + TOTALS_S
        try:
            worker.work()
        except Exception as error:  # noqa: BLE001  no fault of the cache may reach an engine
            traceback.print_exc()
            journal.write("failed", outcomes={repr(error): 1})
    worker.finish()
    worker.totals()
    fleet.close()
    journal.write("end")


if __name__ == "__main__":
    main()
