"""What the engine refuses, with the numbers or the name of what is wrong; nothing impossible gets in."""

import pytest

from onebox.engine.api import (
    ContextTooLongError,
    Engine,
    Grammar,
    GrammarKind,
    QueueFullError,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
)
from onebox.spec.errors import UnsupportedError, UsageError
from tests.engine.fake import VOCAB_SIZE, FakeRunner, tokens_of
from tests.engine.small import answer, config, request


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([1] * 500, {}, "500 tokens and the context holds 500"),
        ([1] * 900, {}, "900 tokens and the context holds 500"),
        ([1] * 300, {"max_tokens": 201}, "300 tokens and 201 more are asked for, 501 in all; the context holds 500"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_both_numbers(fake, prompt, sampling, says):
    with pytest.raises(ContextTooLongError, match=says):
        fake[0].submit(request("a", prompt, **sampling))


def test_what_exceeds_the_pages_is_refused_with_both_numbers():
    runner = FakeRunner(config(num_pages=3))
    with Engine(runner, runner.config) as engine:
        with pytest.raises(ContextTooLongError, match="4 pages of 64 tokens, where the KV cache has 3"):
            engine.submit(request("a", [1] * 180, max_tokens=13))
        assert tokens_of(engine.submit(request("a", [1] * 180, max_tokens=12))) == answer([1] * 180, 12)


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], {}, "empty"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE}"),
        ([-1], {}, "token id -1"),
        ([1], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, f"logit_bias names token id {VOCAB_SIZE}"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, f"stop_token_ids names token id {VOCAB_SIZE}"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids names token id -1"),
        ([1, 1.5], {}, "token id 1.5"),
        ([1, 10**30], {}, "token id 10000"),
        (["1"], {}, "token id '1'"),
        ([1, [2, 3]], {}, r"token id \[2, 3\]"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(fake, prompt, sampling, says):
    with pytest.raises(UsageError, match=says):
        fake[0].submit(request("a", prompt, **sampling))


def test_a_min_tokens_that_bans_the_whole_vocabulary_is_refused(fake):
    everything = tuple(range(VOCAB_SIZE))
    with pytest.raises(UsageError, match="min_tokens is 2 and all 48 tokens are stop tokens"):
        fake[0].submit(request("a", [1], min_tokens=2, stop_token_ids=everything))
    assert tokens_of(fake[0].submit(request("a", [1], stop_token_ids=everything))) == []
    fewer = everything[1:]
    assert tokens_of(fake[0].submit(request("a", [1], min_tokens=5, stop_token_ids=fewer))) == [0] * 5


def test_a_grammar_without_a_token_table_is_refused(fake):
    with pytest.raises(UnsupportedError, match="no token table"):
        fake[0].submit(request("a", [1], grammar=Grammar(GrammarKind.REGEX, "a*")))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": NAN},
        {"temperature": 1e-309},
        {"temperature": 1e-11},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": INF},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 5e-324},
        {"top_p": NAN},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"max_tokens": 2.5},
        {"min_tokens": NAN},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"min_p": NAN},
        {"max_tokens": 0},
        {"min_tokens": 3, "max_tokens": 2},
        {"presence_penalty": 2.5},
        {"frequency_penalty": NAN},
        {"frequency_penalty": -INF},
        {"presence_penalty": 1e300},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": NAN},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, -INF),)},
        {"logit_bias": ((1, NAN),)},
        {"logit_bias": ((1, "2"),)},
        {"logit_bias": tuple((token_id, 1.0) for token_id in range(5000))},
        {"stop_token_ids": tuple(range(5000))},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_by_name(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize("timeout_s", [0, -1, NAN, INF, 10**400, "1"])
def test_an_impossible_timeout_is_refused(timeout_s):
    with pytest.raises(UsageError, match="timeout_s"):
        Request("a", (1,), timeout_s=timeout_s)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_model_len": 0},
        {"num_pages": 0},
        {"num_checkpoints": -1},
        {"max_num_batched_tokens": 100},
        {"checkpoint_spacing": 0},
    ],
    ids=str,
)
def test_impossible_limits_are_refused_by_name(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        config(**bad)


@pytest.mark.parametrize(("method", "max_drafts"), [("mtp", 0), ("mtp", 9), ("none", -1)])
def test_impossible_numbers_of_drafts_are_refused(method, max_drafts):
    with pytest.raises(UsageError, match=f"not {max_drafts}"):
        SpeculationConfig(SpeculationMethod(method), max_drafts)


def test_a_full_queue_refuses_and_has_room_again_later(fake):
    engine, runner = fake
    runner.gate.clear()
    handles = [engine.submit(request(str(i), [i])) for i in range(4)]
    with pytest.raises(QueueFullError, match="Of 4 places for requests 4 are taken"):
        engine.submit(request("one too many", [1]))
    with pytest.raises(UsageError, match="id 0 is open already"):
        engine.submit(request("0", [1]))
    runner.gate.set()
    assert [tokens_of(handle) for handle in handles] == [answer([i]) for i in range(4)]
    assert tokens_of(engine.submit(request("one too many", [1]))) == answer([1])


def test_several_requests_are_accepted_together_or_not_at_all(fake):
    engine, runner = fake
    runner.gate.clear()
    with pytest.raises(QueueFullError):
        engine.submit_copies(request("a", [1]), 5)
    with pytest.raises(UsageError, match="id b is open already"):
        engine.submit_all([request("b", [1]), request("b", [2])])
    runner.gate.set()
    assert engine.stats().num_waiting == 0
    assert len([list(handle) for handle in engine.submit_copies(request("a", [1]), 4)]) == 4
