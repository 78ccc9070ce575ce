"""The namespaces a node holds blocks of, kept beside the arena.

A record has room for a 16-bit namespace number only; the number's meaning must outlive the manager, because a
restarted manager still has to save the blocks it finds to the right place of the shared tier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from functools import lru_cache
from pathlib import Path

from kvfleet.core.layout import BlockLayout
from kvfleet.errors import TierFullError
from kvfleet.node.messages import Namespace

__all__ = ["Namespaces", "layout_of"]

MAX = 1 << 16  # a record has 16 bits for it


@lru_cache(maxsize=1024)
def layout_of(namespace: Namespace) -> BlockLayout:
    """The block layout of a namespace, parsed once."""
    return BlockLayout.from_json(namespace.layout_json)


class Namespaces:
    """Numbers for namespaces, in files `NNNNN.json` of one directory. One writer.

    Args:
        in_use: the numbers that records in the arena carry.
    """

    def __init__(self, directory: Path, in_use: Callable[[], Set[int]]) -> None:
        self._directory = directory
        self._in_use = in_use
        self._by_index: dict[int, Namespace] = {}
        self._indexes: dict[bytes, int] = {}
        directory.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(directory.glob("*.json")):
            fields = json.loads(path.read_text())
            self._remember(int(path.stem), Namespace(bytes.fromhex(fields["id"]), fields["layout"]))

    def _remember(self, index: int, namespace: Namespace) -> None:
        self._by_index[index] = namespace
        self._indexes[namespace.namespace_id] = index

    def index(self, namespace: Namespace) -> int:
        """The number of a namespace, given on first sight and durable before it is returned.

        It stays the namespace's as long as a record carries it: put it into one at once.

        Raises:
            TierFullError: the arena holds blocks of 65,536 namespaces.
        """
        known = self._indexes.get(namespace.namespace_id)
        if known is not None:
            return known
        if len(self._by_index) >= MAX:
            self._forget_unused()
        start = len(self._by_index)
        index = next(i % MAX for i in range(start, start + MAX) if i % MAX not in self._by_index)
        fields = {"id": namespace.namespace_id.hex(), "layout": namespace.layout_json}
        partial = self._directory / f"{index:05d}.partial"
        partial.write_text(json.dumps(fields))
        partial.replace(self._directory / f"{index:05d}.json")
        self._remember(index, namespace)
        return index

    def _forget_unused(self) -> None:
        unused = self._by_index.keys() - self._in_use()
        if not unused:
            raise TierFullError("dram", f"a node holds blocks of at most {MAX} namespaces")
        for index in unused:
            (self._directory / f"{index:05d}.json").unlink()
            del self._indexes[self._by_index.pop(index).namespace_id]

    def known(self, namespace_id: bytes) -> Namespace | None:
        """What is known of a namespace that this node holds blocks of, or has held."""
        index = self._indexes.get(namespace_id)
        return None if index is None else self._by_index[index]

    def __getitem__(self, index: int) -> Namespace:
        return self._by_index[index]
