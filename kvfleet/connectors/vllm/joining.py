"""An engine process's settings and its way to the fleet.

The engine starts and serves whether there is a fleet or not: as long as there is none, every lookup misses, a warning
says why, and the fleet is looked for again.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import kvfleet
from kvfleet.client import Client
from kvfleet.errors import ConfigError, KvFleetError

__all__ = ["Membership", "Settings"]

_log = logging.getLogger(__name__)
_RETRY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `kv_connector_extra_config` may say.

    Attributes:
        fleet: name of the fleet.
        address: of its Ray cluster; None: the one this process is connected to, else the one that runs here.
        node_id: see `kvfleet.connect`.
        tenant: whose cache this is; tenants never find each other's blocks.
        model_id, weight_revision: see `identity.model_spec`; needed only where the weights cannot be read from here.
        block_tokens: tokens in a block; a multiple of vLLM's block size. None: the multiple nearest below 256.
        save_buffer_bytes: memory of each worker for blocks on their way to the fleet, one block at least. When it is
            full, blocks are not stored, and counted. None: as much as vLLM's largest step computes, at least 256 MiB.

    Raises:
        ConfigError: a value that cannot be.
    """

    fleet: str = "default"
    address: str | None = None
    node_id: str | None = None
    tenant: str = ""
    model_id: str = ""
    weight_revision: str = ""
    block_tokens: int | None = None
    save_buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_tokens", "save_buffer_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(name, f"must be a positive integer, is {value!r}")
        for name in ("fleet", "address", "node_id", "tenant", "model_id", "weight_revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(name, f"must be text, is {value!r}")

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Read a mapping.

        Raises:
            ConfigError: a setting that does not exist, or a value that cannot be.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(extra.keys() - known):
            raise ConfigError(", ".join(unknown), f"no such setting; there are {', '.join(sorted(known))}")
        return cls(**extra)


class Membership:
    """This process's place in a fleet.

    Threads: any. Blocking: `join` as long as Ray takes to answer or not, some seconds.
    """

    def __init__(self, settings: Settings) -> None:
        _log_as_vllm()
        self._settings = settings
        self._fleet: kvfleet.Fleet | None = None
        self._closed = threading.Event()

    def join(self, then: Callable[[kvfleet.Fleet], None]) -> None:
        """Call `then` with the fleet: now if there is one, else from another thread as soon as there is."""
        if self._try(then):
            return
        try:
            threading.Thread(target=self._keep_trying, args=(then,), name="kvfleet-join", daemon=True).start()
        except RuntimeError as error:  # no more threads
            _log.warning("kvfleet: no fleet is looked for again: %s", error)

    def _keep_trying(self, then: Callable[[kvfleet.Fleet], None]) -> None:
        while not self._closed.wait(_RETRY_S):
            if self._try(then):
                return

    def _try(self, then: Callable[[kvfleet.Fleet], None]) -> bool:
        fleet = None
        try:
            fleet = _connect(self._settings)
            then(fleet)
        except Exception as error:  # noqa: BLE001  of Ray's, of many kinds: the engine serves without us
            _log.warning(
                "kvfleet: no KV is reused or kept, as there is no fleet; looked for again every %.0f s: %s",
                _RETRY_S,
                error,
            )
            if fleet is not None:
                fleet.close()
            return False
        _log.info("kvfleet: joined fleet %r", fleet.config.name)
        self._fleet = fleet
        if self._closed.is_set():
            fleet.close()
        return True

    def close(self) -> None:
        """Finish this process's clients."""
        self._closed.set()
        if self._fleet is not None:
            self._fleet.close()


def _log_as_vllm() -> None:
    """Have our log lines look like vLLM's, unless this process has logging of its own."""
    ours, theirs = logging.getLogger("kvfleet"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(max(theirs.level, logging.WARNING))
        logging.getLogger("kvfleet.connectors").setLevel(theirs.level)


def _connect(settings: Settings) -> kvfleet.Fleet:
    """Connect, and leave SIGTERM to vLLM, which ends its requests in peace: Ray would have the process exit at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return kvfleet.connect(settings.fleet, address=settings.address, node_id=settings.node_id)
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def attached(client: Client) -> Client:
    """The client, attached to its node now if that can be; it tries again by itself otherwise."""
    try:
        client.attach()
    except KvFleetError as error:
        _log.warning("this node's arena cannot be used: %s", error)
    return client
