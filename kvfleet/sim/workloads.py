"""Classes of workload: how their sessions go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from typing_extensions import override

from kvfleet.sim.prompts import Ask, Prompt, Source

__all__ = ["WORKLOADS", "Agents", "Chat", "Code", "Rag", "Unique", "Workload", "scaled"]

_DECODE_TOKENS_PER_S = 40.0
"""Of a produced answer: the next request comes after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(ABC):
    """A class of workload. Token counts are medians where not said.

    Attributes:
        context_tokens: a session ends before its prompt is longer.
    """

    context_tokens: int = 131_072

    @property
    @abstractmethod
    def requests_mean(self) -> float:
        """Requests of a session, on average, where no context is full."""

    @abstractmethod
    def session(self, source: Source) -> Iterator[Ask]:
        """The requests of a new session, one at least."""

    def _room(self, prompt: Prompt, tokens: int) -> int:
        """So many of `tokens` that the context has room for."""
        return max(0, min(tokens, self.context_tokens - prompt.tokens))


AnyWorkload = TypeVar("AnyWorkload", bound=Workload)


def scaled(workload: AnyWorkload, factor: float) -> AnyWorkload:
    """The same workload with longer or shorter texts. Everything in tokens is multiplied."""
    assert factor > 0
    changed = {
        one.name: max(1, round(getattr(workload, one.name) * factor))
        for one in fields(workload)
        if one.name.endswith("_tokens")
    }
    return replace(workload, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Workload):
    """People who talk to assistants. Each prompt is all that was said, and a message more.

    Attributes:
        turns_mean: of a session; geometric.
        assistants: with system prompts of their own, by popularity.
        system_tokens: of a system prompt, exactly.
        attached_share: of sessions that begin with a document of their own.
        attached_tokens: of it.
        message_tokens: of a message.
        answer_tokens: of an answer.
        pause_s: of reading and typing, median.
    """

    turns_mean: float = 3.5
    assistants: int = 8
    system_tokens: int = 1_000
    attached_share: float = 0.4
    attached_tokens: int = 8_000
    message_tokens: int = 100
    answer_tokens: int = 300
    pause_s: float = 45.0

    @property
    @override
    def requests_mean(self) -> float:
        return self.turns_mean

    @override
    def session(self, source: Source) -> Iterator[Ask]:
        prompt, fresh, pause_s = source.prompt(), source.fresh, 0.0
        prompt.add(source.popular(self.assistants), self._room(prompt, self.system_tokens))
        if source.draw.random() < self.attached_share:
            prompt.add(fresh(), self._room(prompt, source.tokens(self.attached_tokens)))
        for turn in range(source.rounds(self.turns_mean)):
            message, answer = source.tokens(self.message_tokens), source.tokens(self.answer_tokens)
            if turn and self._room(prompt, message) < message:
                return
            prompt.add(fresh(), self._room(prompt, message))
            yield source.ask(prompt, pause_s, answer)
            prompt.add(fresh(), self._room(prompt, answer))
            pause_s = answer / _DECODE_TOKENS_PER_S + source.lognormal(self.pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag(Workload):
    """Questions about documents that are looked up: a system prompt, some documents, the best first, and a question.

    Only what comes before the first other document is a common prefix. Some ask again about the same documents.

    Attributes:
        documents: that there are; popularity follows Zipf's law.
        found: documents in a prompt.
        document_tokens: of one; each has always the same length.
        system_tokens: exactly.
        question_tokens: of a question.
        answer_tokens: of an answer.
        questions_mean: about the same documents; geometric.
        pause_s: before the next one, median.
    """

    documents: int = 5_000
    found: int = 4
    document_tokens: int = 1_500
    system_tokens: int = 600
    question_tokens: int = 60
    answer_tokens: int = 250
    questions_mean: float = 1.4
    pause_s: float = 40.0

    @property
    @override
    def requests_mean(self) -> float:
        return self.questions_mean

    @override
    def session(self, source: Source) -> Iterator[Ask]:
        prompt, fresh, pause_s = source.prompt(), source.fresh, 0.0
        prompt.add(0, self._room(prompt, self.system_tokens))
        chosen: dict[int, None] = {}
        while len(chosen) < min(self.found, self.documents):
            chosen[source.popular(self.documents)] = None
        for document in chosen:
            tokens = round(self.document_tokens * (0.5 + document * 0.618_034 % 1.0))
            prompt.add(1 + document, self._room(prompt, tokens))
        for turn in range(source.rounds(self.questions_mean)):
            question, answer = source.tokens(self.question_tokens), source.tokens(self.answer_tokens)
            if turn and self._room(prompt, question) < question:
                return
            prompt.add(fresh(), self._room(prompt, question))
            yield source.ask(prompt, pause_s, answer)
            prompt.add(fresh(), self._room(prompt, answer))
            pause_s = answer / _DECODE_TOKENS_PER_S + source.lognormal(self.pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(Workload):
    """Loops of a model and its tools: many quick requests, each with the result of a tool more; some wait for long.

    Attributes:
        kinds: of agents, with prompts of their own, by popularity.
        system_tokens: of instructions and descriptions of tools, exactly.
        task_tokens: of what is to be done.
        steps_mean: of a session; geometric.
        call_tokens: that the model produces a step.
        result_tokens: of what a tool answers; a spread of 1.3.
        tool_s: that a tool takes, median.
        wait_share: of steps that wait for something slow: a build, a person.
        wait_s: for it, median.
    """

    kinds: int = 5
    system_tokens: int = 6_000
    task_tokens: int = 400
    steps_mean: float = 20.0
    call_tokens: int = 150
    result_tokens: int = 600
    tool_s: float = 3.0
    wait_share: float = 0.05
    wait_s: float = 240.0

    @property
    @override
    def requests_mean(self) -> float:
        return self.steps_mean

    @override
    def session(self, source: Source) -> Iterator[Ask]:
        prompt, fresh, pause_s = source.prompt(), source.fresh, 0.0
        prompt.add(source.popular(self.kinds), self._room(prompt, self.system_tokens))
        prompt.add(fresh(), self._room(prompt, source.tokens(self.task_tokens)))
        for _ in range(source.rounds(self.steps_mean)):
            call, result = source.tokens(self.call_tokens), source.tokens(self.result_tokens, 1.3)
            yield source.ask(prompt, pause_s, call)
            if self._room(prompt, call + result) < call + result:
                return
            prompt.add(fresh(), call + result)
            slow = source.draw.random() < self.wait_share
            pause_s = call / _DECODE_TOKENS_PER_S + source.lognormal(self.wait_s if slow else self.tool_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code(Workload):
    """Assistants in editors: instructions, files of a repository, what is asked. An edit changes all that is behind it.

    Attributes:
        repositories: that people work on, by popularity. Those of one begin with the same files.
        system_tokens: exactly.
        files_tokens: of the files of a prompt, exactly.
        edited_share: of requests before which a file was edited: at a place that is more often near the end.
        question_tokens: of what is asked.
        answer_tokens: of an answer.
        rounds_mean: requests of a session; geometric.
        pause_s: between requests, median.
    """

    repositories: int = 50
    system_tokens: int = 1_500
    files_tokens: int = 12_000
    edited_share: float = 0.4
    question_tokens: int = 150
    answer_tokens: int = 200
    rounds_mean: float = 15.0
    pause_s: float = 25.0

    @property
    @override
    def requests_mean(self) -> float:
        return self.rounds_mean

    @override
    def session(self, source: Source) -> Iterator[Ask]:
        files, fresh, pause_s = source.prompt(), source.fresh, 0.0
        files.add(0, self._room(files, self.system_tokens))
        files.add(1 + source.popular(self.repositories), self._room(files, self.files_tokens))
        for _ in range(source.rounds(self.rounds_mean)):
            if source.draw.random() < self.edited_share:
                files = self._edited(files, source)
            asked = files.cut(files.tokens)
            asked.add(fresh(), self._room(asked, files.tokens - asked.tokens + source.tokens(self.question_tokens)))
            answer = source.tokens(self.answer_tokens)
            yield source.ask(asked, pause_s, answer)
            pause_s = answer / _DECODE_TOKENS_PER_S + source.lognormal(self.pause_s)

    def _edited(self, files: Prompt, source: Source) -> Prompt:
        """The files with a change somewhere: from its block on, nothing is as before."""
        behind = files.tokens - min(files.tokens, self.system_tokens)
        edited = files.cut(files.tokens - int(behind * source.draw.random() ** 2))
        edited.add(source.fresh(), files.tokens - edited.tokens)
        return edited


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique(Workload):
    """Prompts that have nothing in common, each asked once: a cache is of no use.

    Attributes:
        prompt_tokens: of a prompt.
        answer_tokens: of an answer.
    """

    prompt_tokens: int = 4_000
    answer_tokens: int = 300

    @property
    @override
    def requests_mean(self) -> float:
        return 1.0

    @override
    def session(self, source: Source) -> Iterator[Ask]:
        prompt = source.prompt()
        prompt.add(source.fresh(), self._room(prompt, source.tokens(self.prompt_tokens)))
        yield source.ask(prompt, 0.0, source.tokens(self.answer_tokens))


WORKLOADS: Mapping[str, Workload] = {
    "chat": Chat(),
    "rag": Rag(),
    "agents": Agents(),
    "code": Code(),
    "unique": Unique(),
}
