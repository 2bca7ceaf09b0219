"""Log-probabilities in two forms, and what two servers' predictions have in common."""

import asyncio
import math

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench.record import Reason
from onebox.eval.likelihood import NotOfferedError, agreement, divergence, read_likelihoods
from onebox.eval.passages import Passage

PASSAGE = Passage("en/0", "en", "a b c")
IDS = [1, 2, 3]


def read(handler, ids=IDS):
    """What is read from a server whose answers the handler makes."""

    async def run():
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            return await read_likelihoods(http, "model", PASSAGE, ids, 2)

    return asyncio.run(run())


def answered(choice):
    return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


def in_vllms_form(request):
    """The prompt's own token first, as vLLM writes it, then the likeliest."""
    b, c = ({"2": {"logprob": -3.0, "rank": 9}, "7": {"logprob": -0.1, "rank": 1}}, {"3": {"logprob": -0.5, "rank": 1}})
    return answered({"text": " d", "prompt_logprobs": [None, b, c]})


def in_the_older_form(request):
    tops = [None, {" b": -3.0, " x": -0.1}, {" c": -0.5}, {" d": -0.2}]
    table = {"tokens": ["a", " b", " c", " d"], "token_logprobs": [None, -3.0, -0.5, -0.2], "top_logprobs": tops}
    return answered({"text": "a b c d", "logprobs": table})


def refusing(name, handler):
    def handle(request):
        if name.encode() in request.content:
            return httpx.Response(400, json={"error": {"message": f"unknown field {name}"}})
        return handler(request)

    return handle


def test_both_forms_tell_the_same():
    first = read(in_vllms_form)
    second = read(refusing("prompt_logprobs", in_the_older_form))
    assert (first.form, second.form) == ("prompt_logprobs", "echo")
    assert first.loss == second.loss == 3.5
    assert [place.likeliest for place in first.places] == ["7", "3"]
    assert [place.likeliest for place in second.places] == [" x", " c"]


def test_a_server_without_token_ids_is_read_in_the_older_form():
    def handle(request):
        return in_the_older_form(request) if b"echo" in request.content else in_vllms_form(request)

    assert read(handle, ids=None).form == "echo"


def test_a_server_that_offers_neither_is_no_failure():
    with pytest.raises(NotOfferedError, match=r"unknown field prompt_logprobs.*unknown field echo"):
        read(refusing("prompt_logprobs", refusing("echo", in_vllms_form)))
    with pytest.raises(NotOfferedError, match="accepted but not returned"):
        read(lambda _: answered({"text": " d"}))


def times_out(request):
    raise httpx.ReadTimeout("too slow")


def breaks_off(request):
    raise httpx.RemoteProtocolError("peer closed connection")


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (lambda _: httpx.Response(500, json={"error": {"message": "boom"}}), Reason.SERVER_ERROR),
        (lambda _: httpx.Response(200, text="<html>"), Reason.MALFORMED),
        (lambda _: answered({"prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}), Reason.MALFORMED),
        (lambda _: answered({"prompt_logprobs": [None, {"9": {"logprob": -1.0}}, {}]}), Reason.MALFORMED),
        (lambda _: answered({"prompt_logprobs": [None, {"2": {"logprob": 4.0}}, {}]}), Reason.MALFORMED),
        (times_out, Reason.TIMEOUT),
        (breaks_off, Reason.CUT),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_name(handler, reason):
    found = read(handler)
    assert found.failure is not None
    assert found.failure.reason is reason
    assert found.places == ()


WEIGHTS = st.lists(st.floats(0.01, 1), min_size=6, max_size=6)


def distribution(weights):
    return {str(token): math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


@given(WEIGHTS, WEIGHTS, st.integers(1, 6))
def test_the_divergence_is_a_lower_bound_that_is_exact_when_all_tokens_are_named(first, second, num_top):
    p, q = distribution(first), distribution(second)
    true = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
    top_p, top_q = (dict(sorted(one.items(), key=lambda item: -item[1])[:num_top]) for one in (p, q))
    found = divergence(top_p, top_q)
    assert -1e-12 <= found <= true + 1e-9
    if num_top == 6:
        assert found == pytest.approx(true, abs=1e-9)


def test_equal_predictions_have_no_divergence_and_other_tokens_no_comparison():
    first = read(in_vllms_form)
    same = agreement(first, first)
    assert same is not None
    assert (same.num_tokens, same.num_same, same.divergence) == (2, 2, 0.0)
    assert agreement(first, read(refusing("prompt_logprobs", in_the_older_form))) is None
