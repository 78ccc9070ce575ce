"""Totals of what was asked for and what became of it, in a form that can be added up and kept in a few words of memory.

A total is a row of counts that only grow, one for each of `NAMES`; `Totals` is what a person or a program reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvfleet.core.outcomes import Miss, Outcome, Source

__all__ = ["BYTES_OF", "DROPPED", "INDEX", "NAMES", "OUTCOME", "UNCLAIMED", "Totals", "dropped_index"]

UNCLAIMED = "unclaimed"
"""What has become of a block that was found and not loaded (yet)."""

_DROPS = (
    "closed", "commit_lost", "deadline", "draining", "forked", "manager_unavailable", "no_room", "not_worth",
    "queue_full", "reservation_lost", "other",
)  # fmt: skip

NAMES: Sequence[str] = (
    "lookups", "loads", "asked", "hit", "stored", "stored_bytes", "already",
    *(f"outcome:{outcome.value}" for kind in (Source, Miss) for outcome in kind),
    *(f"bytes:{source.value}" for source in Source),
    *(f"dropped:{reason}" for reason in _DROPS),
)  # fmt: skip

INDEX: Mapping[str, int] = {name: index for index, name in enumerate(NAMES)}
OUTCOME: Mapping[Outcome, int] = {o: INDEX[f"outcome:{o.value}"] for kind in (Source, Miss) for o in kind}
BYTES_OF: Mapping[Source, int] = {source: INDEX[f"bytes:{source.value}"] for source in Source}
DROPPED: Mapping[str, int] = {reason: INDEX[f"dropped:{reason}"] for reason in _DROPS}


def dropped_index(reason: str) -> int:
    """Where blocks of dropped stores are counted; reasons without a count of their own are `other`."""
    return DROPPED.get(reason, DROPPED["other"])


@dataclass(frozen=True, slots=True)
class Totals:
    """What clients asked for, and what became of it.

    Attributes:
        lookups: of prompts.
        loads: of hits.
        asked_blocks: whole blocks of all lookups.
        hit_blocks: how many of them were said to be there.
        outcomes: blocks by `Source`, by `Miss`, or `unclaimed`; their sum is `asked_blocks`. `unclaimed` may be below
            zero for one client that loads what another has looked up; not so in a sum over both.
        bytes_by_source: copied into engines' memory.
        stored_blocks: written by stores; `stored_bytes` likewise; `already_blocks` were there.
        dropped_blocks: given up by stores, by reason.
    """

    lookups: int = 0
    loads: int = 0
    asked_blocks: int = 0
    hit_blocks: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    bytes_by_source: Mapping[str, int] = field(default_factory=dict)
    stored_blocks: int = 0
    stored_bytes: int = 0
    already_blocks: int = 0
    dropped_blocks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Sequence[int]) -> Totals:
        """What a row of counts says."""
        assert len(counts) == len(NAMES)
        outcomes = _named("outcome:", counts)
        unclaimed = counts[INDEX["asked"]] - sum(outcomes.values())
        if unclaimed:
            outcomes[UNCLAIMED] = unclaimed
        return cls(
            lookups=counts[INDEX["lookups"]],
            loads=counts[INDEX["loads"]],
            asked_blocks=counts[INDEX["asked"]],
            hit_blocks=counts[INDEX["hit"]],
            outcomes=outcomes,
            bytes_by_source=_named("bytes:", counts),
            stored_blocks=counts[INDEX["stored"]],
            stored_bytes=counts[INDEX["stored_bytes"]],
            already_blocks=counts[INDEX["already"]],
            dropped_blocks=_named("dropped:", counts),
        )

    @classmethod
    def sum(cls, totals: Iterable[Totals]) -> Totals:
        """All of them together."""
        counts = [0] * len(NAMES)
        for one in totals:
            counts = [mine + more for mine, more in zip(counts, one.counts(), strict=True)]
        return cls.of(counts)

    def counts(self) -> list[int]:
        """The row of counts that says this."""
        row = dict.fromkeys(NAMES, 0)
        row |= {"lookups": self.lookups, "loads": self.loads, "asked": self.asked_blocks, "hit": self.hit_blocks}
        row |= {"stored": self.stored_blocks, "stored_bytes": self.stored_bytes, "already": self.already_blocks}
        for prefix, named in (
            ("outcome:", self.outcomes),
            ("bytes:", self.bytes_by_source),
            ("dropped:", self.dropped_blocks),
        ):
            row |= {prefix + name: n for name, n in named.items() if name != UNCLAIMED}
        return list(row.values())


def _named(prefix: str, counts: Sequence[int]) -> dict[str, int]:
    return {n.removeprefix(prefix): counts[i] for i, n in enumerate(NAMES) if n.startswith(prefix) and counts[i]}
