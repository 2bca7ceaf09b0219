"""The official OpenAI client against the tiny model, over real sockets."""

import json
from typing import Literal

import openai
import pydantic
import pytest

from tests.server.conftest import listening

QUESTION = [{"role": "user", "content": "What is 6 × 7?"}]


@pytest.fixture(scope="module")
def url(tiny):
    with listening(tiny.app) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_gets_the_same_bytes_streamed_and_whole(client):
    options = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    whole = client.chat.completions.create(**options)
    reasoning = content = ""
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            content += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            reason = chunk.choices[0].finish_reason
    message = whole.choices[0].message
    assert content.encode() == message.content.encode()
    assert reasoning.encode() == (message.reasoning_content or "").encode()
    assert (reason, chunk.usage.total_tokens) == (whole.choices[0].finish_reason, whole.usage.total_tokens)
    assert message.content or message.reasoning_content


def test_the_official_client_understands_refusals(client):
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as error:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert error.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="context holds 1200") as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=1200)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_official_client_calls_tools_and_streams_them(client):
    pick = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    options = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [{"type": "function", "function": {"name": "pick", "parameters": pick}}],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
        "reasoning_effort": "none",
        "seed": 4,
    }
    (whole,) = client.chat.completions.create(**options).choices[0].message.tool_calls
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (whole.function.name, whole.type) == ("pick", "function")
    assert json.loads(whole.function.arguments)["side"] in ("left", "right")
    assert streamed.function.arguments == whole.function.arguments


class Verdict(pydantic.BaseModel):
    side: Literal["left", "right"]
    is_sure: bool


def test_the_official_client_parses_answers_into_its_own_models(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Verdict, reasoning_effort="none", seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_the_official_client_reads_logprobs_choices_and_echo(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, n=2, seed=1, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2, 2, 2]
    answer = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=2, echo=True, logprobs=1, seed=1)
    for prompt, choice in zip(("ab", "c"), answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.logprobs.tokens) == len(prompt) + 2
        assert choice.logprobs.token_logprobs[0] is None
