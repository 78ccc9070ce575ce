"""Hold for the next turn: keep what conversations come back to, for as long as they are likely to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from kvfleet.core.block import BlockKey
from kvfleet.core.hints import NO_HINTS, Hints
from kvfleet.core.policies.base import Newcomer, Policy, Worth
from kvfleet.core.policies.classes import ClassedLeaves, Entry
from kvfleet.core.policies.forest import Forest, Node
from kvfleet.core.policies.lives import Life, Lives, Turn
from kvfleet.core.reuseclasses import NUM_KINDS, is_over, kind_of_turn

__all__ = ["HoldTurn"]

_SAME_TURN_S = 30.0  # longest pause within a turn, as when an engine stores what it produces block by block
_ORPHANS, _UNWANTED = -2, -1  # queues that go first
_BOOSTS = (0.25, 1.0, 4.0)  # what a priority of -1, 0 and 1 makes of a block's worth


@dataclass(slots=True, eq=False)
class _Node(Node):
    life: Life = field(kw_only=True)


class HoldTurn(Policy):
    """Evicts the leaf that is worth least, and lets in only what is worth more.

    What a block is worth is learned (see `ReuseModel`), for classes that differ in how likely a prefix is continued:

    - Blocks that extend the end of a known prefix are of the *turn* after it; others begin with turn 1. Those of
      a turn, and those before them that no other prefix uses, are classed by its number and by how many new blocks it
      has: people go on with a conversation of many turns, and seldom with one that began with a long document.
    - Blocks that prefixes of different ends share are classed by how often they were used.

    Each class is a queue by last use. The heads of the queues compete, so a victim costs the same however many blocks
    there are. Keys of blocks that left or were declined are remembered, eight times as many as there is room for: the
    model sees all traffic, whatever the policy does. Until it has seen enough of it, and where it does not promise more
    hits (see `ReuseModel.rules`), this is leaf-first LRU that takes everything. Of equal worth, the one used longest
    ago goes first.

    Worked by hand, with the times of use; blocks of one letter are of one conversation:

        a1 a2       0, 0    turn 1, growth 2
        a3        100       turn 2, growth 1; a2, which was read, and a1 are part of it now
        b1        100       after a1, which they share now: turn 1 again, as it does not extend an end
        c1 c2     100       turn 1
        victims(2) = b1, c2   nothing is known yet: leaves by last use, and by class and key where that is equal
        retire(a3):  victims(1) = a3

    Args:
        capacity: blocks there is room for, about.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "there is room for a block"
        self._forest: Forest[_Node] = Forest()
        self._nodes = self._forest.nodes
        self._lives = Lives(capacity)
        self._speaker: int | None = None  # the lowest shard that was declined
        self._model = self._lives.model
        self._leaves = ClassedLeaves(self._nodes, self._entry, self._price)
        self._now = -math.inf

    @override
    def __len__(self) -> int:
        return len(self._nodes)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    @override
    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints = NO_HINTS, *, passing: bool = False
    ) -> None:
        assert key not in self._nodes, "key is absent"
        self._tick(now)
        life = self._come(key, parent, now, hints)
        self._lives.back(key)
        node = _Node(key, parent, passing=passing, life=life)
        self._forest.add(node)
        self._leaves.loosen(node)

    @override
    def touch(self, key: BlockKey, now: float, uses: int = 1) -> None:
        node = self._nodes[key]
        life = node.life
        if now < life.last:
            return
        self._tick(now)
        if uses:
            self._use(key, life, now, final=False)
            node.passing = False
        elif now > life.last:
            self._lives.move(life, now)
        if not node.children:
            self._leaves.loosen(node)

    @override
    def remove(self, key: BlockKey) -> None:
        node = self._nodes[key]
        for orphan in self._forest.remove(key):
            if not orphan.children:
                self._leaves.loosen(orphan)
        self._leaves.removed(key)
        self._lives.gone(key, node.life)
        if node.parent is not None and not node.parent.children:
            self._leaves.loosen(node.parent)

    @override
    def retire(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and node.life.turn is not None:
                self._lives.join(node.life, node.life.turn, retired=True)
                self._leaves.loosen(node)

    @override
    def victims(self, need: int, worth: Worth, *, newcomers: Sequence[Newcomer] = ()) -> list[BlockKey]:
        assert need > 0, "something is needed"
        if newcomers:
            self._tick(newcomers[-1].now)
        bars = self._bars(newcomers) if newcomers and self._model.rules else []
        chosen: list[BlockKey] = []
        gained = 0
        self._leaves.begin()
        while gained < need and (offer := self._leaves.cheapest()) is not None:
            price, node = offer
            if bars and price >= bars[min(gained, len(bars) - 1)]:
                break
            gain = worth(node.key)
            if gain > 0:
                gained += gain
                chosen.append(node.key)
                self._leaves.goes(node)
        self._leaves.end()
        return chosen

    @override
    def resize(self, capacity: int) -> None:
        self._lives.resize(capacity)

    @override
    def decline(self, newcomers: Sequence[Newcomer]) -> None:
        for newcomer in newcomers:
            # One shard speaks for all of its block; the first one may be another node's.
            if self._speaker is None or newcomer.shard < self._speaker:
                self._speaker = newcomer.shard
            if newcomer.shard == self._speaker and newcomer.key not in self._nodes:  # else another one was admitted
                self._tick(newcomer.now)
                life = self._come(newcomer.key, newcomer.parent, newcomer.now, newcomer.hints)
                self._lives.gone(newcomer.key, life)

    @override
    def expected_uses(self, key: BlockKey) -> float | None:
        node = self._nodes[key]
        if not self._model.ready:
            return 0.0 if node.life.retired else None
        return self._model.chance(node.life.kind(), self._now - node.life.last)

    @override
    def is_leaf(self, key: BlockKey) -> bool:
        return not self._nodes[key].children

    @override
    def goes_first(self, key: BlockKey) -> bool:
        node = self._nodes[key]
        return node.orphan or node.life.retired or node.passing

    @override
    def descendants(self, key: BlockKey) -> list[BlockKey]:
        return [node.key for node in self._nodes[key].descendants()]

    # --- what is known of blocks

    def _tick(self, now: float) -> None:
        if now > self._now:
            self._now = now
            if now >= self._model.due:
                self._lives.tick(now)

    def _known(self, key: BlockKey | None) -> Life | None:
        """The life of a block, here or remembered."""
        if key is None:
            return None
        node = self._nodes.get(key)
        return self._lives.of_gone(key) if node is None else node.life

    def _use(self, key: BlockKey, life: Life, now: float, *, final: bool) -> None:
        self._lives.use(key, life, now)
        if life.child is None and life.turn is not None:
            turn = Turn(life.turn.number + 1, again=True, priority=life.turn.priority)
            self._begin_turn(turn, life, final=final)

    def _come(self, key: BlockKey, parent: BlockKey | None, now: float, hints: Hints) -> Life:
        """A block that is not here is used."""
        life, above = self._known(key), self._known(parent)
        if life is None:
            turn = self._turn(above, now, hints)
            if above is None or turn is not above.turn:
                turn = Turn(turn.number, 0, priority=hints.priority)
                self._begin_turn(turn, above, final=hints.final)
            turn.growth += 1
            life = self._lives.begin(now, turn, parent)
            life.retired = hints.final
        else:
            self._use(key, life, now, final=hints.final)
        if above is not None:
            if above.child is None:
                above.child = key
            elif above.child != key:
                above.forked = True
        return life

    @staticmethod
    def _turn(above: Life | None, now: float, hints: Hints) -> Turn:
        """The turn of an unknown block after `above`: that one's, if it goes on, or what a new one is like."""
        if above is None or above.turn is None or above.child is not None:
            number = 1
        elif not above.turn.again and now - above.last <= _SAME_TURN_S:
            return above.turn
        else:
            number = above.turn.number + (not above.turn.again)
        return Turn(number if hints.turn is None else max(1, hints.turn))

    def _begin_turn(self, turn: Turn, life: Life | None, *, final: bool) -> None:
        """What is before a new turn is part of it as far as no other prefix uses it."""
        shared = life is not None and life.child is not None
        while life is not None:
            shared = shared or life.forked
            if life.turn is (None if shared else turn):
                break  # so it is above; or what was said of parents goes round in a circle
            self._lives.join(life, None if shared else turn, retired=final and not shared)
            life = self._known(life.parent)

    # --- queues

    def _bars(self, newcomers: Sequence[Newcomer]) -> list[float]:
        """What each newcomer is worth: victims must be worth less."""
        first = newcomers[0]
        if first.parent is not None and first.parent not in self._nodes:
            return [_UNWANTED]
        lives = [self._lives.of_gone(newcomer.key) for newcomer in newcomers]
        num_known = next((i for i, life in enumerate(lives) if life is None), len(lives))
        above = lives[num_known - 1] if num_known else self._known(first.parent)
        turn = self._turn(above, first.now, first.hints)
        growth = len(lives) - num_known + turn.growth
        boost = _BOOSTS[1 + first.hints.priority]
        final = first.hints.final
        worth = self._model.worth(kind_of_turn(0 if final else turn.number, growth), 0.0) * boost
        return [
            worth
            if life is None or (final and life.turn is not None)
            else max(worth, self._model.worth(life.kind(), 0.0) * boost)
            for life in lives
        ]

    def _price(self, entry: Entry) -> float:
        """What a leaf is worth now."""
        queue, last, _ = entry
        if queue < 0:
            return float(queue)
        priority, number = divmod(queue, NUM_KINDS)
        if not self._model.rules:
            return float(_UNWANTED if is_over(number) else 0)
        return self._model.worth(number, self._now - last) * _BOOSTS[priority]

    def _entry(self, node: _Node) -> Entry:
        """What its entry should be."""
        life = node.life
        if node.orphan:
            return (_ORPHANS, life.last, node.key)
        if node.passing:
            return (_UNWANTED, life.last, node.key)
        number, turn = life.number, life.turn
        if number < 0:
            number = life.kind()
        return (number + NUM_KINDS * (1 if turn is None else 1 + turn.priority), life.last, node.key)
