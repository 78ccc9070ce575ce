"""A process on a host that is a member of the fleet and calls functions there for the test.

The test's own process is on none of the hosts, so it cannot be a member of their Ray cluster.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import ray

import kvfleet
from kvfleet import FleetConfig
from tests.cluster.engine_process import Engine
from tests.hosts.hosts import Host, Hosts

__all__ = ["Agent", "join_ray"]

T = TypeVar("T")
START_TIMEOUT_S = 120.0


class Agent:
    """An engine of the fleet on a host, in a process of its own, which ends with the host's Ray node.

    Args:
        fleet: settings of the fleet, which is started, or joined if it runs.
    """

    def __init__(self, hosts: Hosts, host: Host, fleet: FleetConfig) -> None:
        self.host = host
        self.log = host.temp_dir / "agent.log"
        ours, its = socket.socketpair()
        with its:
            arguments = (sys.executable, "-m", "tests.hosts.agent", str(its.fileno()), hosts.ray_address, host.address)
            self._process = hosts.run(host, *arguments, output=self.log, pass_fds=(its.fileno(),))
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._connection.send(fleet)
        self._answer("to start", START_TIMEOUT_S)

    def call(self, function: Callable[..., T], *arguments: object, timeout_s: float = 60.0) -> T:
        """What `function(engine, *arguments)` returns there.

        Raises:
            AssertionError: it failed, or the process has ended.
        """
        self._connection.send((function, arguments))
        answer: T = self._answer(function.__qualname__, timeout_s)
        return answer

    def _answer(self, what: str, timeout_s: float) -> Any:
        problem = f"the agent on {self.host.name} was asked {what}, and "
        assert self._connection.poll(timeout_s), f"{problem}did not answer in {timeout_s} s\n{self._last_words()}"
        try:
            failed, answer = self._connection.recv()
        except EOFError:
            failed, answer = True, f"ended\n{self._last_words()}"
        assert not failed, f"{problem}{answer}"
        return answer

    def _last_words(self) -> str:
        return self.log.read_text()[-4000:]

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.wait(60.0)


def join_ray(ray_address: str, host_address: str) -> None:
    """Connect to the Ray node of this host: without its address, Ray takes any whose process it sees."""
    ray.init(address=ray_address, _node_ip_address=host_address, log_to_driver=False, configure_logging=False)


def main(descriptor: int, ray_address: str, host_address: str) -> None:
    """Call what is asked for until nobody asks any more."""
    requests: Connection[Any, Any] = Connection(descriptor)
    config = requests.recv()
    join_ray(ray_address, host_address)
    kvfleet.start(config, address=ray_address)
    engine = Engine(config.name)
    requests.send((False, None))
    while True:
        try:
            function, arguments = requests.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = (False, function(engine, *arguments))
        except Exception:  # noqa: BLE001  whatever it is, the test wants to know
            answer = (True, traceback.format_exc())
        requests.send(answer)
    engine.close()
    ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]), *sys.argv[2:])
