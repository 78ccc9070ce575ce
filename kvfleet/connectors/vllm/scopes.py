"""Clients of one engine process: one for the model, one more for each adapter in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvfleet.client import Client
from kvfleet.connectors.vllm.identity import AdapterRef

__all__ = ["Scope", "ScopedClients"]

# Each client maps the arena: enough for the adapters that one engine can have active, and bounded.
_CLIENTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Scope:
    """What tells the blocks of one engine apart besides its model.

    Attributes:
        adapter: the request's LoRA adapter, or None.
        reset: a random word once the engine was told to forget its cache, as it is after its weights were changed
            in place: nobody knows what they are then, so its blocks are nobody else's.
    """

    adapter: AdapterRef | None = None
    reset: str = ""


class ScopedClients:
    """Makes and keeps the clients.

    Threads: any. Blocking: `get`, while a client is made.

    Args:
        make: makes a scope's client, attached to the node.
    """

    def __init__(self, make: Callable[[Scope], Client]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._clients: OrderedDict[Scope, Client] = OrderedDict()

    def ready(self, scope: Scope) -> Client | None:
        """The client of a scope, None if `get` has not made it yet."""
        with self._lock:
            client = self._clients.get(scope)
            if client is not None:
                self._clients.move_to_end(scope)
            return client

    def get(self, scope: Scope) -> Client:
        """The client of a scope, made if need be. The one used longest ago is closed when there are too many."""
        with self._making:
            client = self.ready(scope)
            if client is not None:
                return client
            client = self._make(scope)
            with self._lock:
                self._clients[scope] = client
                surplus = [self._clients.popitem(last=False)[1] for _ in range(len(self._clients) - _CLIENTS_MAX)]
        for old in surplus:
            old.close()
        return client

    def all(self) -> list[Client]:
        """Every client there is now."""
        with self._lock:
            return list(self._clients.values())
