"""What became of one request, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from typing_extensions import override

from kvfleet.core.layout import BlockLayout
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.planner import Plan
from kvfleet.core.totals import UNCLAIMED
from kvfleet.hits import HitRun, Loaded, PrefixHit

__all__ = [
    "WORDS", "Explanation", "Part", "explain", "prompt_times", "show_bytes", "show_count", "show_time", "words",
]  # fmt: skip

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

WORDS: Mapping[str, str] = {
    Source.DRAM.value: "came from this node's memory",
    Source.NVME.value: "came from this node's drives",
    Source.PEER.value: "came from another node",
    Source.SHARED.value: "came from the shared tier",
    Miss.NEVER_STORED.value: "nobody has stored it",
    Miss.NOT_ADMITTED.value: "it was offered, and not taken: worth too little, no room, a draining node, or no manager",
    Miss.EVICTED.value: "it was there, and had to make room",
    Miss.HOLDER_LOST.value: "the node that had it is gone",
    Miss.UNKNOWN.value: "never stored, or gone for too long to be remembered",
    Miss.NO_ROOM.value: "this node's memory had no room for it in time",
    Miss.UNREACHABLE.value: "the node that has it failed, or is known not to answer",
    Miss.STORAGE_FAILED.value: "the storage that has it, the shared tier or a drive, failed or does not answer",
    Miss.TOO_SLOW.value: "its holder sent nothing for too long",
    Miss.OBJECT_LOST.value: "its copy in the shared tier was deleted or damaged by something else than the fleet",
    Miss.CORRUPT.value: "its bytes were wrong",
    Miss.LAYOUT_REFUSED.value: "it is there, but of another layout",
    Miss.DEADLINE.value: "the time was up",
    Miss.SLOWER_THAN_COMPUTE.value: "computing it was faster than loading it",
    Miss.MANAGER_UNAVAILABLE.value: "this node's manager does not answer",
    Miss.DIRECTORY_UNAVAILABLE.value: "the directory does not answer",
    Miss.BEHIND_MISS.value: "it was found, but a block before it did not come",
    UNCLAIMED: "it was found, and not loaded",
}
"""What an outcome means, of one block."""

_CALLS = {
    "attach": "asked this node's manager for its memory",
    "locate": "asked the directory",
    "load": "asked this node's manager to bring blocks",
}


def words(outcome: Outcome | str | None) -> str:
    """An outcome in plain words."""
    return WORDS[outcome.value if isinstance(outcome, Source | Miss) else outcome] if outcome is not None else ""


def show_bytes(num_bytes: int) -> str:
    """A size in the largest unit that leaves it at least 1."""
    exponent = max(0, min(len(_UNITS) - 1, (num_bytes.bit_length() - 1) // 10))
    return f"{num_bytes / 1024**exponent:.{1 if exponent else 0}f} {_UNITS[exponent]}"


def show_count(number: int, noun: str, plural: str = "") -> str:
    """So many of something, by its name in the singular, and in the plural if that is not regular."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def show_time(seconds: float) -> str:
    """A duration in milliseconds, or in seconds if it is long."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks [start, stop) of a request that have all in common.

    Attributes:
        said: where they were said to be, in words; "" if nowhere.
        outcome: what became of them; None if they were not loaded (yet).
        num_bytes: copied into the engine's memory.
        reason: the outcome in words.
    """

    start: int
    stop: int
    said: str
    outcome: Outcome | None
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one request. `str` of it is for people.

    Attributes:
        label: the engine's name for it, or "".
        block_tokens: tokens in a block.
        start_block: blocks before it were not asked for: the engine had them.
        asked_blocks: whole blocks of the prompt, those included.
        hit_blocks: where the hit ends.
        parts: cover blocks [start_block, asked_blocks) in order.
        missing: why the first block behind the hit is missing; None if none is.
        lookup_s: how long the lookup took.
        lookup_calls: remote calls it took, by name.
        loaded_blocks: that came; None if there was no load (yet).
        load_s: how long the load took.
        load_calls: remote calls it took, by name.
        plan: by which it was loaded; None if there was none.
        ready_s: from the lookup on until the engine had the prompt's KV; None if it has not said.
    """

    label: str
    block_tokens: int
    start_block: int
    asked_blocks: int
    hit_blocks: int
    parts: tuple[Part, ...]
    missing: Miss | None
    lookup_s: float
    lookup_calls: tuple[str, ...]
    loaded_blocks: int | None = None
    load_s: float = 0.0
    load_calls: tuple[str, ...] = ()
    plan: Plan | None = None
    ready_s: float | None = None

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """One for the whole, one a part, one a step."""
        asked, found = self.asked_blocks - self.start_block, self.hit_blocks - self.start_block
        name = f"request {self.label}: " if self.label else ""
        loaded = "not loaded" if self.loaded_blocks is None else f"{self.loaded_blocks:,} loaded"
        yield f"{name}{show_count(asked, 'block')} of {self.block_tokens} tokens asked for, {found:,} found, {loaded}"
        for part in self.parts:
            numbers = f"block {part.start}" if part.stop == part.start + 1 else f"blocks {part.start}-{part.stop - 1}"
            size = f", {show_bytes(part.num_bytes)}" if part.num_bytes else ""
            tokens = f"{(part.stop - part.start) * self.block_tokens:,} tokens"
            yield f"  {numbers}, {tokens}: " + "; ".join(filter(None, (part.said, part.reason))) + size
        yield f"lookup: {_step(self.lookup_s, self.lookup_calls)}"
        if self.loaded_blocks is not None:
            expected_s = self.plan.predicted_load_s if self.plan is not None else None
            yield f"load: {_step(self.load_s, self.load_calls)}" + (
                f", {show_time(expected_s)} expected" if expected_s else ""
            )
        if self.plan is not None and self.plan.reason:
            yield f"plan: {show_count(self.plan.num_blocks, 'block')} to load: {self.plan.reason}"
        if self.plan is not None and self.ready_s is not None:
            yield f"prompt: {prompt_times(self.ready_s, self.plan.predicted_ttft_s, self.plan.recompute_s)}"


def prompt_times(ready_s: float | None, predicted_s: float | None, recompute_s: float | None) -> str:
    """When an engine had a prompt's KV, measured and expected; "" if nothing is known. In seconds."""
    times = (
        f"ready after {show_time(ready_s)}" if ready_s else "",
        f"{show_time(predicted_s)} expected" if predicted_s else "",
        f"{show_time(recompute_s)} without the cache" if recompute_s else "",
    )
    return ", ".join(filter(None, times))


def _step(seconds: float, calls: Sequence[str]) -> str:
    return f"{show_time(seconds)}, " + (", ".join(_CALLS[call] for call in calls) or "no remote call")


def explain(request: PrefixHit | Loaded, layout: BlockLayout) -> Explanation:
    """What became of a request; see `Client.explain`."""
    loaded = request if isinstance(request, Loaded) else None
    hit = request if isinstance(request, PrefixHit) else request.hit
    if hit is None:
        raise ValueError("request must come from a client's load, has no hit")
    parts = list(_found(hit, loaded, layout.block_bytes))
    if hit.num_blocks < hit.asked_blocks:
        reason = words(hit.missing)
        parts.append(Part(hit.num_blocks, hit.asked_blocks, "not found", hit.missing, 0, reason))
    return Explanation(
        hit.label, layout.block_tokens, hit.start_block, hit.asked_blocks, hit.num_blocks, tuple(parts), hit.missing,
        hit.lookup_s, hit.calls,
        None if loaded is None else int(loaded) // layout.block_tokens,
        0.0 if loaded is None else loaded.load_s,
        () if loaded is None else loaded.calls,
        None if loaded is None else loaded.plan,
        None if loaded is None else loaded.ready_s,
    )  # fmt: skip


def _found(hit: PrefixHit, loaded: Loaded | None, block_bytes: int) -> Iterator[Part]:
    """Parts of the hit: each of its runs, divided by what became of its blocks."""
    for run in hit.runs:
        outcomes: Sequence[Outcome | None] = [None] * (run.stop - run.start)
        if loaded is not None:
            outcomes = loaded.outcomes[run.start - hit.start_block : run.stop - hit.start_block]
        start = run.start
        for outcome, group in groupby(outcomes):
            stop = start + len(list(group))
            num_bytes = (stop - start) * block_bytes if isinstance(outcome, Source) else 0
            yield Part(start, stop, _said(run), outcome, num_bytes, words(outcome))
            start = stop


def _said(run: HitRun) -> str:
    """Where the blocks of a run were said to be."""
    places = ["in this node's memory"] if run.local else []
    if run.nvme:
        places.append("on this node's drives")
    if run.pending:
        places.append("being written on this node")
    if run.nodes:
        names = ", ".join(node[:8] for node in run.nodes[:4]) + (", ..." if len(run.nodes) > 4 else "")
        places.append(f"on node{'s' if len(run.nodes) > 1 else ''} {names}")
    if run.shared:
        places.append("in the shared tier")
    return " and ".join(places)
