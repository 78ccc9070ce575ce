"""Where production code meets the simulated world: what is put in place of which name, and taken out again."""

from __future__ import annotations

import gc
import importlib
import logging
import pkgutil
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import ray
from typing_extensions import override

from kvfleet import actors, calls
from kvfleet.node import arena, localdrives, mirror, shared
from kvfleet.testing.actors import Cluster, Handle, RayModule
from kvfleet.testing.blocking import Pool, QueueModule, ThreadingModule, TimeModule
from kvfleet.testing.drives import Media, SimulatedNvme
from kvfleet.testing.storage import SimulatedStore, Storage

__all__ = ["DIRECTORY", "manager_name", "staged"]

DIRECTORY = "directory"


def manager_name(node: str) -> str:
    """The name of a node's manager."""
    return f"manager {int(node, 16)}"


class _Secrets:
    """In place of `secrets`: the same in each run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"secrets {seed}")

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def token_bytes(self, num_bytes: int) -> bytes:
        return self._random.randbytes(num_bytes)


class _Inline:
    """In place of `TimedThreads`: finding an actor, or the size of a drive, takes no time."""

    def run(self, function: Callable[[], Any], timeout_s: float) -> Any:  # noqa: ANN401  what it returns
        if timeout_s <= 0:
            raise TimeoutError
        return function()


class _Errors(logging.Handler):
    """What production code logs as an error is a bug."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    @override
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._report(f"{record.name}: {record.getMessage()}: {error!r}")


def _no_threads(*_: object) -> NoReturn:
    raise AssertionError("a simulated fleet has no threads")


def _production() -> list[Any]:
    """The modules that a fleet runs."""
    import kvfleet
    from kvfleet import core, node

    names = [f"kvfleet.{found.name}" for found in pkgutil.iter_modules(kvfleet.__path__) if not found.ispkg]
    for package in (core, node):
        names += [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(name) for name in names]


def _names(cluster: Cluster, storage: Storage, media: Media, seed: int) -> list[tuple[Any, str, Any]]:
    """Module or class, name in it, what it is replaced by."""
    instead: dict[str, tuple[object, object]] = {
        "time": (time, TimeModule(cluster.loop)),
        "threading": (threading, ThreadingModule(cluster.loop)),
        "queue": (queue, QueueModule(cluster.loop)),
        "secrets": (secrets, _Secrets(seed)),
        "ray": (ray, RayModule(cluster.loop)),
        "ThreadPoolExecutor": (ThreadPoolExecutor, Pool),
    }

    def by_node(look: Callable[[str], Handle | None]) -> Callable[[str, str], Handle | None]:
        return lambda _, node: look(manager_name(node))

    return [
        *(
            (module, name, simulated)
            for module in _production()
            for name, (real, simulated) in instead.items()
            if vars(module).get(name) is real
        ),
        (shared, "ObjectStore", partial(SimulatedStore, storage)),
        (localdrives, "NvmeTier", partial(SimulatedNvme, media)),
        (mirror, "TimedThreads", lambda *_: _Inline()),
        (arena.Arena, "populate", lambda *_: None),
        (calls, "_FINDING", _Inline()),
        (calls, "find_manager", by_node(cluster.find)),
        (calls, "manager_actor", lambda _, node: cluster.get(manager_name(node))),
        (actors, "get_manager", by_node(cluster.get)),
        *((module, "get_directory", lambda _: cluster.get(DIRECTORY)) for module in (actors, calls)),
        (calls, "find_directory", lambda _: cluster.find(DIRECTORY)),
        (threading.Thread, "start", _no_threads),
    ]


@contextmanager
def staged(cluster: Cluster, storage: Storage, media: Media, seed: int) -> Iterator[None]:
    """Production code runs in the simulated world, for this process, until the end."""
    errors = _Errors(cluster.report)
    log = logging.getLogger("kvfleet")
    level, propagate = log.level, log.propagate
    patches = [patch.object(where, name, value) for where, name, value in _names(cluster, storage, media, seed)]
    collects = gc.isenabled()
    gc.disable()  # when it runs depends on more than the seed, and what it finds may have a `finally`
    log.addHandler(errors)
    log.setLevel(logging.ERROR)
    log.propagate = False
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()
        log.removeHandler(errors)
        log.setLevel(level)
        log.propagate = propagate
        if collects:
            gc.enable()
