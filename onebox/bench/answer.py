"""One streamed answer, recorded and checked as it arrives.

A fast server with wrong output must not look fast: a stream that ends early, repeats chunks or reports tokens it did
not send is a failure with a named reason. Tokens are counted from usage or from token ids, never from chunks, because a
chunk may hold any number of tokens. Independent of HTTP except for the status.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from onebox.bench.record import Failure, Reason, RequestRecord, Role

__all__ = ["Ask", "StreamedAnswer", "StreamedToolCall", "check_text_count", "error_message"]

_END_TOKENS = 2
"""Tokens in usage that no chunk contains: the stop token, and one token truncated with it."""
_TEMPLATE_SLACK = 8
"""Allowed difference between /tokenize and usage for one prompt: some servers add special tokens in only one."""


@dataclass(frozen=True)
class Ask:
    """One request: a completion if `prompt` is set, else a chat."""

    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    """Generate up to `max_tokens`, so that all rows of a table have the same length."""
    thinking: bool | None = None
    """None: the server's default."""
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields added to the body unchanged."""
    prompt_tokens: int | None = None
    """Prompt length from the server's tokenizer; usage must agree."""
    label: str = ""

    @property
    def is_chat(self) -> bool:
        return self.prompt is None


@dataclass
class StreamedToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class StreamedAnswer:
    """Content, arrival times and failure of one answer. Times are seconds since the request was sent."""

    ask: Ask
    sent_at: float
    """On the clock of time.perf_counter."""
    content: str = ""
    reasoning: str = ""
    calls: dict[int, StreamedToolCall] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """The choices' logprobs objects, in the endpoint's format."""
    has_token_ids: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    arrival_tokens: list[int] = field(default_factory=list)
    arrival_chars: list[int] = field(default_factory=list)
    responded_s: float | None = None
    """Arrival time of the first event with a choice; it may hold no content."""
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    is_done: bool = False
    status: int | None = None
    total_s: float = 0.0
    failure: Failure | None = None
    _previous: str = ""
    _repeated_tokens: int = 0
    _repeated_events: int = 0
    _num_finishes: int = 0

    @property
    def text(self) -> str:
        """The complete answer: reasoning, content and tool calls."""
        calls = "".join(f"{call.name}{call.arguments}" for call in self.calls.values())
        return self.reasoning + self.content + calls

    @property
    def completion_tokens(self) -> int | None:
        counted = _number(self.usage, "completion_tokens")
        if counted is None and self.has_token_ids:
            return len(self.token_ids)
        return counted

    @property
    def num_repeats(self) -> int:
        """Events equal to the previous event. Repeated words also produce them, so this alone is not a failure."""
        return self._repeated_events

    @property
    def shows_all(self) -> bool:
        """All tokens should be visible: none went into a tool call or could be withheld as reasoning."""
        return not self.ask.tools and self.ask.thinking is False and not self.reasoning and not self.calls

    def fail(self, reason: Reason, message: str) -> None:
        """Records a failure; only the first is kept."""
        self.failure = self.failure or Failure(reason, message, self.status)

    def take(self, data: str, now_s: float) -> None:
        """Adds the data of one event; the final "[DONE]" is not passed."""
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.fail(Reason.MALFORMED, f"An event is not a JSON object: {data[:80]!r}.")
            return
        if chunk.get("error"):
            self.fail(Reason.ERROR_EVENT, error_message(chunk))
            return
        self.usage = chunk.get("usage") or self.usage
        self.prompt_token_ids = chunk.get("prompt_token_ids") or self.prompt_token_ids
        is_repeat = data == self._previous
        self._previous = data
        for choice in chunk.get("choices") or ():
            self.responded_s = now_s if self.responded_s is None else self.responded_s
            self._take_choice(choice, now_s, is_repeat)

    def _take_choice(self, choice: dict[str, Any], now_s: float, is_repeat: bool) -> None:
        shown = self._take_delta(choice.get("delta") or {"content": choice.get("text")})
        ids = choice.get("token_ids")
        if ids is not None:
            self.has_token_ids = True
            self.token_ids += ids
        if choice.get("logprobs"):
            self.logprobs.append(choice["logprobs"])
        if choice.get("prompt_token_ids"):
            self.prompt_token_ids = choice["prompt_token_ids"]
        if shown or ids:
            if self._num_finishes and shown:
                self.fail(Reason.MALFORMED, "Text arrived after the event with the finish_reason.")
            self.arrivals_s.append(now_s)
            self.arrival_tokens.append(len(ids or ()))
            self.arrival_chars.append(shown)
            self._repeated_events += is_repeat
            self._repeated_tokens += len(ids or ()) if is_repeat else 0
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self._num_finishes += 1

    def _take_delta(self, delta: dict[str, Any]) -> int:
        """Adds a delta; returns its characters, at least 1 for a tool call."""
        # Servers use either name for reasoning; onebox sends both.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content = delta.get("content") or ""
        self.reasoning += reasoning
        self.content += content
        num_chars = len(reasoning) + len(content)
        for part in delta.get("tool_calls") or ():
            call, said = self.calls.setdefault(part.get("index") or 0, StreamedToolCall()), part.get("function") or {}
            call.id = call.id or part.get("id") or ""
            call.name += said.get("name") or ""
            call.arguments += said.get("arguments") or ""
            num_chars += max(len(said.get("name") or "") + len(said.get("arguments") or ""), 1)
        return num_chars

    def check(self) -> None:
        """Checks a stream that has ended; an earlier failure is kept."""
        if self.failure:
            return
        if self.finish_reason is None:
            self.fail(Reason.CUT, f"The stream ended after {len(self.arrivals_s)} chunks without a finish_reason.")
        elif not self.is_done:
            self.fail(Reason.CUT, "The stream ended without the final event [DONE].")
        elif self._num_finishes > 1:
            self.fail(Reason.DUPLICATE, f"finish_reason was sent {self._num_finishes} times.")
        elif not self.arrivals_s:
            self.fail(Reason.EMPTY, f"The answer ended ({self.finish_reason}) without a token.")
        elif self.completion_tokens is None:
            self.fail(Reason.NO_USAGE, "The server sent neither usage nor token ids, so tokens cannot be counted.")
        else:
            self._check_counts()

    def _check_counts(self) -> None:
        usage = self.usage or {}
        made, read, total = (_number(usage, f"{name}_tokens") for name in ("completion", "prompt", "total"))
        asked = self.ask
        if made is not None and made > asked.max_tokens:
            self.fail(Reason.WRONG_USAGE, f"usage counts {made} tokens; at most {asked.max_tokens} were requested.")
        elif total is not None and None not in (made, read) and total != (made or 0) + (read or 0):
            self.fail(Reason.WRONG_USAGE, f"usage reports {read} + {made} = {total} tokens.")
        elif _differ(read, asked.prompt_tokens):
            told = f"usage counts {read} tokens of a prompt that has {asked.prompt_tokens} by /tokenize."
            self.fail(Reason.WRONG_USAGE, told)
        elif made is not None and self.has_token_ids:
            self._check_ids(made)

    def _check_ids(self, made: int) -> None:
        sent = len(self.token_ids)
        if sent > made:
            once = sent - self._repeated_tokens
            if self._repeated_tokens and once <= made:
                message = (
                    f"{self._repeated_events} chunks were sent twice: {sent} token ids, {once} without the repeats."
                )
                self.fail(Reason.DUPLICATE, message)
            else:
                self.fail(Reason.WRONG_USAGE, f"usage counts {made} tokens and {sent} token ids were sent.")
        elif sent + _END_TOKENS < made and self.shows_all:
            self.fail(Reason.WRONG_USAGE, f"usage counts {made} tokens and only {sent} token ids were sent.")

    def recorded(
        self, role: Role, began_at: float, *, turn: int = 0, run: int = 0, late_s: float | None = None
    ) -> RequestRecord:
        """The request as stored in the record; `began_at` is the start of the workload."""
        usage = self.usage or {}
        prompt_details = usage.get("prompt_tokens_details") or {}
        details = usage.get("completion_tokens_details") or {}
        num_prompt = _number(usage, "prompt_tokens")
        return RequestRecord(
            role=role,
            start_s=self.sent_at - began_at,
            total_s=self.total_s,
            arrivals_s=tuple(self.arrivals_s),
            arrival_tokens=tuple(self.arrival_tokens) if self.has_token_ids else (),
            arrival_chars=() if self.has_token_ids else tuple(self.arrival_chars),
            responded_s=self.responded_s,
            # Without usage the server's tokenizer has counted the prompt, where it has one.
            prompt_tokens=self.ask.prompt_tokens if num_prompt is None else num_prompt,
            completion_tokens=self.completion_tokens,
            counted_by="usage" if _number(usage, "completion_tokens") is not None else "token_ids",
            cached_tokens=_number(prompt_details, "cached_tokens"),
            reasoning_tokens=_number(details, "reasoning_tokens"),
            accepted_drafts=_number(details, "accepted_prediction_tokens"),
            rejected_drafts=_number(details, "rejected_prediction_tokens"),
            finish_reason=self.finish_reason,
            text_sha256=hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest(),
            label=self.ask.label,
            turn=turn,
            run=run,
            late_s=late_s,
            failure=self.failure,
        )


def check_text_count(answer: StreamedAnswer, num_text_tokens: int) -> None:
    """Checks usage against the number of tokens in the text, for a server that sends no token ids.

    A text can have more than one tokenization, so only a count that is off by a factor is a failure.
    """
    made = _number(answer.usage, "completion_tokens")
    if answer.failure or made is None:
        return
    repeats = answer.num_repeats
    if repeats and num_text_tokens > 1.25 * made + _TEMPLATE_SLACK:
        message = f"{repeats} chunks were sent twice: the text has {num_text_tokens} tokens, usage counts {made}."
        answer.fail(Reason.DUPLICATE, message)
    elif num_text_tokens > 2 * made + _TEMPLATE_SLACK:
        answer.fail(Reason.WRONG_USAGE, f"usage counts {made} tokens and the text has {num_text_tokens}.")
    elif answer.shows_all and made > 2 * num_text_tokens + _TEMPLATE_SLACK:
        answer.fail(Reason.WRONG_USAGE, f"usage counts {made} tokens and the text has only {num_text_tokens}.")


def error_message(body: Any) -> str:
    """The message of an error in OpenAI's format or a similar one."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or (body.get("message") if isinstance(body, dict) else None) or body)


def _number(fields: dict[str, Any] | None, name: str) -> int | None:
    value = (fields or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _differ(counted: int | None, expected: int | None) -> bool:
    return counted is not None and expected is not None and abs(counted - expected) > _TEMPLATE_SLACK
