"""Which weights a LoRA adapter's name stands for in one engine."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvfleet.connectors.vllm.identity import AdapterRef
from kvfleet.errors import ConfigError

__all__ = ["Adapters"]

_NAMES_MAX = 10_000


@dataclass(slots=True)
class _Known:
    number: int
    adapter: AdapterRef
    own: str = ""


class Adapters:
    """Reads adapters, each once as long as the engine keeps it.

    vLLM's own prefix cache goes by an adapter's name (0.32 by its path too): when a name gets other weights, blocks of
    the old ones are found under it. So from then on what is computed with that name is nobody else's.

    Threads: any.

    Args:
        read: an adapter's identity; may take long.
    """

    def __init__(self, read: Callable[[Any], AdapterRef]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def read(self, lora: Any) -> tuple[AdapterRef, str]:  # noqa: ANN401  vLLM's LoRARequest
        """An adapter's identity, and a random word once its name has stood for other weights, else "".

        It is read when the engine meets it: under a new name, with a new number, or told to load it again.

        Raises:
            ConfigError: it cannot be read.

        Blocking: while it is read.
        """
        name, number, again = lora.lora_name, lora.lora_int_id, getattr(lora, "load_inplace", False)
        with self._lock:
            known = self._known.get(name)
            if known is not None and known.number == number and not again:
                return known.adapter, known.own
        adapter = self._read(lora)
        with self._lock:
            known = self._known.get(name)
            if known is None:
                if len(self._known) >= _NAMES_MAX:
                    raise ConfigError("adapter", f"{name} is one of more than {_NAMES_MAX}: its KV is not kept")
                known = self._known[name] = _Known(number, adapter)
            elif known.adapter != adapter:
                known.adapter, known.own = adapter, secrets.token_hex(16)
            known.number = number
            return known.adapter, known.own
