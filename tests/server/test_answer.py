"""An answer does not depend on how the engine's tokens were cut into events: speculation gives one or many a step."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.api import Counts, Failed, Finished, FinishReason, Request, RequestHandle, TokenLogprob, Tokens
from onebox.server.answer import Answer, Answers
from onebox.server.errors import GenerationError
from onebox.server.prompt import Prompt
from onebox.server.sse import merged
from onebox.server.submission import Submission
from onebox.server.usage import Usage
from onebox.text.parser import AnswerParser, Content, Reasoning
from onebox.text.stream import Detokenizer
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart, ToolDefinition
from tests.text.test_stream import stopped_text

CALL = "<tool_call>\n<function=f>\n<parameter=x>\n世\n</parameter>\n</function>\n</tool_call>"
FRAGMENTS = ["Hm ", "\n", "</think>", "\n\n", "世界🙂", "END", "E", "<tool_call>", "<", CALL, "a<b"]
PARSER = partial(AnswerParser, in_reasoning=True, tools=[ToolDefinition("f", {})])


@pytest.fixture(scope="module")
def service(make_service):
    from tests.engine.scripted import ScriptedRunner

    service = make_service(ScriptedRunner())
    yield service
    service.engine.close()


def answer_of(service, prompt, chunks, reason=FinishReason.STOP):
    handle = RequestHandle("x")
    for chunk in chunks:
        logprobs = tuple(TokenLogprob(token_id, -float(place), 1) for place, token_id in enumerate(chunk))
        handle.deliver(Tokens("x", tuple(chunk), logprobs), 0.0)
    num_made = sum(map(len, chunks))
    handle.deliver(Finished("x", reason, Counts(len(prompt.token_ids), num_made + 1, cached_tokens=2)), 0.0)
    return Answer(Submission(service.engine), service.tokenizer, prompt, Request("x", prompt.token_ids), handle)


def said(chunk):
    """The deltas joined, kind by kind."""
    calls = [
        (
            delta.name,
            "".join(d.text for d in chunk.deltas if isinstance(d, ToolCallArguments) and d.index == delta.index),
        )
        for delta in chunk.deltas
        if isinstance(delta, ToolCallStart)
    ]
    reasoning = "".join(delta.text for delta in chunk.deltas if isinstance(delta, Reasoning))
    return reasoning, "".join(delta.text for delta in chunk.deltas if isinstance(delta, Content)), calls


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    is_one_call=st.booleans(),
)
def test_any_cutting_of_the_tokens_gives_the_same_answer(service, text, cuts, is_one_call):
    prompt = Prompt((1, 2), Request("x", (1,)).sampling, ("END",), PARSER, is_one_call=is_one_call)
    token_ids = service.tokenizer.encode(text)
    chunks, at = [], 0
    while at < len(token_ids):
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(token_ids[at : at + size])
        at += size
    results = []
    for cutting in (chunks, [[token_id] for token_id in token_ids]):
        answer = answer_of(service, prompt, cutting)
        chunk = asyncio.run(answer.whole())
        assert chunk.token_ids == tuple(answer.token_ids)
        assert [logprob.token_id for logprob in chunk.logprobs] == answer.token_ids
        results.append((said(chunk), answer.finish_reason, answer.token_ids, answer.usage))
    assert results[0] == results[1]
    (_, _, calls), reason, made, usage = results[0]
    assert reason == ("tool_calls" if calls else "stop")
    assert usage.completion_tokens == len(made) + (
        made == list(token_ids) and "END" not in text and not is_cut(results)
    )
    assert not is_one_call or len(calls) <= 1


@given(st.lists(st.integers(0, 383), max_size=30), st.lists(st.integers(1, 4), min_size=1))
def test_an_answer_has_no_token_behind_the_one_that_completed_a_stop_string(service, token_ids, lengths):
    stops = ("!", service.tokenizer.decode([100]))
    chunks, at = [], 0
    while at < len(token_ids):
        chunks.append(tuple(token_ids[at : at + lengths[len(chunks) % len(lengths)]]))
        at += len(chunks[-1])
    answer = answer_of(service, Prompt((1,), Request("x", (1,)).sampling, stops), chunks)
    (_, content, _) = said(asyncio.run(answer.whole()))
    assert content == stopped_text(service.tokenizer.decode(token_ids), stops)[0]
    detokenizer, text, num_tokens = Detokenizer(service.tokenizer), "", 0
    while num_tokens < len(token_ids) and not any(stop in text for stop in stops):
        text += detokenizer.push([token_ids[num_tokens]])
        num_tokens += 1
    assert answer.token_ids == token_ids[:num_tokens]


def is_cut(results):
    """Whether the answer was ended before a second call; then no end token is counted."""
    return results[0][3].completion_tokens == len(results[0][2])


def test_an_answer_that_the_engine_did_not_end_is_an_error(service):
    prompt = Prompt((1,), Request("x", (1,)).sampling)
    for reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
        with pytest.raises(GenerationError, match="before its answer was done"):
            asyncio.run(answer_of(service, prompt, [(1,)], reason).whole())


def test_of_several_answers_one_failure_fails_the_request(service):
    prompt = Prompt((1,), Request("x", (1,)).sampling)
    broken = RequestHandle("y")
    broken.deliver(Failed("y", "It broke."), 0.0)
    answers = (
        answer_of(service, prompt, [(1,)]),
        Answer(Submission(service.engine), service.tokenizer, prompt, Request("y", (1,)), broken),
    )

    async def read():
        return [item async for item in merged([answer.chunks() for answer in answers], heartbeat_s=3600)]

    with pytest.raises(GenerationError, match=r"It broke\."):
        asyncio.run(read())


def test_answers_to_one_prompt_count_it_once(service):
    prompt = Prompt((1, 2, 3), Request("x", (1,)).sampling)
    answers = Answers("z", tuple(answer_of(service, prompt, [(1,), (2,)]) for _ in range(4)), 2)
    asyncio.run(answers.whole())
    assert answers.usage == Usage(prompt_tokens=6, completion_tokens=12, cached_tokens=4)
