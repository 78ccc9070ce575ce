"""Hosts for tests: network namespaces on one bridge, a Ray node in each.

Needs root, and `ip` and `tc` (Debian package iproute2).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import Self

from tests.conftest import MIB, SHARED_MEMORY, wait_for
from tests.hosts.runs import (
    END_TIMEOUT_S,
    STATE,
    begin_run,
    children,
    command,
    end_run,
    is_running,
    kill_all_in,
    leftovers,
    processes_in,
)

__all__ = ["REPOSITORY", "Host", "Hosts"]

REPOSITORY = Path(__file__).parents[2]
PORT = 6379  # of the head; in a namespace of its own every port is free
START_TIMEOUT_S = 180.0
BURST_BYTES = 128 * 1024  # more than the largest packet that the kernel hands to a link


@dataclass
class Host:
    """A network namespace with a Ray node in it.

    Attributes:
        name: short.
        namespace: as `ip netns` knows it.
        link: this side's end of its link.
        address: of the host.
        temp_dir: of its Ray node.
        node: the process that started the Ray node and ends with it, or None.
    """

    name: str
    namespace: str
    link: str
    address: str
    temp_dir: Path
    node: subprocess.Popen[bytes] | None = None
    starts: int = 0
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _raylet: int | None = None

    @property
    def log(self) -> Path:
        """What `ray start` says."""
        return self.temp_dir / f"start-{self.starts}.log"

    @property
    def up(self) -> bool:
        """Whether its Ray node is running."""
        return self.raylet is not None

    @property
    def down(self) -> bool:
        """Whether its Ray node has ended."""
        return self.node is None or self.node.poll() is not None

    @property
    def raylet(self) -> int | None:
        """Process id of its raylet, None if its Ray node is not up."""
        if self.node is None or self.down or "Ray runtime started" not in self.log.read_text():
            return None
        if self._raylet is None:
            found = [process for process, name in children(self.node.pid).items() if name == "raylet"]
            self._raylet = found[0] if found else None
        return self._raylet if self._raylet is not None and is_running(self._raylet) else None

    def processes(self) -> list[int]:
        """All processes of the host."""
        return processes_in(self.namespace)


class Hosts:
    """Some hosts on one network; the first is the head of their Ray cluster. A context manager.

    Attributes:
        disk: a small file system of `disk_bytes` that all hosts see, or None.
        shared_memory: for arenas; all hosts see it.
    """

    def __init__(self, num_hosts: int, *, object_store_bytes: int = 80 * MIB, disk_bytes: int = 0) -> None:
        assert os.geteuid() == 0, "only root can make network namespaces"
        assert shutil.which("ip"), "install iproute2"
        assert shutil.which("tc"), "install iproute2"
        self._object_store_bytes = object_store_bytes
        self.disk_bytes = disk_bytes
        self.run_id = secrets.token_hex(3)
        self._directory = STATE / self.run_id
        self.shared_memory = SHARED_MEMORY / f"kvf-{self.run_id}"
        self._lock: int | None = begin_run(self.run_id)
        self.disk: Path | None = None
        self.hosts: list[Host] = []
        try:
            self._build(num_hosts)
        except BaseException:
            self.close()
            raise

    def _build(self, num_hosts: int) -> None:
        self.shared_memory.mkdir(mode=0o700)
        if self.disk_bytes:  # before the hosts, which have their own view of what is mounted
            self.disk = self._directory / "disk"
            self.disk.mkdir()
            command("mount", "-t", "tmpfs", "-o", f"size={self.disk_bytes}", f"kvf{self.run_id}", str(self.disk))
        self._bridge = f"kvf{self.run_id}"
        command("ip", "link", "add", self._bridge, "type", "bridge")
        command("ip", "link", "set", self._bridge, "up")
        for number in range(num_hosts):
            name = "abcdefgh"[number]
            self.hosts.append(self._make(name, f"198.51.100.{11 + number}"))

    def _make(self, name: str, address: str) -> Host:
        host = Host(name, f"kvf-{self.run_id}-{name}", f"kvf{self.run_id}{name}", address, self._directory / name)
        host.temp_dir.mkdir()
        command("ip", "netns", "add", host.namespace)
        inside = ("ip", "-n", host.namespace)
        command("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        command("ip", "link", "set", host.link, "master", self._bridge, "up")
        command(*inside, "link", "set", "lo", "up")
        command(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        command(*inside, "link", "set", "eth0", "up")
        return host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all hosts and remove everything. Nothing may be left."""
        for host in self.hosts:
            with contextlib.suppress(FileNotFoundError):
                self.kill_host(host)
        if self._lock is not None:
            end_run(self.run_id, self._lock)
            self._lock = None
        assert not leftovers(self.run_id)

    # Ray

    @property
    def head(self) -> Host:
        """The host of Ray's control plane."""
        return self.hosts[0]

    @property
    def ray_address(self) -> str:
        """Of the Ray cluster."""
        return f"{self.head.address}:{PORT}"

    def start(self) -> None:
        """Start the Ray nodes of all hosts."""
        for host in self.hosts:
            self.begin_node(host)
            if host is self.head:
                self.wait_for_node(host)
        for host in self.hosts:
            self.wait_for_node(host)

    def begin_node(self, host: Host) -> None:
        """Start a host's Ray node: a new node, whatever ran there before."""
        assert host.down, f"{host.name} runs"
        role = ("--head", f"--port={PORT}", "--include-dashboard=false") if host is self.head else (
            f"--address={self.ray_address}",
        )  # fmt: skip
        ray = str(Path(sys.executable).with_name("ray"))
        options = (
            f"--node-ip-address={host.address}",
            f"--temp-dir={host.temp_dir}",
            f"--object-store-memory={self._object_store_bytes}",
            "--num-cpus=1",
            "--block",
        )
        host.starts += 1
        host._raylet = None
        host.node = self.run(host, ray, "start", *role, *options, output=host.log)
        host.others.remove(host.node)

    def wait_for_node(self, host: Host) -> None:
        """Wait until a host's Ray node is up."""

        def started() -> bool:
            assert not host.down, host.log.read_text()
            return host.up

        wait_for(started, f"the Ray node of {host.name} is up", START_TIMEOUT_S)

    def run(
        self, host: Host, *arguments: str, output: Path | None = None, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a process in a host; it has no input, and its output goes to the end of a file."""
        output = output or host.temp_dir / "output.log"
        environment = os.environ | {"RAY_TMPDIR": str(host.temp_dir), "PYTHONUNBUFFERED": "1"}
        with output.open("ab") as file:
            process = subprocess.Popen(
                ("ip", "netns", "exec", host.namespace, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=REPOSITORY,
                pass_fds=pass_fds,
                start_new_session=True,  # a signal for the test is none for them
            )
        host.others.append(process)
        return process

    # faults

    def kill_host(self, host: Host) -> None:
        """Kill -9 everything on a host at once, as a loss of power does."""
        started = [*host.others, *([host.node] if host.node is not None else [])]
        for process in started:
            process.kill()  # one that was started just now may not be in the namespace yet
        kill_all_in(host.namespace)
        for process in started:
            process.wait(END_TIMEOUT_S)
        host.others.clear()
        host.node = None

    def kill(self, process: int) -> None:
        """Kill -9 a process of some host."""
        self._send(process, signal.SIGKILL)

    def stop(self, process: int) -> None:
        """Stop a process of some host: it is there, and does nothing."""
        self._send(process, signal.SIGSTOP)

    def go_on(self, process: int) -> None:
        """Let a stopped process go on, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            self._send(process, signal.SIGCONT)

    def _send(self, process: int, what: signal.Signals) -> None:
        if not any(process in host.processes() for host in self.hosts):
            raise ProcessLookupError(process)
        os.kill(process, what)

    def cut(self, host: Host) -> None:
        """From now on no packet gets to a host or comes from it; nobody is told."""
        command("ip", "link", "set", host.link, "nomaster")

    def slow(self, host: Host, bytes_per_s: int) -> None:
        """Limit what a host sends and what it gets, each to so many bytes a second."""
        shape = f"root tbf rate {8 * bytes_per_s}bit burst {BURST_BYTES} latency 400ms".split()
        command("tc", "qdisc", "replace", "dev", host.link, *shape)
        command("tc", "-n", host.namespace, "qdisc", "replace", "dev", "eth0", *shape)

    def heal(self, host: Host) -> None:
        """Undo `cut` and `slow`."""
        command("ip", "link", "set", host.link, "master", self._bridge)
        for where in (("tc",), ("tc", "-n", host.namespace)):
            device = host.link if len(where) == 1 else "eth0"
            if "tbf" in command(*where, "qdisc", "show", "dev", device):
                command(*where, "qdisc", "delete", "dev", device, "root")

    def sent_bytes(self, host: Host) -> int:
        """Bytes that a host has sent to others since it was made."""
        return int((Path("/sys/class/net") / host.link / "statistics/rx_bytes").read_text())
