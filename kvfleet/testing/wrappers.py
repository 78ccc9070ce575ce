"""Tiers around tiers: one that counts, one that fails when it is told to. Else they are what they are around."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from kvfleet.errors import TierError
from kvfleet.node.tier import Bytes, Tier

__all__ = ["Faulty", "Metered"]


class _Wrapper(Tier):
    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.block_bytes)
        self.inner = inner

    @property
    @override
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    @property
    @override
    def capacity_bytes(self) -> int | None:
        return self.inner.capacity_bytes

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        self.inner.write(record, data)

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        return self.inner.read(record, target)

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        return self.inner.delete(records)

    @override
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        return self.inner.find(records)

    @override
    def _records(self) -> Iterator[bytes]:
        return iter(self.inner)

    @override
    def _close(self) -> None:
        self.inner.close()


class Metered(_Wrapper):
    """Counts what a tier was asked and what came of it.

    Attributes:
        blocks: by outcome: `written`, `hit`, `miss`, `deleted`, and the name of an error.
        num_bytes: moved, `written` and `read`.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.blocks: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def _count(self, outcome: str, blocks: int, moved: str = "") -> None:
        with self._mutex:
            self.blocks[outcome] += blocks
            if moved:
                self.num_bytes[moved] += blocks * self.block_bytes

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        try:
            self.inner.write(record, data)
        except TierError as error:
            self._count(type(error).__name__, 1)
            raise
        self._count("written", 1, "written")

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        try:
            there = self.inner.read(record, target)
        except TierError as error:
            self._count(type(error).__name__, 1)
            raise
        self._count(*(("hit", 1, "read") if there else ("miss", 1)))
        return there

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        deleted = self.inner.delete(records)
        self._count("deleted", deleted)
        return deleted


class Faulty(_Wrapper):
    """Fails instead of doing what it was asked, when `fault` has an error for it.

    Args:
        inner: the tier.
        fault: asked before each `write`, `read`, `delete` and `find`, by that name.
    """

    def __init__(self, inner: Tier, fault: Callable[[str], TierError | None] = lambda call: None) -> None:
        super().__init__(inner)
        self._fault = fault

    def _pass(self, call: str) -> None:
        error = self._fault(call)
        if error is not None:
            raise error

    @override
    def _write(self, record: bytes, data: Bytes) -> None:
        self._pass("write")
        super()._write(record, data)

    @override
    def _read(self, record: bytes, target: Bytes) -> bool:
        self._pass("read")
        return super()._read(record, target)

    @override
    def _delete(self, records: Sequence[bytes]) -> int:
        self._pass("delete")
        return super()._delete(records)

    @override
    def _find(self, records: Sequence[bytes]) -> list[bool]:
        self._pass("find")
        return super()._find(records)
