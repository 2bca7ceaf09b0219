"""Sends questions to one server concurrently and scores the answers. A failure is not a wrong answer."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onebox.bench.answer import Ask, StreamedAnswer
from onebox.bench.client import Client
from onebox.eval.judge import judge
from onebox.eval.question import GivenAnswer, Question, QuestionResult

__all__ = ["Manner", "ask_all", "ask_patiently", "request_of"]

_BUSY = (429, 503)
_THINKING_TOKENS = 4096
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Manner:
    """Request settings of a run. Always greedy: sampling would add noise to the scores."""

    concurrency: int = 4
    thinking: bool = False
    waits_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """Delays before retrying a busy server; after the last one the refusal is a failure."""


def request_of(question: Question, manner: Manner) -> Ask:
    """The question as a request. Thinking gets extra tokens, so that it does not truncate the answer."""
    body = dict(question.body)
    messages, tools = body.pop("messages"), body.pop("tools", ())
    return Ask(
        tuple(messages),
        max_tokens=question.max_tokens + (_THINKING_TOKENS if manner.thinking else 0),
        thinking=manner.thinking,
        tools=tuple(tools),
        extra=body,
        label=question.id,
    )


async def ask_all(
    client: Client, questions: Sequence[Question], manner: Manner, keep: Callable[[QuestionResult], None]
) -> None:
    """Passes each reply to `keep` on arrival, so that an interrupted run keeps the earlier replies."""
    places = asyncio.Semaphore(manner.concurrency)

    async def one(question: Question) -> None:
        async with places:
            keep(await _reply(client, question, manner))

    async with asyncio.TaskGroup() as group:
        for question in questions:
            group.create_task(one(question))


async def ask_patiently(client: Client, asked: Ask, manner: Manner) -> tuple[StreamedAnswer, int]:
    """The answer, and how often a busy server was asked again for it."""
    answer, retries = await client.ask(asked), 0
    for wait_s in manner.waits_s:
        if answer.failure is None or answer.failure.status not in _BUSY:
            break
        await asyncio.sleep(wait_s)
        answer, retries = await client.ask(asked), retries + 1
    return answer, retries


async def _reply(client: Client, question: Question, manner: Manner) -> QuestionResult:
    answer, retries = await ask_patiently(client, request_of(question, manner), manner)
    if answer.failure is not None:
        return QuestionResult(question.id, failure=answer.failure)
    given = _given(answer, retries)
    return QuestionResult(question.id, given, judge(question.truth, given))


def _given(answer: StreamedAnswer, retries: int) -> GivenAnswer:
    usage = answer.usage or {}
    # A server that does not separate thinking from the answer sends both as content.
    thought, mark, said = answer.content.rpartition(_END_OF_THOUGHT)
    calls = tuple({"name": call.name, "arguments": _arguments(call.arguments)} for call in answer.calls.values())
    return GivenAnswer(
        text=said.lstrip() if mark else said,
        calls=calls,
        finish_reason=answer.finish_reason or "",
        reasoning=answer.reasoning + thought,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=answer.completion_tokens,
        seconds=round(answer.total_s, 4),
        retries=retries,
    )


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
