"""One answer as it comes: the engine's Events to deltas, log-probabilities, usage and a reason for the end.

Every endpoint, streamed or not, reads the same `Answer`, so what a stream joins to is what a whole answer holds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from onebox.engine.api import (
    AcceptanceCounts,
    Counts,
    EngineClient,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    PromptLogprobs,
    QueueFullError,
    Request,
    RequestHandle,
    SamplingParams,
    TokenLogprob,
    Tokens,
    Vision,
)
from onebox.server.errors import GenerationError
from onebox.text.answer import Content, Delta, ToolCallStart
from onebox.text.stream import TextStream
from onebox.text.tokenizer import Tokenizer

__all__ = ["Answer", "Parser", "Piece", "PlainText", "Prompt", "Thinking", "Usage"]

_CLOSING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now."
    "\n</think>\n\n"
)
"""Ends a reasoning that has used up its budget, in the words that the family's makers give for it."""

_RETRY_S = 0.05
"""Between two attempts to get a place in a full queue back, for an answer that was interrupted by us."""


class Parser(Protocol):
    """Text in as it comes, deltas out; the deltas joined do not depend on how the text was cut."""

    in_reasoning: bool

    def push(self, text: str) -> list[Delta]: ...
    def flush(self) -> list[Delta]: ...


class PlainText:
    """The parser of an endpoint that takes text as it is."""

    in_reasoning = False

    def push(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def flush(self) -> list[Delta]:
        return []


@dataclass(frozen=True)
class Thinking:
    """Bounds the reasoning with which an answer begins."""

    budget: int
    """Tokens. At the first whole character from there on it is closed by `_CLOSING` and the answer goes on."""
    grammar: Grammar | None
    """What the rest is held to. The prompt's own grammar lets the reasoning pass first."""


@dataclass(frozen=True)
class Prompt:
    """Token ids ready for the engine, with what the way back needs to know."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    parser: Callable[[], Parser] = PlainText
    thinking: Thinking | None = None
    is_one_call: bool = False
    """The answer ends before a second tool call."""
    is_only_read: bool = False
    """Nothing is made: the prompt's own log-probabilities are all that is wanted."""
    priority: int = 0
    cache_prompt: bool = True
    vision: Vision | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens read and made. Sums over answers count a prompt that they share once.

    The words that close a reasoning are of the completion, not of the reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, not computed again."""
    reasoning_tokens: int = 0
    """Of the completion."""
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def without_prompt(self) -> "Usage":
        return replace(self, prompt_tokens=0, cached_tokens=0)


@dataclass(frozen=True)
class Piece:
    """Part of an answer. Its tokens may be ahead of its deltas: text waits until it is known what it is."""

    deltas: tuple[Delta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that were drawn, where asked for; the closing words of a thinking budget have none."""

    @classmethod
    def join(cls, pieces: Sequence["Piece"]) -> "Piece":
        return cls(
            tuple(delta for piece in pieces for delta in piece.deltas),
            tuple(token_id for piece in pieces for token_id in piece.token_ids),
            tuple(logprob for piece in pieces for logprob in piece.logprobs),
        )


class Answer:
    """One answer to one prompt. Read `pieces` once; then `finish_reason`, `usage` and `token_ids` are final."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, prompt: Prompt, request: Request, handle: RequestHandle
    ) -> None:
        """The request as it was submitted, with its own id and seed."""
        self.prompt = prompt
        self.finish_reason = ""
        """stop, length or tool_calls."""
        self.token_ids: list[int] = []
        """Those of the answer up to its end, reasoning and marks included, control tokens that end it not."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's tokens from the second on, where asked for; complete before the first piece."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._request = request
        self._handle = handle
        self._text = TextStream(tokenizer, prompt.stops)
        self._parser = prompt.parser()
        self._thinking = prompt.thinking
        self._cut = "length" if prompt.is_only_read else ""
        """Why we end it ourselves; what the engine makes beyond that is nobody's business."""
        self._is_over_budget = False
        self._num_calls = 0
        self._num_reasoning = 0
        self._usage: Usage | None = None
        self._drafts = AcceptanceCounts()
        self._num_cached: int | None = None

    @property
    def usage(self) -> Usage:
        """Final after the last piece; on the way there, what has come so far."""
        return self._usage or self._usage_of(len(self.token_ids))

    @property
    def stop_string(self) -> str | None:
        """The one that ended the answer."""
        return self._text.stopped_by

    async def pieces(self) -> AsyncIterator[Piece]:
        """In order. Whoever stops reading early calls `close`."""
        while True:
            async for event in self._handle:
                match event:
                    case Failed():
                        raise GenerationError(event.message)
                    case PromptLogprobs():
                        self.prompt_logprobs += event.logprobs
                    case Tokens() if not self._is_ended():
                        yield self._take(event)
                        if self._is_ended():
                            self._handle.is_complete = True
                            self.close()
                    case Finished():
                        self._finish(event)
            if not self._is_over_budget:
                break
            yield await self._go_on()
        if not self._cut:
            yield Piece(tuple(self._keep([*self._parser.push(self._text.flush()), *self._parser.flush()])))
        self.finish_reason = self._reason()

    async def whole(self) -> Piece:
        """All of it at once."""
        return Piece.join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Gives the engine's slot back within a step; after the end it has no effect."""
        self._engine.abort(self._handle.request_id)

    def _is_ended(self) -> bool:
        return bool(self._cut) or self._is_over_budget

    def _take(self, event: Tokens) -> Piece:
        deltas: list[Delta] = []
        count = 0
        for token_id in event.token_ids:
            count += 1
            self._num_reasoning += self._parser.in_reasoning
            deltas += self._keep(self._parser.push(self._text.push([token_id])))
            if self._text.is_stopped and not self._cut:
                self._cut = "stop"
                deltas += self._keep(self._parser.flush())
            self._is_over_budget = not self._cut and self._must_close_reasoning(len(self.token_ids) + count)
            if self._is_ended():
                break
        self.token_ids += event.token_ids[:count]
        return Piece(tuple(deltas), event.token_ids[:count], event.logprobs[:count])

    def _keep(self, deltas: list[Delta]) -> list[Delta]:
        """All of them, or those before the call that is one too many."""
        for place, delta in enumerate(deltas):
            if isinstance(delta, ToolCallStart):
                if self.prompt.is_one_call and self._num_calls:
                    self._cut = "tool_calls"
                    return deltas[:place]
                self._num_calls += 1
        return deltas

    def _must_close_reasoning(self, num_made: int) -> bool:
        """The budget is used up, at the end of a character, and there is room to close it and to answer."""
        if self._thinking is None or self._num_reasoning < self._thinking.budget:
            return False
        is_place = self._parser.in_reasoning and self._text.is_whole
        return is_place and num_made + len(self._closing_ids) < self._limit

    @property
    def _closing_ids(self) -> tuple[int, ...]:
        return self._tokenizer.encode(_CLOSING)

    @property
    def _limit(self) -> int:
        """Tokens that the answer may have."""
        room = self._engine.config.max_model_len - len(self.prompt.token_ids)
        return self.prompt.sampling.max_tokens or room

    async def _go_on(self) -> Piece:
        """Closes the reasoning and submits what there is as a prompt, for the rest of the same answer.

        The presence and frequency penalties then count the rest alone.
        """
        closing_ids = self._closing_ids
        # Not through the stop strings: these words are ours.
        deltas = self._parser.push(self._text.flush()) + self._parser.push(_CLOSING)
        self.token_ids += closing_ids
        self._request = self._continued()
        self._thinking, self._is_over_budget = None, False
        self._handle = await self._resubmit()
        return Piece(tuple(self._keep(deltas)), closing_ids)

    def _continued(self) -> Request:
        sampling, num_made = self._request.sampling, len(self.token_ids)
        return replace(
            self._request,
            request_id=f"{self._request.request_id}/on",
            prompt=(*self.prompt.token_ids, *self.token_ids),
            sampling=replace(
                sampling,
                max_tokens=self._limit - num_made,
                min_tokens=max(0, sampling.min_tokens - num_made),
                prompt_logprobs=None,
                grammar=self._thinking.grammar if self._thinking else None,
            ),
        )

    async def _resubmit(self) -> RequestHandle:
        while True:
            try:
                return self._engine.submit(self._request)
            except QueueFullError:
                await asyncio.sleep(_RETRY_S)

    def _finish(self, event: Finished) -> None:
        if self._num_cached is None:
            # The rest of an answer whose reasoning was closed finds its own prompt in the cache: not what was asked.
            self._num_cached = event.counts.cached_tokens
        self._drafts += event.counts.drafts
        if self._is_over_budget:
            return
        if not self._cut:
            self.finish_reason = _finish_reason(event.reason)
        self._usage = self._usage_of(len(self.token_ids) if self._cut else self._num_made(event.counts))

    def _num_made(self, counts: Counts) -> int:
        """With the token that ended it, which is counted and not delivered."""
        num_before = len(self._request.prompt) - len(self.prompt.token_ids)
        return num_before + counts.completion_tokens

    def _usage_of(self, num_made: int) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt.token_ids),
            completion_tokens=num_made,
            cached_tokens=self._num_cached or 0,
            reasoning_tokens=self._num_reasoning,
            accepted_draft_tokens=self._drafts.num_accepted,
            rejected_draft_tokens=self._drafts.num_drafted - self._drafts.num_accepted,
        )

    def _reason(self) -> str:
        reason = self._cut or self.finish_reason
        return "tool_calls" if reason == "stop" and self._num_calls else reason


def _finish_reason(reason: FinishReason) -> str:
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason.value
    raise GenerationError(f"The engine ended the request before its answer was done ({reason}).")
