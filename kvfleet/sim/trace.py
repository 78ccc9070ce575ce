"""Traces: what was asked of a fleet, without what was said."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvfleet.errors import ConfigError
from kvfleet.sim.formats import BadLineError, Format, Line, OwnWriter, format_of

__all__ = ["Request", "Trace", "load_trace", "with_final", "write_trace"]

_LINE_BYTES_MAX = 64 << 20
_COVERED_MIN = 0.5  # of a trace's whole blocks that have ids; with less, its blocks have another size


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        time_s: when it came.
        keys: ids of the whole blocks of its prompt, in order. Equal ids mean equal prefixes up to there.
        prompt_tokens: of its prompt, those behind the last whole block too.
        output_tokens: that were produced; 0 if that is not known.
        session: of the caller; "" if not known.
        turn: of the session, from 1; None: not known.
        final: said at its time: this prefix will not be continued.
    """

    time_s: float
    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    turn: int | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times.

    Attributes:
        block_tokens: tokens in a block.
        requests: of the trace.
        token_bytes: of a token's KV; None: not known.
    """

    block_tokens: int
    requests: Sequence[Request]
    token_bytes: int | None = None

    @property
    def references(self) -> int:
        """Blocks of all prompts, last partial ones too: what published hit rates of blocks are a share of."""
        return sum(-(-request.prompt_tokens // self.block_tokens) for request in self.requests)

    @property
    def distinct(self) -> int:
        """Different whole blocks."""
        return len({key for request in self.requests for key in request.keys})


def load_trace(path: Path) -> Trace:
    """Read a trace of Mooncake, of Alibaba Bailian, or of our own; which one its first line tells.

    Ids are numbered anew, each with what comes before it, so that equal ids mean equal prefixes whatever the file's ids
    mean.

    Raises:
        ConfigError: it cannot be read, or is none; with the number of the first line that is wrong.
    """
    try:
        requests, block_tokens, token_bytes, whole = [], 0, None, 0
        numbers: dict[int, int] = {}
        for line, shape in _lines(path):
            block_tokens, token_bytes = shape.block_tokens, shape.token_bytes
            whole += line.prompt_tokens // block_tokens
            requests.append(_request(line, block_tokens, numbers))
    except OSError as error:
        raise ConfigError("", f"{path}: {error.strerror or error}") from error
    if not requests:
        raise ConfigError("", f"{path}: it has no requests")
    if sum(len(request.keys) for request in requests) < _COVERED_MIN * whole:
        raise ConfigError("", f"{path}: it has too few block ids for its prompts: its blocks are not of {block_tokens}")
    requests.sort(key=lambda request: request.time_s)
    return Trace(block_tokens, requests, token_bytes)


def _lines(path: Path) -> Iterator[tuple[Line, Format]]:
    """The requests of a file, and what it is."""
    shape: Format | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_LINE_BYTES_MAX), b""), 1):
            if not raw.strip():
                continue
            try:
                fields = _object(raw)
                if shape is None:
                    shape = format_of(fields)
                    if shape.headed:
                        continue
                yield shape.parse(fields), shape
            except BadLineError as error:
                raise ConfigError("", f"{path}, line {number}: {error}") from error


def _object(raw: bytes) -> dict[str, Any]:
    """A line's JSON object."""
    if len(raw) >= _LINE_BYTES_MAX:
        raise BadLineError(f"longer than {_LINE_BYTES_MAX:,} bytes")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        shown = raw[:40].decode(errors="replace").strip()
        raise BadLineError(f"no JSON, or cut: it begins with {shown!r}") from error
    if not isinstance(fields, dict):
        raise BadLineError(f"a JSON object is expected, is {type(fields).__name__}")
    return fields


def _request(line: Line, block_tokens: int, numbers: dict[int, int]) -> Request:
    """A request with its ids numbered; a last partial block has none, as it is never stored."""
    keys, parent = [], 0
    for id_ in line.ids[: line.prompt_tokens // block_tokens]:
        parent = numbers.setdefault(parent << 64 | id_, len(numbers) + 1)
        keys.append(parent - 1)
    return Request(
        line.time_s, tuple(keys), line.prompt_tokens, line.output_tokens, line.session, line.turn, line.final
    )


def write_trace(path: Path, block_tokens: int, requests: Iterable[Request]) -> int:
    """Write requests in our own format. Returns how many."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        writer = OwnWriter(file, block_tokens)
        for one in requests:
            line = Line(one.time_s, one.keys, one.prompt_tokens, one.output_tokens, one.session, one.turn, one.final)
            writer.write(line)
            number += 1
    return number


def with_final(trace: Trace, recall: float, seed: int = 0) -> Trace:
    """A trace in which some requests say truly that they are over: no later one comes back to what is theirs alone.

    That are the blocks behind the last one from which prefixes go on differently by then; of a request that has none,
    all its whole blocks together.

    Args:
        trace: whose own flags are dropped.
        recall: share of such requests that say it, in [0, 1]; drawn.
        seed: of the draws.
    """
    assert 0 <= recall <= 1
    draw, later = random.Random(seed), set[int]()
    marked = []
    for request, own in zip(reversed(trace.requests), reversed(_first_own(trace)), strict=True):
        over = own is not None and own not in later
        marked.append(replace(request, final=over and draw.random() < recall))
        later.update(request.keys)
    return replace(trace, requests=marked[::-1])


def _first_own(trace: Trace) -> list[int | None]:
    """Of each request the first block that is its own by then, or its last one; None if it has no blocks."""
    after: dict[int, int] = {}  # what came first after a block
    forked = set[int]()  # something else did, too
    found: list[int | None] = []
    for request in trace.requests:
        keys = request.keys
        forked.update(key for key, following in pairwise(keys) if after.setdefault(key, following) != following)
        num_shared = 1 + max((place for place, key in enumerate(keys) if key in forked), default=-1)
        found.append(keys[min(num_shared, len(keys) - 1)] if keys else None)
    return found
