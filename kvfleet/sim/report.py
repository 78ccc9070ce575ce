"""What a simulation showed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from kvfleet.core.outcomes import Source
from kvfleet.core.writebudget import DAY_S
from kvfleet.sim.config import SimConfig
from kvfleet.sim.fleet import SimFleet

__all__ = ["QUANTILES", "Report", "report_of", "to_json"]

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulation.

    Attributes:
        config: of the fleet.
        block_tokens: tokens in a block.
        requests: that were served.
        span_s: from the first request to the end of the last prompt.
        prompt_tokens: of all prompts.
        blocks: whole blocks of all prompts by what became of them: the tier that a hit came from, or why it missed.
        hit_rate: of whole blocks.
        token_hit_rate: of tokens of prompts that were loaded and not computed.
        compute_saved: share of the time of prefill that was not needed.
        engines_busy: share of the time that the engines computed; near 1, requests queue up.
        ttft_s: quantiles `QUANTILES` of time to first token.
        stored_blocks: that engines wrote to an arena.
        dram_blocks: that one node's arena has room for.
        drive_bytes_a_day: written to the drives of one node, on average: at the trace's pace, but at most the write
            budget of a day. Of a trace of less than a day, it is what a day would come to.
        drive_writes_a_day: the same, in rated capacities.
        peer_bytes: that went between nodes.
        shared_read_bytes: of the shared tier.
        shared_look_bytes: of these, those that were read only to learn how fast it is: they are no hits.
        shared_written_bytes: to it.
        shared_deleted_bytes: from it.
        calls: remote calls a request, by name.
        directory_rows: at the end.
        directory_bytes: memory of one row, on average; 0 if there are none.
    """

    config: SimConfig
    block_tokens: int
    requests: int
    span_s: float
    prompt_tokens: int
    blocks: dict[str, int]
    hit_rate: float
    token_hit_rate: float
    compute_saved: float
    engines_busy: float
    ttft_s: tuple[float, ...]
    stored_blocks: int
    dram_blocks: int
    drive_bytes_a_day: float
    drive_writes_a_day: float
    peer_bytes: int
    shared_read_bytes: int
    shared_look_bytes: int
    shared_written_bytes: int
    shared_deleted_bytes: int
    calls: dict[str, float]
    directory_rows: int
    directory_bytes: float

    @property
    def num_blocks(self) -> int:
        """Whole blocks of all prompts."""
        return sum(self.blocks.values())

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the arenas of the fleet have room for."""
        return self.config.num_nodes * self.dram_blocks * self.block_tokens


def report_of(fleet: SimFleet, block_tokens: int) -> Report:
    """What a fleet has done so far."""
    tally, config, nodes = fleet.tally, fleet.config, fleet.nodes
    asked = sum(tally.blocks.values())
    span_s = max(0.0, tally.last_s - tally.first_s)
    written = sum(node.drive.written_bytes for node in nodes if node.drive is not None) / len(nodes)
    rated = config.drives.rated_bytes or config.drives.max_bytes
    a_day = min(written * DAY_S / span_s if span_s else 0.0, rated * config.drives.dwpd)
    rows = fleet.directory.stats().rows
    return Report(
        config=config,
        block_tokens=block_tokens,
        requests=tally.requests,
        span_s=span_s,
        prompt_tokens=tally.prompt_tokens,
        blocks={outcome.value: count for outcome, count in sorted(tally.blocks.items(), key=lambda one: -one[1])},
        hit_rate=_share(tally.hits, asked),
        token_hit_rate=_share(tally.loaded_tokens, tally.prompt_tokens),
        compute_saved=1 - _share(tally.prefill_s, tally.recompute_s) if tally.recompute_s else 0.0,
        engines_busy=_share(tally.prefill_s, span_s * len(nodes)),
        ttft_s=quantiles(tally.ttft_s, QUANTILES),
        stored_blocks=tally.stored,
        dram_blocks=nodes[0].arena.num_slots,
        drive_bytes_a_day=a_day,
        drive_writes_a_day=_share(a_day, rated),
        peer_bytes=sum(node.into.num_bytes for node in nodes),
        shared_read_bytes=sum(node.objects.num_bytes for node in nodes if node.objects is not None),
        shared_look_bytes=tally.looks[Source.SHARED] * config.block_bytes,
        shared_written_bytes=0 if fleet.shared is None else fleet.shared.written_bytes,
        shared_deleted_bytes=0 if fleet.shared is None else fleet.shared.deleted_bytes,
        calls={name: _share(count, tally.requests) for name, count in sorted(tally.calls.items())},
        directory_rows=rows,
        directory_bytes=_share(row_bytes(fleet), rows),
    )


def quantiles(values: Iterable[float], wanted: Sequence[float]) -> tuple[float, ...]:
    """Of nearest rank; zeros if there are no values."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0 for q in wanted)


def row_bytes(fleet: SimFleet) -> int:
    """Memory of all rows of the directory: their tables, keys and bits, as Python counts them."""
    total = 0
    bits: dict[int, int] = {}
    for part in fleet.directory.tables():
        total += sys.getsizeof(part) if part else 0
        total += sum(map(sys.getsizeof, part))
        bits.update((id(value), sys.getsizeof(value)) for value in part.values())
    return total + sum(bits.values())


def to_json(reports: Sequence[Report]) -> str:
    """All figures."""
    return json.dumps([asdict(report) for report in reports], indent=2)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def by_tier(report: Report) -> dict[str, float]:
    """Share of all whole blocks that came from each tier."""
    return {source.value: _share(report.blocks.get(source.value, 0), report.num_blocks) for source in Source}
