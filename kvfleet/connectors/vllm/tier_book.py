"""What a tier of vLLM's offloading connector remembers of requests that are alive: their lookups and their chains.

vLLM has such a class of its own (`AsyncLookupManager`). It does not fit: it shares answers between requests, so a
miss outlives the store that makes it a hit; it waits without end for an answer; and in 0.29 an answer that comes
after its request has ended can trip an assertion, which ends the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvfleet.core.block import KEY_BYTES, engine_keys

__all__ = ["Chain", "ChunkRun", "LookupBook", "Question"]

# How long a chunk that could not be loaded is not offered again to requests that had not asked for it yet.
_FAILED_S = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """Which chunks of one request are to be looked up.

    Attributes:
        names: the engine's names of the chunks, in the order of the chain.
        deadline: monotonic seconds; nobody waits for the answer longer.
        answers: of the request that asks; see `LookupBook`.
    """

    names: tuple[bytes, ...]
    deadline: float
    answers: dict[bytes, bool | None] = field(repr=False)


@dataclass(slots=True)
class _Asked:
    """What one request has asked for.

    Attributes:
        answers: chunk → found or not; None: not known yet.
        new: asked for since the last flush, in order.
        deadlines: until when those are waited for that are not known yet, monotonic seconds.
    """

    answers: dict[bytes, bool | None] = field(default_factory=dict)
    new: list[bytes] = field(default_factory=list)
    deadlines: dict[bytes, float] = field(default_factory=dict)


class LookupBook:
    """Lookups of the requests that are alive: asked one chunk at a time, answered some steps later.

    An answer holds for one request, for as long as it lives. A chunk that could not be loaded is a miss for every
    request that had asked for it, so none asks for the same load again and again.

    Threads: one.

    Attributes:
        timeouts: chunks that nobody answered for in time.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeouts = 0
        self.timeout_s = timeout_s
        self._clock = clock
        self._requests: dict[str, _Asked] = {}
        self._failed: dict[bytes, float] = {}  # chunk → until when it is a miss for everybody

    def ask(self, request_id: str, name: bytes) -> bool | None:
        """Whether the fleet has a chunk; None: ask again in the next step."""
        asked = self._requests.setdefault(request_id, _Asked())
        if name not in asked.answers:
            if self._failed.get(name, 0.0) > self._clock():
                asked.answers[name] = False
            else:
                asked.answers[name] = None
                asked.deadlines[name] = self._clock() + self.timeout_s
                asked.new.append(name)
        answer = asked.answers[name]
        if answer is None and self._clock() > asked.deadlines[name]:
            self.timeouts += 1
            asked.answers[name] = answer = False
        return answer

    def flush(self) -> list[Question]:
        """What has been asked since the last call: one question a request."""
        questions = []
        for asked in self._requests.values():
            if asked.new:
                names, asked.new = tuple(asked.new), []
                questions.append(Question(names, asked.deadlines[names[0]], asked.answers))
        return questions

    def answer(self, question: Question, num_found: int) -> None:
        """The first `num_found` chunks of a question are there, the others are not.

        What has been decided meanwhile stays: a chunk waited for too long, or one that could not be loaded.
        """
        for index, name in enumerate(question.names):
            if question.answers.get(name) is None:
                question.answers[name] = index < num_found

    def fail(self, names: Collection[bytes]) -> None:
        """Chunks that were found could not be loaded."""
        now = self._clock()
        self._failed = {name: until for name, until in self._failed.items() if until > now}
        self._failed.update(dict.fromkeys(names, now + _FAILED_S))
        for asked in self._requests.values():
            for name in names:
                if name in asked.answers:
                    asked.answers[name] = False

    def finish(self, request_id: str) -> None:
        """Forget a request. An answer on its way is for nobody then."""
        self._requests.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks that follow each other in a chain.

    Attributes:
        keys: of all blocks of the chain up to the last one of the run, packed.
        first: index of the run's first block in the chain.
        rows: where the run's blocks are in the engine's memory.
    """

    keys: bytes
    first: int
    rows: tuple[int, ...]


class Chain:
    """The chunks of one request, from its first token on, and their keys. Each is hashed once.

    Threads: one.

    Args:
        root: of the namespace, 32 bytes.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._index: dict[bytes, int] = {}
        self._keys = bytearray()

    def extend(self, names: Iterable[bytes]) -> None:
        """Add the chunks that follow those known.

        Args:
            names: of all chunks from the first on; those known already are passed over.
        """
        known = len(self._index)
        self._index.update((name, known + i) for i, name in enumerate([*names][known:]))

    def run(self, names: Sequence[bytes], rows: Sequence[int]) -> ChunkRun:
        """Chunks that are in the order of the chain.

        Args:
            names: of the chunks. If they do not follow each other without a gap, or the chain does not know them, they
                are a chain of their own: what is asked of it ends at the first that is missing all the same.
            rows: where each is.
        """
        runs = self.runs(names, rows)
        if len(runs) == 1 and runs[0].rows == tuple(rows):
            return runs[0]
        return ChunkRun(engine_keys(self._root, names), 0, tuple(rows))

    def runs(self, names: Collection[bytes], rows: Sequence[int]) -> list[ChunkRun]:
        """Put chunks in the order of the chain, those that follow each other together.

        Chunks that the chain does not know make a run each, as if they were the first of a chain: they can be
        stored and found like others, only eviction knows less of them.

        Args:
            names: of the chunks, in any order.
            rows: where each is.
        """
        known = sorted((self._index[name], row) for name, row in zip(names, rows, strict=True) if name in self._index)
        if known:
            self._hash(known[-1][0] + 1)
        assert len(self._keys) <= len(self._index) * KEY_BYTES, "a key has no chunk"
        runs: list[list[tuple[int, int]]] = []
        for index, row in known:
            if not runs or runs[-1][-1][0] + 1 != index:
                runs.append([])
            runs[-1].append((index, row))
        ordered = [self._run(run) for run in runs]
        strangers = [(name, row) for name, row in zip(names, rows, strict=True) if name not in self._index]
        return ordered + [ChunkRun(engine_keys(self._root, [name]), 0, (row,)) for name, row in strangers]

    def _run(self, run: list[tuple[int, int]]) -> ChunkRun:
        first, last = run[0][0], run[-1][0]
        return ChunkRun(bytes(self._keys[: (last + 1) * KEY_BYTES]), first, tuple(row for _, row in run))

    def _hash(self, num_blocks: int) -> None:
        """Make keys of the first `num_blocks` blocks known."""
        done = len(self._keys) // KEY_BYTES
        self._keys += engine_keys(self._root, list(self._index)[done:num_blocks])
