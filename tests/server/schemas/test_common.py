"""The fields that chat and completions share reach the engine."""

import pytest

from tests.server.conftest import events


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


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}),
        ("chat", {"continue_final_message": False, "no_stop_trim": False, "return_hidden_states": False}),
        ("complete", {"skip_special_tokens": True, "no_stop_trim": False, "return_hidden_states": False}),
    ],
)
def test_what_routers_spell_out_is_taken_as_far_as_it_is_what_happens_anyway(scripted, endpoint, fields):
    client = scripted("ok")
    ask = getattr(client, endpoint)
    assert ask(**fields).json()["choices"] == ask().json()["choices"]
    for name, value in fields.items():
        response = ask(**{name: not value})
        assert response.status_code == 400
        assert name in response.text
