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
        "reasoning": "Let me see.",
    }
    assert (choice["index"], choice["finish_reason"], body["object"]) == (0, "stop", "chat.completion")
    assert (body["model"], body["id"][:9]) == ("tiny", "chatcmpl-")
    made = len(THOUGHT.encode()) - len("</think>") + 2
    assert body["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": made,
        "total_tokens": 23 + made,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": len("Let me see.\n") + 1,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_a_stream_joins_to_the_whole_answer(scripted):
    client = scripted(THOUGHT)
    whole = client.chat().json()
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks, "content") == whole["choices"][0]["message"]["content"]
    for name in ("reasoning_content", "reasoning"):
        assert joined(chunks, name) == whole["choices"][0]["message"][name]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(scripted):
    assert all("usage" not in chunk for chunk in events(scripted("x").chat(stream=True)))


def test_without_thinking_all_is_content(scripted):
    message = scripted("Yes.").chat(**QUIET).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": None, "reasoning": None}


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
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 12, 14)
    wait_until(lambda: client.service.engine.stats().num_finished == 1)
    client.service.engine.close()
    assert client.service.engine.stats().num_free_pages == client.service.engine.config.num_pages


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
    fed = [token for chunk in client.runner.chunks for token in chunk.token_ids]
    prompt = client.service.tokenizer.decode(fed)
    assert prompt.startswith("system\nS\nuser\nQ\nassistant\nA\nuser\nQ2\nassistant\n<think>\n")


def test_what_a_request_leaves_open_is_as_the_model_maker_recommends(scripted):
    client = scripted("ok")
    client.complete()
    client.complete(temperature=0, top_p=0.5, top_k=-1, seed=9)
    first, second = client.sampling
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 0.95, 20)
    assert (second.temperature, second.top_p, second.top_k, second.seed) == (0, 0.5, 0, 9)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_every_sampling_field_reaches_the_engine(scripted, endpoint):
    client = scripted("ok")
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    response = getattr(client, endpoint)(**fields, logit_bias={"5": -100, "70": 1.5}, stop_token_ids=[8, 9])
    assert response.status_code == 200, response.text
    (sampling,) = client.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((5, -100), (70, 1.5)), (8, 9))


def test_priority_and_cache_prompt_reach_the_engine(scripted):
    client = scripted("ok")
    client.chat(priority=-5, cache_prompt=False)
    client.complete(priority=7)
    first, second = client.requests
    assert (first.priority, first.cache_prompt) == (-5, False)
    assert (second.priority, second.cache_prompt) == (7, True)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_harmless_fields_are_taken_and_change_nothing(scripted, endpoint):
    client = scripted("ok")
    plain = getattr(client, endpoint)().json()["choices"]
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "service_tier": "auto",
        "store": False,
        "response_format": {"type": "text"},
    }
    assert getattr(client, endpoint)(**harmless).json()["choices"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(scripted, stream):
    client = scripted(THOUGHT)
    made = list(client.service.tokenizer.encode(THOUGHT))
    response = client.chat(return_token_ids=True, stream=stream)
    if stream:
        chunks = events(response)
        prompt_ids = chunks[0]["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        token_ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    else:
        prompt_ids, token_ids = response.json()["prompt_token_ids"], response.json()["choices"][0]["token_ids"]
    assert token_ids == made
    assert client.service.tokenizer.decode(prompt_ids) == "user\nHi\nassistant\n<think>\n"


def test_usage_so_far_is_streamed_when_asked_for(scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(scripted("abc").complete(stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_n_choices_are_n_answers_with_seeds_of_their_own(tiny, endpoint):
    options = {"n": 3, "seed": 5, "max_tokens": 8}
    whole = getattr(tiny, endpoint)(**options, return_token_ids=True).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    ids = [choice["token_ids"] for choice in whole["choices"]]
    for place, token_ids in enumerate(ids):
        alone = getattr(tiny, endpoint)(seed=5 + place, max_tokens=8, return_token_ids=True).json()
        assert alone["choices"][0]["token_ids"] == token_ids
    assert len({tuple(token_ids) for token_ids in ids}) == 3
    one = alone["usage"]
    assert whole["usage"]["prompt_tokens"] == one["prompt_tokens"]
    streamed = {0: [], 1: [], 2: []}
    for chunk in events(getattr(tiny, endpoint)(**options, stream=True, return_token_ids=True)):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert streamed == dict(enumerate(ids))


def test_what_an_answer_held_may_come_back_as_history(scripted):
    client = scripted(THOUGHT)
    message = client.chat().json()["choices"][0]["message"]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {**message, "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "And?"},
    ]
    assert client.chat(messages=messages).status_code == 200


def test_tokenize_and_detokenize_have_vllms_shapes_and_undo_each_other(scripted):
    client = scripted("ok")
    text = "héllo<|im_end|>"
    body = client.request("POST", "/tokenize", json_body={"prompt": text, "return_token_strs": True}).json()
    assert body == {
        "count": 7,
        "max_model_len": 400,
        "tokens": list(client.service.tokenizer.encode(text)),
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o", "<|im_end|>"],
    }
    undone = client.request("POST", "/detokenize", json_body={"tokens": body["tokens"]}).json()
    assert undone == {"prompt": text}


def test_tokenize_of_a_conversation_is_the_prompt_of_its_answer(scripted):
    client = scripted("ok")
    conversation = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = client.request("POST", "/tokenize", json_body=conversation).json()
    answer = client.chat(**conversation, return_token_ids=True).json()
    assert (body["tokens"], body["token_strs"]) == (answer["prompt_token_ids"], None)


def test_models_health_and_version(scripted):
    client = scripted("ok")
    (model,) = client.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 400)
    assert client.request("GET", "/v1/models/tiny").json() == model
    assert client.request("GET", "/version").json() == {"version": __version__}
    assert client.request("GET", "/health").json() == {
        "status": "ok",
        "message": "The engine runs.",
        "num_restarts": 0,
    }
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
