"""What a cache of some size does for a traffic: hits by tier from the simulator, times by the planner's arithmetic.

The fleet is simulated as one node with the memory of all: requests go where their prefix is, as a router that knows
prefixes sends them. Engines and links of that node take no time, so that the answer is about capacity alone. What
each request would take is then worked out for it alone, without a queue: what was found is loaded as the planner
decides, the rest is computed. `kvfleet simulate` has queues, links and routers.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvfleet.core.outcomes import Outcome, Source
from kvfleet.core.planner import Piece, Planner
from kvfleet.core.policies import POLICIES
from kvfleet.core.speeds import PrefillSpeed, Speed
from kvfleet.errors import ConfigError
from kvfleet.sim.config import EngineConfig, SimConfig, SimDrives
from kvfleet.sim.fleet import SimFleet
from kvfleet.sim.replay import Replay
from kvfleet.sim.trace import Request
from kvfleet.sizing.hardware import GB, Engine, Fleet
from kvfleet.sizing.traffic import Traffic

__all__ = ["Served", "Sizes", "serve", "serve_memory"]

# Only the number of blocks matters to a simulation without time. These fill their slots.
_SIM_BLOCK = 1 << 20
_AT_ONCE = Speed(0.0, math.inf)
_DRIVE_BLOCKS_MIN = 8  # an index takes the room of some
_ROOMY = 1 << 16  # blocks
_NO_BUDGET = 1e6  # drive writes a day: what drives have to bear is asked, not told


@dataclass(frozen=True, slots=True)
class Sizes:
    """Room in each tier of the whole fleet, bytes."""

    dram: int
    nvme: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """Of all."""
        return self.dram + self.nvme + self.shared


@dataclass(slots=True)
class Served:
    """What became of the requests that were counted.

    Attributes:
        requests: how many.
        prompt_tokens: of them.
        tokens: of these, by the tier that they were found in.
        loaded_tokens: of these, by the tier, those that the planner loads: where that is faster than computing.
        compute_s: seconds of prefill without a cache.
        computed_s: seconds of prefill with it.
        ttft_s: of each request with the cache.
        plain_ttft_s: of each without.
        drive_bytes: written to drives, of the share that was simulated, with no write budget.
        shared_objects: written to the shared tier, of the share that was simulated.
        span_s: for which these two were counted.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    compute_s: float = 0.0
    computed_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    plain_ttft_s: array[float] = field(default_factory=lambda: array("d"))
    drive_bytes: int = 0
    shared_objects: int = 0
    span_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of prompts that were found."""
        return self.tokens.total() / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def loaded_rate(self) -> float:
        """Share of the tokens of prompts that were found and are worth their load."""
        return self.loaded_tokens.total() / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved(self) -> float:
        """Share of the seconds of prefill that the cache saves."""
        return 1 - self.computed_s / self.compute_s if self.compute_s else 0.0


def serve(traffic: Traffic, sizes: Sizes, token_bytes: int, fleet: Fleet, engine: Engine, *, policy: str) -> Served:
    """Have a cache of these sizes serve a traffic, from empty.

    Args:
        traffic: its share of the fleet's sessions is given the same share of the cache.
        sizes: of the fleet's tiers.
        token_bytes: of a token's KV.
        fleet: its speeds and the ratings of its drives.
        engine: its speed.
        policy: what the cache keeps, by name.

    Raises:
        ConfigError: a tier holds next to nothing.
    """
    config = _config(traffic, sizes, token_bytes, policy)
    simulated = SimFleet(config, traffic.block_tokens)
    counted = _Counted(traffic, token_bytes, fleet, engine.prefill)
    simulated.on_answer = counted.answer
    simulated.run(traffic.requests)
    served = counted.served
    scale = traffic.block_tokens * token_bytes / _SIM_BLOCK
    served.drive_bytes = int(sum(node.drive.written_bytes for node in simulated.nodes if node.drive) * scale)
    served.shared_objects = 0 if simulated.shared is None else simulated.shared.written_bytes // _SIM_BLOCK
    served.span_s = traffic.span_s
    return served


def serve_memory(
    traffic: Traffic, num_bytes: float, token_bytes: int, fleet: Fleet, engine: Engine, *, policy: str
) -> Served:  # fmt: skip
    """The same for memory alone, by the policy alone: several times faster than `serve`, and a little better."""
    blocks = int(num_bytes * traffic.share / (traffic.block_tokens * token_bytes))
    cache = Replay(POLICIES[policy](max(1, blocks)), max(1, blocks))
    counted = _Counted(traffic, token_bytes, fleet, engine.prefill)
    for request in traffic.requests:
        counted.answer(request, 0, [Source.DRAM] * cache.request(request))
    return counted.served


def _config(traffic: Traffic, sizes: Sizes, token_bytes: int, policy: str) -> SimConfig:
    """The share of the fleet that the traffic is of, as one node, in blocks that suit the simulator."""
    block_bytes = traffic.block_tokens * token_bytes
    # More room than for all blocks is never used, and the simulator's tables would grow with it.
    enough = max(_ROOMY, 2 * sum(len(request.keys) for request in traffic.requests))

    def scaled(num_bytes: float) -> int:
        return min(enough, int(num_bytes * traffic.share / block_bytes)) * _SIM_BLOCK

    def check(name: str, what: str, num_bytes: int, blocks: int) -> None:
        if scaled(num_bytes) < blocks * _SIM_BLOCK:
            raise ConfigError(
                name,
                f"{what} of the fleet has {num_bytes / GB:.3g} GB in all: for what is simulated it must have room for "
                f"{blocks} of its blocks, {blocks * block_bytes / traffic.share / GB:.3g} GB",
            )

    check("dram", "the memory", sizes.dram, 1)
    drives = SimDrives()
    if sizes.shared:
        check("shared", "the shared tier", sizes.shared, 1)
    if sizes.nvme:
        check("nvme", "the drives", sizes.nvme, _DRIVE_BLOCKS_MIN)
        drives = SimDrives(max_bytes=scaled(sizes.nvme), read=_AT_ONCE, write_bytes_per_s=math.inf, dwpd=_NO_BUDGET)
    return SimConfig(
        block_bytes=_SIM_BLOCK,
        dram_bytes=scaled(sizes.dram),
        drives=drives,
        shared=_AT_ONCE if sizes.shared else None,
        shared_bytes_max=scaled(sizes.shared) if sizes.shared else None,
        dram=_AT_ONCE,
        network=_AT_ONCE,
        engine=EngineConfig(prefill=PrefillSpeed(0.0), planned=False),
        policy=policy,
    )


class _Counted:
    """Takes in what became of each request, but those that only warm the cache."""

    def __init__(self, traffic: Traffic, token_bytes: int, fleet: Fleet, prefill: PrefillSpeed) -> None:
        self.served = Served()
        self._traffic = traffic
        self._block_bytes = token_bytes * traffic.block_tokens
        self._prefill = prefill
        self._planner = Planner()
        self._planner.tell_prefill(prefill)
        for source, speed in (("dram", fleet.dram), ("nvme", fleet.drives.speed), ("shared", fleet.shared)):
            self._planner.tell(source, speed)

    def answer(self, request: Request, _node: int, outcomes: Sequence[Outcome]) -> None:
        """A request was served."""
        if request.time_s < self._traffic.counted_from_s:
            return
        served, tokens = self.served, self._traffic.block_tokens
        pieces = list(_pieces(outcomes))
        plan = self._planner.plan(pieces, self._block_bytes, tokens, request.prompt_tokens, can_split=False)
        plain_s = self._prefill.seconds(0, request.prompt_tokens)
        loaded = plan.head.stop
        # An engine computes the last token of a prompt in any case.
        rest = max(1, request.prompt_tokens - loaded * tokens)
        computed_s = self._prefill.seconds(request.prompt_tokens - rest, rest)
        served.requests += 1
        served.prompt_tokens += request.prompt_tokens
        served.compute_s += plain_s
        served.computed_s += computed_s
        served.plain_ttft_s.append(plain_s)
        served.ttft_s.append(computed_s + (plan.predicted_load_s or 0.0))
        for piece in pieces:
            served.tokens[piece.sources[0]] += (piece.stop - piece.start) * tokens
            served.loaded_tokens[piece.sources[0]] += max(0, min(piece.stop, loaded) - piece.start) * tokens


def _pieces(outcomes: Sequence[Outcome]) -> list[Piece]:
    """Runs of the blocks that came."""
    pieces: list[Piece] = []
    for outcome, run in groupby(outcomes):
        if isinstance(outcome, Source):
            start = pieces[-1].stop if pieces else 0
            pieces.append(Piece(start, start + len(list(run)), (outcome.value,)))
    return pieces
