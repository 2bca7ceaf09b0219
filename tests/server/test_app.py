"""What the API promises, in process: shapes, reasoning, stops, usage, and a stream that equals the whole."""

import asyncio
import json

import pytest

from onebox import __version__
from onebox.server.app import create_app
from tests.server.conftest import events, wait_until

THOUGHT = "Let me see.\n</think>\n\nIt is 42 — 世界 🙂."
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def joined(chunks, field):
    return "".join(c["choices"][0]["delta"].get(field) or "" for c in chunks if c["choices"])


def test_a_chat_answer_has_openais_shape(scripted):
    body = scripted(THOUGHT).chat(model="tiny").json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is 42 — 世界 🙂.",
        "reasoning_content": "Let me see.",
    }
    assert (choice["index"], choice["finish_reason"], body["object"]) == (0, "stop", "chat.completion")
    assert (body["model"], body["id"][:9]) == ("tiny", "chatcmpl-")
    made = len(THOUGHT.encode()) - len("</think>") + 2
    assert body["usage"] == {"prompt_tokens": 23, "completion_tokens": made, "total_tokens": 23 + made}


def test_a_stream_joins_to_the_whole_answer(scripted):
    client = scripted(THOUGHT)
    whole = client.chat().json()
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks, "content") == whole["choices"][0]["message"]["content"]
    assert joined(chunks, "reasoning_content") == whole["choices"][0]["message"]["reasoning_content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(scripted):
    assert all("usage" not in chunk for chunk in events(scripted("x").chat(stream=True)))


def test_without_thinking_all_is_content(scripted):
    message = scripted("Yes.").chat(**QUIET).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["END", ["nope", "END"]])
def test_a_stop_string_ends_the_answer_and_frees_the_slot(scripted, stream, stop):
    client = scripted("one two EEND three", max_num_seqs=1, max_num_waiting=0)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = client.complete(stop=stop, stream=stream, max_tokens=50, **options)
    if stream:
        chunks = events(response)
        text, usage = "".join(c["choices"][0]["text"] for c in chunks[:-1]), chunks[-1]["usage"]
        reason = chunks[-2]["choices"][0]["finish_reason"]
    else:
        (choice,), usage = response.json()["choices"], response.json()["usage"]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("one two E", "stop")
    assert usage == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    wait_until(lambda: client.service.engine.stats().num_finished == 1)
    assert client.runner.in_use == {}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_limits_end_an_answer_by_length(scripted, limit):
    body = scripted("abcdef").chat(**{limit: 3}, **QUIET).json()
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_completions_make_sixteen_tokens_unless_told_and_take_token_ids(scripted):
    client = scripted("x" * 40)
    assert client.complete().json()["choices"][0]["text"] == "x" * 16
    body = client.complete([1, 2, 3], max_tokens=2).json()
    assert (body["object"], body["choices"][0]["text"], body["usage"]["prompt_tokens"]) == ("text_completion", "xx", 3)


def test_ignore_eos_goes_on_to_the_limit(scripted):
    body = scripted("ab").complete(ignore_eos=True, max_tokens=5).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abab", "length")


def test_history_and_parts_reach_the_prompt(scripted):
    client = scripted("ok")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "user", "content": "Q2"},
    ]
    assert client.request("POST", "/v1/chat/completions", json_body={"messages": messages}).status_code == 200
    fed = [token for batch in client.runner.batches for token in batch.rows[0].token_ids]
    prompt = client.service.tokenizer.decode(fed)
    assert prompt.startswith("system\nS\nuser\nQ\nassistant\nA\nuser\nQ2\nassistant\n<think>\n")


def test_what_a_request_leaves_open_is_as_the_model_maker_recommends(scripted):
    client = scripted("ok")
    client.complete()
    client.complete(temperature=0, top_p=0.5, top_k=-1, seed=9)
    first, second = (batch.rows[0].sampling for batch in client.runner.batches if batch.rows[0].start == 0)
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 0.95, 20)
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (0, 0.5, 0, 9)


def test_models_health_and_version(scripted):
    client = scripted("ok")
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 400)
    assert client.request("GET", "/version").json() == {"version": __version__}
    assert client.request("GET", "/health").json() == {"status": "ok"}
    client.service.engine.close()
    assert client.request("GET", "/health").status_code == 503


def test_the_random_model_answers_the_same_streamed_and_whole(tiny):
    for way in ({"temperature": 0}, {"seed": 12}):
        whole = tiny.chat(max_tokens=60, **way).json()
        chunks = events(tiny.chat(max_tokens=60, stream=True, **way))
        message = whole["choices"][0]["message"]
        assert joined(chunks, "content") == message["content"]
        assert joined(chunks, "reasoning_content") == (message["reasoning_content"] or "")
        assert message["content"] or message["reasoning_content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(scripted, stream):
    client = scripted("x" * 300, max_num_seqs=1)
    client.runner.gate.clear()

    async def leave():
        body = json.dumps({"prompt": "Hi", "max_tokens": 300, "stream": stream}).encode()
        messages = iter([{"type": "http.request", "body": body}])
        submitted = asyncio.Event()

        async def receive():
            for message in messages:
                return message
            while not client.service.engine._open:
                await asyncio.sleep(0.001)
            submitted.set()
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
        scope |= {"headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"}}
        await create_app(client.service)(scope, receive, send)
        assert submitted.is_set()

    asyncio.run(leave())
    client.runner.gate.set()
    assert client.complete(max_tokens=1).json()["choices"][0]["text"] == "x", "the slot is still held"
    assert client.service.engine.stats().num_finished == 2
