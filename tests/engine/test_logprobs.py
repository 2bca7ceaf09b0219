"""Log-probabilities are those of the model itself: against torch on given logits, against transformers on the model."""

import pickle
import random

import pytest
import torch

from onebox.engine.logits import RowLogprobs
from onebox.engine.logprobs import PackedLogprobs, TokenLogprob
from onebox.engine.request import PromptLogprobs, Request, SamplingParams, Tokens
from onebox.model.load import load_model
from onebox.model.random import TINY, random_weights
from onebox.spec.model import spec_from_config
from tests.engine.tiny import tiny_engine
from tests.model.oracle import transformers_model

# The KV pages and the experts round to bfloat16, and transformers here does not.
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def oracle():
    return transformers_model(TINY, random_weights(spec_from_config(TINY)))


PROMPT = tuple(random.Random(3).randrange(300) for _ in range(150))


def ask(model, sampling, method="none", max_drafts=0, **limits):
    """(tokens, their logprobs, the prompt's logprobs)."""
    with tiny_engine(model, method, max_drafts, **limits) as engine:
        events = list(engine.submit(Request("a", PROMPT, sampling)))
    made = [event for event in events if isinstance(event, Tokens)]
    of_prompt = [event for event in events if isinstance(event, PromptLogprobs)]
    return (
        [token_id for event in made for token_id in event.token_ids],
        [logprob for event in made for logprob in event.logprobs],
        [logprob for event in of_prompt for logprob in event.logprobs],
    )


def check(told, logits, token_ids, num_top):
    """The logprobs told of these tokens against logits float32 [n, V] that others computed."""
    expected = logits.double().log_softmax(-1)
    assert [logprob.token_id for logprob in told] == list(token_ids)
    for logprob, row in zip(told, expected, strict=True):
        assert logprob.logprob == pytest.approx(float(row[logprob.token_id]), abs=TOLERANCE)
        assert len(logprob.top) == num_top
        for token_id, value in logprob.top:
            assert value == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        values = [value for _, value in logprob.top]
        assert values == sorted(values, reverse=True)
        if num_top:
            # No token that is left out is likelier than the last one told.
            assert float(row.topk(num_top).values[-1]) == pytest.approx(values[-1], abs=TOLERANCE)


# On given logits.


def test_values_and_ranks_are_those_of_torch():
    logits = torch.randn(20, 333, generator=torch.Generator().manual_seed(0)) * 4
    token_ids = [i * 16 for i in range(20)]
    told = RowLogprobs(logits).of(list(range(20)), token_ids, 7)
    expected = logits.double().log_softmax(-1)
    order = expected.argsort(dim=-1, descending=True)
    for row, (token_id, logprob) in enumerate(zip(token_ids, told, strict=True)):
        assert logprob.logprob == pytest.approx(float(expected[row, token_id]), rel=1e-6)
        assert logprob.rank == order[row].tolist().index(token_id) + 1
        assert [alternative for alternative, _ in logprob.top] == order[row, :7].tolist()


def test_among_equals_the_lower_id_comes_first():
    told = RowLogprobs(torch.zeros(2, 10)).of([0, 1], [0, 4], 3)
    assert [logprob.rank for logprob in told] == [1, 5]
    assert [token_id for token_id, _ in told[1].top] == [0, 1, 2]


def test_a_row_is_summed_alike_wherever_it_lies():
    row = torch.randn(1, 101, generator=torch.Generator().manual_seed(1)) * 9
    others = torch.randn(6, 101, generator=torch.Generator().manual_seed(2))
    alone = RowLogprobs(row).of([0], [3], 5)
    for place in range(7):
        stacked = torch.cat([others[:place], row, others[place:]])
        assert RowLogprobs(stacked).of([place], [3], 5) == alone


def test_impossible_tokens_have_no_probability():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    (told,) = RowLogprobs(logits).of([0], [1], 2)
    assert (told.logprob, told.rank) == (float("-inf"), 3)


# On the model.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answers_logprobs_are_the_transition_scores_of_transformers(model, oracle, temperature):
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=12, ignore_eos=True, logprobs=4)
    token_ids, told, _ = ask(model, sampling)
    whole = torch.tensor([[*PROMPT, *token_ids]])
    with torch.inference_mode():
        logits = oracle(whole).logits[0, len(PROMPT) - 1 : -1]
    scores = oracle.compute_transition_scores(whole, tuple(row[None] for row in logits), normalize_logits=True)[0]
    assert [logprob.logprob for logprob in told] == pytest.approx(scores.tolist(), abs=TOLERANCE)
    check(told, logits, token_ids, 4)


@pytest.mark.parametrize(("method", "max_drafts"), [("none", 0), ("mtp", 2), ("ngram", 3)])
def test_prompt_logprobs_are_those_of_transformers_and_cutting_the_prompt_changes_no_bit(
    model, oracle, method, max_drafts
):
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    _, _, whole = ask(model, sampling, method, max_drafts)
    _, _, cut = ask(model, sampling, method, max_drafts, max_num_batched_tokens=64)
    assert cut == whole
    with torch.inference_mode():
        logits = oracle(torch.tensor([PROMPT])).logits[0, :-1]
    check(whole, logits, PROMPT[1:], 2)


def test_logprobs_are_those_of_the_model_before_anything_is_done_to_its_logits(model):
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (token_id,), (told,), _ = ask(model, plain)
    changed = SamplingParams(
        temperature=0.3, top_k=2, max_tokens=1, logprobs=5, seed=2, logit_bias=((token_id, -100.0),)
    )
    (other,), (of_other,), _ = ask(model, changed)
    assert other != token_id
    assert of_other.top == told.top
    assert of_other.logprob == dict(told.top)[other]


def test_packed_logprobs_are_the_same_and_small():
    top = tuple((1000 + place, -0.125 * place) for place in range(20))
    rows = tuple(TokenLogprob(70_000 + place, -0.75, place + 1, top) for place in range(5))
    packed = pickle.loads(pickle.dumps(PackedLogprobs.pack(rows)))  # noqa: S301 - our own
    assert tuple(packed) == rows
    assert (len(packed), packed[1], packed[-1], packed[1:3]) == (5, rows[1], rows[4], rows[1:3])
    assert len(packed.rows) < 5 * 200


@pytest.mark.parametrize("rows", [(), (TokenLogprob(3, float("-inf"), 9),)])
def test_packed_logprobs_may_be_none_and_without_alternatives(rows):
    packed = PackedLogprobs.pack(rows)
    assert packed == rows
    assert packed == PackedLogprobs.pack(list(rows))
    assert packed != (TokenLogprob(4, 0.0, 1),)
