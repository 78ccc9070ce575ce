"""One node's cache under a trace, block by block: what a policy makes of so much room, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.core.block import KEY_BYTES, BlockKey
from kvfleet.core.hints import Hints
from kvfleet.core.policies import Newcomer, Policy
from kvfleet.sim.trace import Request, Trace

__all__ = ["Replay", "replay"]


def replay(trace: Trace, policy: Policy, capacity_blocks: int) -> int:
    """Hits in blocks of a cache with room for `capacity_blocks` that starts empty. See `Replay`."""
    node = Replay(policy, capacity_blocks)
    return sum(node.request(request) for request in trace.requests)


class Replay:
    """A cache that has what a request asks for at once, as far as it is there, and stores the rest at once.

    A hit is a block that is there with all blocks before it. What the policy decides is production code; bytes, time to
    compute and the tiers below are left to `kvfleet.sim.fleet`.

    Args:
        policy: empty.
        capacity_blocks: how many blocks there is room for.
    """

    def __init__(self, policy: Policy, capacity_blocks: int) -> None:
        assert capacity_blocks > 0, "there is room for a block"
        self._policy = policy
        self._capacity = capacity_blocks
        self._now = 0.0

    def request(self, request: Request) -> int:
        """Serve a request. Returns its hits in blocks."""
        policy = self._policy
        now = self._now = max(self._now, request.time_s)
        keys = [BlockKey(key.to_bytes(KEY_BYTES, "little")) for key in request.keys]
        hits = next((i for i, key in enumerate(keys) if key not in policy), len(keys))
        for key in keys:
            if key in policy:
                policy.touch(key, now)
        if request.final:
            policy.retire(keys)
        hints = Hints(turn=request.turn, final=request.final)
        absent = [i for i in range(hits, len(keys)) if keys[i] not in policy]
        self._admit([Newcomer(keys[i], keys[i - 1] if i else None, now, hints) for i in absent], frozenset(keys))
        return hits

    def _admit(self, newcomers: Sequence[Newcomer], protected: frozenset[BlockKey]) -> None:
        policy = self._policy
        free = min(self._capacity - len(policy), len(newcomers))
        self._insert(newcomers[:free])
        newcomers = newcomers[free:]
        if newcomers:
            victims = policy.victims(len(newcomers), lambda key: int(key not in protected), newcomers=newcomers)
            for key in victims:
                policy.remove(key)
            self._insert(newcomers[: len(victims)])
            policy.decline(newcomers[len(victims) :])

    def _insert(self, newcomers: Sequence[Newcomer]) -> None:
        for one in newcomers:
            self._policy.insert(one.key, one.parent, one.now, one.hints)
