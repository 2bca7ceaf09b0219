"""Completions as evaluation harnesses use them: many prompts, token ids, echo, log-probabilities in every shape."""

import math

import pytest

from onebox.server.logprobs import token_text
from tests.server.conftest import LogprobRunner, events, wait_until
from tests.server.test_errors import refused

TEXT = "Grüße"


def joined(chunks):
    """The logprobs of a stream's chunks put together."""
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


@pytest.fixture
def ids(tokenizer):
    return list(tokenizer.encode(TEXT))


def test_each_of_a_list_of_prompts_is_answered_by_itself(tiny, ids):
    options = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    alone = [tiny.complete(prompt, **options).json()["choices"][0] for prompt in (TEXT, "b", [5, 6])]
    body = tiny.complete([TEXT, "b", [5, 6], ids], **options).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["token_ids"] for choice in body["choices"]]
    assert texts == [choice["token_ids"] for choice in (*alone, alone[0])]
    assert body["usage"]["prompt_tokens"] == len(ids) + 1 + 2 + len(ids)
    assert body["choices"][2]["prompt_token_ids"] == [5, 6]


def test_choices_are_ordered_by_prompt_then_by_copy(tiny):
    body = tiny.complete(["a", "b"], n=2, seed=3, max_tokens=4, return_token_ids=True).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
        list(tiny.service.tokenizer.encode(text)) for text in "aabb"
    ]
    assert body["usage"]["prompt_tokens"] == 2


def test_prompts_are_accepted_all_or_none(scripted):
    client = scripted("ok", fails_on=None)
    refused(client.complete(["fine", [1, 384]]), 400)
    client.service.engine.close()
    stats = client.service.engine.stats()
    assert stats.num_free_pages == client.service.engine.config.num_pages
    assert "100 answers are asked for at once" in refused(scripted("ok").complete(["x"] * 100), 400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(scripted, stream, ids):
    client = scripted("xyz")
    for prompt in (TEXT, ids, [TEXT]):
        response = client.complete(prompt, echo=True, stream=stream)
        choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == TEXT + "xyz"


def test_logprobs_have_openais_legacy_shape_and_stream_as_they_are_told_whole(tiny):
    options = {"temperature": 0, "max_tokens": 5, "logprobs": 3}
    (choice,) = tiny.complete(TEXT, **options).json()["choices"]
    table = choice["logprobs"]
    assert table.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(column) for column in table.values()} == {5}
    for token, logprob, top in zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3
        assert sum(map(math.exp, top.values())) <= 1
    assert joined(events(tiny.complete(TEXT, **options, stream=True))) == table


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_can_score_a_given_continuation(tiny, ids, max_tokens):
    """As lm-eval asks: the whole as token ids, echoed, with one alternative, and the continuation's scores cut out."""
    options = {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    response = tiny.complete([ids], **options)
    (choice,) = response.json()["choices"]
    table = choice["logprobs"]
    assert {len(column) for column in table.values()} == {len(ids) + max_tokens}
    assert (table["token_logprobs"][0], table["top_logprobs"][0]) == (None, None)
    assert table["tokens"][: len(ids)] == [token_text(tiny.service.tokenizer, i) for i in ids]
    assert table["text_offset"][: len(ids)] == [0, 1, 2, 2, 3, 3, 4]
    # What the prompt's tokens are given is what they get when they are made.
    for place in (1, 3, 6):
        bias = {str(ids[place]): 100}
        made = tiny.complete(ids[:place], temperature=0, max_tokens=1, logprobs=1, logit_bias=bias).json()
        (logprob,) = made["choices"][0]["logprobs"]["token_logprobs"]
        assert logprob == pytest.approx(table["token_logprobs"][place], abs=1e-4)
    assert joined(events(tiny.complete([ids], **options, stream=True))) == table
    assert response.json()["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


def test_prompt_logprobs_have_vllms_shape(tiny, ids):
    (choice,) = tiny.complete(TEXT, max_tokens=1, prompt_logprobs=2).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert (first, len(rest)) == (None, len(ids) - 1)
    for token_id, candidates in zip(ids[1:], rest, strict=True):
        entry = candidates[str(token_id)]
        assert entry["decoded_token"] == token_text(tiny.service.tokenizer, token_id)
        assert entry["rank"] >= 1
        assert [c["rank"] for c in candidates.values()][:2] == [1, 2]


def test_chat_logprobs_have_openais_shape_and_stream_as_they_are_told_whole(tiny):
    options = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (choice,) = tiny.chat(**options, return_token_ids=True).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [
        tiny.service.tokenizer.shown_bytes(token_id) for token_id in choice["token_ids"]
    ]
    for entry in content:
        best = entry["top_logprobs"][0]
        assert (best["token"], best["logprob"], best["bytes"]) == (entry["token"], entry["logprob"], entry["bytes"])
        assert len(entry["top_logprobs"]) == 2
    chunks = events(tiny.chat(**options, stream=True))
    assert [e for c in chunks for e in (c["choices"][0]["logprobs"] or {}).get("content", [])] == content
    (bare,) = tiny.chat(temperature=0, max_tokens=1, logprobs=True).json()["choices"]
    assert bare["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_that_are_no_text_are_told_apart(tokenizer):
    names = [token_text(tokenizer, token_id) for token_id in range(384)]
    assert len(set(names)) == 384
    assert sum(name.startswith("bytes:\\x") for name in names) == 128
    assert names[383] == "token_id:383"


def test_what_completions_cannot_honour_is_refused(scripted):
    client = scripted("ok")
    assert "cannot be streamed" in refused(client.complete(prompt_logprobs=1, stream=True), 400)
    assert "less than or equal to 20" in refused(client.complete(logprobs=21), 400, "logprobs")
    assert "valid integer" in refused(client.complete([1, 2.5]), 400, "prompt.1")
    assert "valid string" in refused(client.complete(["a", 5]), 400, "prompt.1")
    assert "empty" in refused(client.complete([]), 400)
    assert "empty" in refused(client.complete(["a", ""]), 400)


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


def test_completions_make_sixteen_tokens_unless_told_and_take_token_ids(scripted):
    client = scripted("x" * 40)
    assert client.complete().json()["choices"][0]["text"] == "x" * 16
    body = client.complete([1, 2, 3], max_tokens=2).json()
    assert (body["object"], body["choices"][0]["text"], body["usage"]["prompt_tokens"]) == ("text_completion", "xx", 3)


def test_ignore_eos_goes_on_to_the_limit(scripted):
    body = scripted("ab").complete(ignore_eos=True, max_tokens=5).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abab", "length")


def test_usage_so_far_is_streamed_when_asked_for(scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(scripted("abc").complete(stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


def test_a_long_prompt_is_echoed_in_parts(scripted):
    client = scripted("ok", max_model_len=300_000, num_pages=20_000)
    client.runner.__class__ = LogprobRunner
    options = {"echo": True, "logprobs": 2, "max_tokens": 0}
    prompt = "ab" * 1000
    response = client.complete(prompt, **options, stream=True)
    chunks = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt
    assert max(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) <= 64
    (choice,) = client.complete(prompt, **options).json()["choices"]
    assert joined(chunks) == choice["logprobs"]
    assert len(choice["logprobs"]["tokens"]) == 2000


def test_log_probabilities_are_limited_by_their_number(scripted):
    client = scripted("ok", max_model_len=300_000, num_pages=20_000)
    prompt = [5] * 50_000
    message = refused(client.complete(prompt, prompt_logprobs=20), 400, "prompt_logprobs")
    assert "1050000 log-probabilities are asked for" in message
    refused(client.complete(prompt, echo=True, logprobs=10, n=2, stream=True), 400, "prompt_logprobs")
    refused(client.complete(logprobs=20, max_tokens=60_000), 400, "logprobs")
    refused(client.chat(logprobs=True, top_logprobs=20, max_tokens=3000, n=20), 400, "logprobs")
    assert client.complete(logprobs=20, max_tokens=60_000, stream=True).status_code == 200
    assert not client.service.engine._open


def test_an_answer_without_a_limit_ends_where_its_log_probabilities_are_too_many(scripted, monkeypatch):
    monkeypatch.setattr("onebox.server.answer.MAX_LOGPROB_VALUES", 500)
    client = scripted("x" * 1000, max_model_len=3000, num_pages=300)
    client.runner.__class__ = LogprobRunner
    assert "exceed 500 values" in refused(client.chat(logprobs=True, top_logprobs=1), 400, "logprobs")
    wait_until(lambda: not client.service.engine._open)
