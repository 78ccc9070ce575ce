"""Which blocks are one session's alone, as far as stores tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvfleet.core.block import BlockKey

__all__ = ["Sessions"]


class Sessions:
    """The sessions that stored blocks on a node, and what of it nobody else has built on.

    A block is that session's that brought it first. It is shared, with all before it, as soon as another session, or a
    store without one, brings it too or a block right behind it. So a system prompt is no session's from the second one
    on.

    Bounded: of more than `keys_max` blocks the first ones are forgotten, and are nobody's. O(1) a block, as each is
    shared once. Threads: none of its own; calls must not overlap.
    """

    def __init__(self, keys_max: int) -> None:
        """Start empty."""
        assert keys_max > 0, "something is remembered"
        self._max = keys_max
        # Owner, b"" for shared, and parent. Not a dict: one from which the first go gets slow.
        self._blocks: OrderedDict[BlockKey, tuple[bytes, BlockKey | None]] = OrderedDict()
        self._owned: dict[bytes, dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def is_shared(self, key: BlockKey) -> bool:
        """Whether more than one session has built on a block, as far as is known."""
        return key in self._blocks and not self._blocks[key][0]

    def stored(self, session: bytes, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """A session, or none (b""), has brought consecutive blocks of a prefix.

        Args:
            session: 16-byte digest.
            keys: also of those that were here before.
            parent: of the first of them.
        """
        for key in (parent, *keys):
            if key is None:
                continue
            if key in self._blocks:
                self._share(key, session)
            elif session and key is not parent:
                self._blocks[key] = session, parent
                self._owned.setdefault(session, {})[key] = None
            parent = key
        while len(self._blocks) > self._max:
            self._forget(next(iter(self._blocks)))

    def retire(self, session: bytes) -> list[BlockKey]:
        """End a session. Returns the blocks that are its alone, and forgets them; what it shares stays shared."""
        keys = list(self._owned.get(session, ()))
        for key in keys:
            self._forget(key)
        return keys

    def _share(self, key: BlockKey | None, session: bytes) -> None:
        """A block is used by a session: others that own it, or a block before it, do so no more."""
        while key is not None and key in self._blocks:
            owner, parent = self._blocks[key]
            if owner in (b"", session):
                return
            self._disown(key, owner)
            self._blocks[key] = b"", parent
            key = parent

    def _forget(self, key: BlockKey) -> None:
        owner, _ = self._blocks.pop(key)
        if owner:
            self._disown(key, owner)

    def _disown(self, key: BlockKey, owner: bytes) -> None:
        owned = self._owned[owner]
        del owned[key]
        if not owned:
            del self._owned[owner]
