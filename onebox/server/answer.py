"""One answer: engine events to text deltas, log-probabilities, usage and a finish reason.

Every endpoint reads the same `Answer`, streamed or not, so the joined chunks of a stream equal the whole answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from onebox.engine.api import (
    Failed,
    Finished,
    FinishReason,
    LogprobRows,
    PromptLogprobs,
    Request,
    RequestHandle,
    TokenLogprob,
    Tokens,
)
from onebox.server.errors import FieldError, GenerationError
from onebox.server.prompt import Prompt
from onebox.server.submission import Submission
from onebox.server.thinking import CLOSING_TEXT, ThinkingLimit
from onebox.server.usage import Usage, UsageCount
from onebox.spec.errors import UsageError
from onebox.text.marks import with_stand_ins
from onebox.text.parser import Content, Delta, Reasoning
from onebox.text.stream import Detokenizer, StopStrings
from onebox.text.tokenizer import Tokenizer
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart

__all__ = ["MAX_LOGPROB_VALUES", "Answer", "AnswerChunk", "AnswerText", "Answers", "WholeAnswer"]

MAX_LOGPROB_VALUES = 1_000_000
"""Log-probabilities that one request may ask for, alternatives included, of its prompts and of answers that come whole;
about 75 MB of JSON."""
_PACKED_TOKENS = 256


@dataclass(frozen=True)
class AnswerChunk:
    """Part of an answer. Its tokens may be ahead of its deltas: text is held back until it is known what it is."""

    deltas: tuple[Delta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprob] = ()
    """Of the sampled tokens, where asked for; the text that closes a reasoning has none."""

    @classmethod
    def join(cls, chunks: Sequence["AnswerChunk"]) -> "AnswerChunk":
        if len(chunks) == 1:
            return chunks[0]
        return cls(
            tuple(delta for chunk in chunks for delta in chunk.deltas),
            tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        )


class WholeAnswer:
    """An answer's chunks joined as they come. Log-probabilities are kept as arrays, and their number is limited."""

    def __init__(self) -> None:
        self._chunks: list[AnswerChunk] = []
        self._unpacked: list[TokenLogprob] = []
        self._packed: list[LogprobRows] = []
        self._num_values = 0

    def add(self, chunk: AnswerChunk) -> None:
        self._chunks.append(replace(chunk, logprobs=()))
        self._unpacked += chunk.logprobs
        if len(self._unpacked) >= _PACKED_TOKENS:
            self._pack()

    def chunk(self) -> AnswerChunk:
        self._pack()
        return replace(AnswerChunk.join(self._chunks), logprobs=LogprobRows.join(self._packed))

    def _pack(self) -> None:
        if self._unpacked:
            self._packed.append(LogprobRows.pack(self._unpacked))
            self._num_values += self._packed[-1].num_values
            self._unpacked = []
        if self._num_values > MAX_LOGPROB_VALUES:
            raise FieldError(
                f"The answer's log-probabilities exceed {MAX_LOGPROB_VALUES} values; stream the answer, lower "
                "max_tokens or ask for fewer alternatives.",
                "logprobs",
            )


class AnswerText:
    """Token ids to deltas. Ends the answer at a stop string, and before a second tool call where one is allowed.

    Stop strings are searched in reasoning and content, not in tool calls, which are read by programs. A call's start is
    held until its arguments begin: one that is cut off before is not shown at all, and one that is cut off later has
    arguments that are no valid JSON.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.cut_reason = ""
        """stop or tool_calls: the answer ends here, whatever the engine generates; "" while it continues."""
        self._detokenizer = Detokenizer(tokenizer, has_marks=True)
        self._parser = prompt.parser()
        self._stops = StopStrings(prompt.stops)
        self._written: type[Reasoning | Content] = Content
        """What the stop strings were last searched in."""
        self._start: ToolCallStart | None = None
        self._num_starts = self._num_shown = 0
        self._is_one_call = prompt.is_one_call

    @property
    def in_reasoning(self) -> bool:
        return self._parser.in_reasoning

    @property
    def can_close_reasoning(self) -> bool:
        """Inside reasoning, and no character is incomplete."""
        return not self.cut_reason and self._parser.in_reasoning and self._detokenizer.is_whole

    @property
    def has_calls(self) -> bool:
        """The answer has calls, and all of them are complete."""
        return self._parser.num_calls > 0 and not self._parser.is_call_cut

    @property
    def ends_in_call(self) -> bool:
        """The last call that was shown is incomplete."""
        return self._parser.is_call_cut and self._num_shown > self._parser.num_calls

    @property
    def stop_string(self) -> str | None:
        """The one that ended the answer."""
        return self._stops.stopped_by

    def push(self, token_id: int) -> list[Delta]:
        return self._shown(self._parser.push(self._detokenizer.push([token_id])))

    def close_reasoning(self) -> list[Delta]:
        """Appends the closing text, in which stop strings are not searched: the model did not write it."""
        before = self._shown(self._parser.push(self._detokenizer.flush())) + self._flush_stops()
        return before + self._parser.push(with_stand_ins(CLOSING_TEXT))

    def flush(self, *, is_cut: bool) -> list[Delta]:
        """What was held back when the engine ended the answer. `is_cut`: not the model ended it."""
        held = [*self._parser.push(self._detokenizer.flush()), *self._parser.flush(is_cut=is_cut)]
        return self._shown(held) + self._flush_stops()

    def _shown(self, deltas: Iterable[Delta]) -> list[Delta]:
        """What of the deltas is part of the answer and certain."""
        shown: list[Delta] = []
        for delta in deltas:
            if self.cut_reason:
                break
            match delta:
                case Reasoning() | Content():
                    shown += self._searched(delta)
                case ToolCallStart():
                    shown += self._flush_stops()
                    self._begin_call(delta)
                case ToolCallArguments():
                    self._num_shown += self._start is not None
                    shown += [self._start, delta] if self._start else [delta]
                    self._start = None
        return shown

    def _searched(self, delta: Reasoning | Content) -> list[Delta]:
        held = [] if isinstance(delta, self._written) else self._flush_stops()
        self._written = type(delta)
        text = self._stops.push(delta.text)
        if self._stops.is_stopped:
            self.cut_reason = "stop"
        return [*held, self._written(text)] if text else held

    def _flush_stops(self) -> list[Delta]:
        """The possible start of a stop string, behind which something else comes."""
        text = self._stops.flush()
        return [self._written(text)] if text else []

    def _begin_call(self, start: ToolCallStart) -> None:
        if self._is_one_call and self._num_starts:
            self.cut_reason = "tool_calls"
            return
        self._num_starts += 1
        self._start = start


class Answer:
    """One answer to one prompt. Read `chunks` once; then `finish_reason`, `usage` and `token_ids` are final."""

    def __init__(
        self,
        submission: Submission,
        tokenizer: Tokenizer,
        prompt: Prompt,
        request: Request,
        handle: RequestHandle,
    ) -> None:
        """`request` as it was submitted, with its own id and seed, by `submission`, whose owner closes it."""
        self.prompt = prompt
        self.finish_reason = ""
        """stop, length or tool_calls."""
        self.token_ids: list[int] = []
        """Those of the answer, reasoning and marks included, without the control token that ends it."""
        self.first_token_at: float | None = None
        """When the first token was read, on time.monotonic's clock."""
        self._prompt_logprobs: list[Sequence[TokenLogprob]] = []
        self._submission = submission
        self._request = request
        self._handle = self._first_handle = handle
        self._text = AnswerText(tokenizer, prompt)
        self._count = UsageCount(len(prompt.token_ids))
        max_tokens = prompt.sampling.max_tokens or submission.config.max_model_len - len(prompt.token_ids)
        closing_ids = tokenizer.encode(CLOSING_TEXT) if prompt.thinking else ()
        self._thinking = ThinkingLimit(prompt.thinking, closing_ids, max_tokens)

    @property
    def usage(self) -> Usage:
        """Final after the last chunk; before, of what has been read."""
        return self._count.usage

    @property
    def started_at(self) -> float | None:
        """When the step began that took it out of the queue, on the same clock."""
        return self._first_handle.started_at

    @property
    def num_generated(self) -> int:
        return self._count.num_generated

    @property
    def prompt_logprobs(self) -> Iterator[TokenLogprob]:
        """Of the prompt's tokens from the second on, where asked for; complete before the first chunk."""
        return chain.from_iterable(self._prompt_logprobs)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the answer."""
        return self._text.stop_string

    @property
    def ends_in_call(self) -> bool:
        """The answer was cut off inside its last call, whose arguments are incomplete."""
        return self._text.ends_in_call

    def end_thinking(self) -> bool:
        """Closes the reasoning behind its next token, as a budget of that many would; whether there is one open."""
        self._thinking.is_asked_for = bool(self.prompt.thinking) and self._text.in_reasoning
        return self._thinking.is_asked_for

    async def chunks(self) -> AsyncIterator[AnswerChunk]:
        """In order."""
        while True:
            async for event in self._handle:
                match event:
                    case Failed():
                        raise (UsageError if event.is_refusal else GenerationError)(event.message)
                    case PromptLogprobs():
                        self._prompt_logprobs.append(event.logprobs)
                    case Tokens() if not self._is_ended():
                        yield self._take(event)
                        if self._is_ended():
                            self._handle.is_complete = True
                            self._submission.abort(self._handle.request_id)
                    case Finished():
                        self._finish(event)
            if not self._thinking.is_reached:
                break
            yield await self._continue()
        if not self._cut_reason:
            yield AnswerChunk(tuple(self._text.flush(is_cut=self._is_cut_off)))
        reason = self._cut_reason or self.finish_reason
        self.finish_reason = "tool_calls" if reason == "stop" and self._text.has_calls else reason

    async def whole(self) -> AnswerChunk:
        whole = WholeAnswer()
        async for chunk in self.chunks():
            whole.add(chunk)
        return whole.chunk()

    @property
    def _cut_reason(self) -> str:
        """Why the server ends the answer itself; "" where it does not. Later tokens of the engine are discarded."""
        return "length" if self.prompt.is_only_read else self._text.cut_reason

    @property
    def _is_cut_off(self) -> bool:
        """The engine may have ended the answer in the middle: at its limit, or at a token that the client named."""
        return self.finish_reason == FinishReason.LENGTH or bool(self.prompt.sampling.stop_token_ids)

    def _is_ended(self) -> bool:
        return bool(self._cut_reason) or self._thinking.is_reached

    def _take(self, event: Tokens) -> AnswerChunk:
        deltas: list[Delta] = []
        num_taken = 0
        self.first_token_at = self.first_token_at or time.monotonic()
        for token_id in event.token_ids:
            num_taken += 1
            self._count.num_reasoning += self._text.in_reasoning
            deltas += self._text.push(token_id)
            if self._text.can_close_reasoning:
                self._thinking.check(self._count.num_reasoning, len(self.token_ids) + num_taken)
            if self._is_ended():
                break
        self._add_tokens(event.token_ids[:num_taken])
        return AnswerChunk(tuple(deltas), event.token_ids[:num_taken], event.logprobs[:num_taken])

    def _add_tokens(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids += token_ids
        self._count.num_generated = len(self.token_ids)

    async def _continue(self) -> AnswerChunk:
        """Closes the reasoning and submits the answer up to there as the prompt of its rest."""
        deltas = self._text.close_reasoning()
        self._add_tokens(self._thinking.closing_ids)
        self._request = self._thinking.continuation(self._request, self.token_ids)
        self._handle = await self._submission.resubmit(self._request)
        return AnswerChunk(tuple(deltas), self._thinking.closing_ids)

    def _finish(self, event: Finished) -> None:
        self._count.add_request(event.counts)
        if self._is_ended():
            return
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise GenerationError(f"The engine ended the request before its answer was done ({event.reason}).")
        self.finish_reason = event.reason.value
        # The engine also counts the token that ended the answer, which it does not deliver.
        num_before = len(self._request.prompt) - len(self.prompt.token_ids)
        self._count.num_generated = num_before + event.counts.completion_tokens


@dataclass(frozen=True)
class Answers:
    """The answers to one HTTP request: n of the first prompt, n of the second, and so on."""

    request_id: str
    answers: tuple[Answer, ...]
    n: int

    async def whole(self) -> list[AnswerChunk]:
        """Each answer in one chunk; all are read concurrently."""
        return list(await asyncio.gather(*(answer.whole() for answer in self.answers)))

    @property
    def usage(self) -> Usage:
        """The sum. The n answers of a prompt share it; the first one has the count of cached tokens."""
        each = [answer.usage for answer in self.answers]
        return sum((u.without_prompt if place % self.n else u for place, u in enumerate(each)), Usage())

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of the prompts and generated so far, as in `usage`: quick, for it is told with every chunk."""
        prompts = sum(len(answer.prompt.token_ids) for answer in self.answers[:: self.n])
        return prompts, sum(answer.num_generated for answer in self.answers)
