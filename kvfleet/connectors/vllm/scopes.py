"""Clients of one engine process: one for the model, one more for each adapter in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import kvfleet
from kvfleet.client import Client
from kvfleet.connectors.vllm.identity import AdapterRef, scoped
from kvfleet.connectors.vllm.joining import attached
from kvfleet.core.layout import ModelSpec

__all__ = ["Scope", "ScopedClients", "clients_of", "spec_of"]

# Enough for the adapters that one engine can have active, and bounded.
_CLIENTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Scope:
    """What tells the blocks of one engine apart besides its model.

    Attributes:
        adapter: the request's LoRA adapter, or None.
        reset: random words, once the engine was told to forget its cache, as it is after its weights were changed in
            place, or an adapter's name got other weights: such blocks are nobody else's.
    """

    adapter: AdapterRef | None = None
    reset: str = ""


class ScopedClients:
    """Makes and keeps the clients.

    Threads: any. Blocking: `get`, while that scope's client is made.

    Args:
        make: makes a scope's client, attached to the node.
        failed: told what failed, with the error.
    """

    def __init__(self, make: Callable[[Scope], Client], failed: Callable[[str, Exception], None]) -> None:
        self._make = make
        self._failed = failed
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._preparing: set[Scope] = set()
        self._clients: OrderedDict[Scope, Client] = OrderedDict()

    def ready(self, scope: Scope) -> Client | None:
        """The client of a scope, None if it is not made yet."""
        with self._lock:
            client = self._clients.get(scope)
            if client is not None:
                self._clients.move_to_end(scope)
            return client

    def get(self, scope: Scope) -> Client:
        """The client of a scope, made if need be. One used long ago is closed when there are too many."""
        return self.ready(scope) or self._made(scope)

    def prepare(self, scope: Scope) -> None:
        """Have the client of a scope made, on a thread of its own, for a later `ready`."""
        with self._lock:
            if scope in self._preparing or len(self._preparing) == _CLIENTS_MAX:
                return
            self._preparing.add(scope)
        try:
            threading.Thread(target=self._prepare, args=(scope,), name="kvfleet-client", daemon=True).start()
        except RuntimeError as error:  # no more threads: the next request of this scope tries again
            with self._lock:
                self._preparing.discard(scope)
            self._failed("client", error)

    def _prepare(self, scope: Scope) -> None:
        try:
            self.get(scope)
        except Exception as error:  # noqa: BLE001  on a thread of ours: nobody else would hear of it
            self._failed("client", error)
        finally:
            with self._lock:
                self._preparing.discard(scope)

    def _made(self, scope: Scope) -> Client:
        with self._making:
            client = self.ready(scope)
            if client is not None:
                return client
            client = self._make(scope)
            with self._lock:
                self._clients[scope] = client
                # The model's own stays: it is used again, and its memory is what a device was told of.
                others = [other for other in self._clients if other != Scope()]
                surplus = [self._clients.pop(other) for other in others[: max(0, len(self._clients) - _CLIENTS_MAX)]]
        for old in surplus:
            old.close()
        return client

    def all(self) -> list[Client]:
        """Every client there is now."""
        with self._lock:
            return list(self._clients.values())


def clients_of(
    fleet: kvfleet.Fleet, spec: ModelSpec, shard: int, failed: Callable[[str, Exception], None]
) -> ScopedClients:
    """Clients of a model, that of `Scope()` made. All learn together how fast sources are.

    Blocking: while it attaches to the node.
    """

    def make(scope: Scope) -> Client:
        client, first = attached(fleet.client(spec_of(spec, scope), shard=shard)), clients.ready(Scope())
        if first is not None:
            client.planning.share(first.planning)
        return client

    clients = ScopedClients(make, failed)
    clients.get(Scope())
    return clients


def spec_of(spec: ModelSpec, scope: Scope) -> ModelSpec:
    """What tells the blocks of a scope from all others."""
    return scoped(spec, scope.adapter, scope.reset)
