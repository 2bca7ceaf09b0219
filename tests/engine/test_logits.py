"""Penalties, biases, bans and masks do to logits what others' code or the plain formula does, drafts or no drafts."""

import random

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from onebox.engine.grammar.compiler import GrammarCompiler
from onebox.engine.grammar.value import Grammar
from onebox.engine.logits import LogitsRules, apply_adjustments
from onebox.engine.request import SamplingParams
from onebox.engine.step import DecodeRows, DraftCheck, Draw
from onebox.spec.errors import UnsupportedError
from onebox.spec.vocabulary import TokenTable

VOCAB_SIZE = 300
EOS = 256
PROMPT = (5, 6, 7, 7, 290)
ANSWER = (9, 7, 9, 9, 11)
DRAFTS = (9, 5, 200)
EVERYTHING = {
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.3,
    "logit_bias": ((9, 3.5), (200, -7.0)),
    "min_tokens": 7,
}


def logits(rows=1, seed=0):
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def adjuster(sampling, answer=(), constraint=None, stops=(EOS,)):
    """An adjuster that has seen the answer, its tokens coming in as steps give them."""
    made = LogitsRules(SamplingParams(**sampling), PROMPT, frozenset(stops), constraint)
    made.advance(answer[:2])
    made.advance(answer[2:])
    return made


def entry(adjustments, num_rows, first_new=0):
    draw = Draw(SamplingParams(), (-1,) * num_rows, (DraftCheck.COMPARE,) * num_rows, first_new, adjustments)
    return DecodeRows("a", 0, (1,) * num_rows, 0, 0, np.array([1], dtype=np.int32), draw)


def adjusted(values, sampling, answer=(), constraint=None, drafts=(), stops=(EOS,)):
    """The rows of logits as they are drawn from: one and one more for each draft."""
    kept, adjustments = adjuster(sampling, answer, constraint, stops).adjust(drafts)
    assert kept == drafts
    changed = values.clone()
    apply_adjustments(changed, [entry(adjustments, len(values))])
    return changed


def ids(*parts):
    return torch.tensor([[token_id for part in parts for token_id in part]])


# Against transformers.


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids(PROMPT, ANSWER), logits())
    torch.testing.assert_close(adjusted(logits(), {"repetition_penalty": penalty}, ANSWER), expected)


def test_logit_bias_is_that_of_transformers():
    bias = {3: 5.0, 299: -100.0, 7: 0.25}
    processor = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    expected = processor(ids(PROMPT, ANSWER), logits())
    torch.testing.assert_close(adjusted(logits(), {"logit_bias": tuple(bias.items())}, ANSWER), expected)


@pytest.mark.parametrize("num_made", range(6))
def test_stop_tokens_are_banned_as_long_as_transformers_bans_them(num_made):
    stops = [EOS, 17]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, stops, device="cpu")
    expected = processor(ids(PROMPT, ANSWER[:num_made]), logits())
    got = adjusted(logits(), {"min_tokens": 4}, ANSWER[:num_made], stops=stops)
    assert torch.equal(got, expected)
    assert got[0, stops].isneginf().all() == (num_made < 4)


# Against the formulas of the OpenAI API.


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.9), (-1.0, 1.5)])
def test_presence_and_frequency_penalties_count_the_answer_and_not_the_prompt(presence, frequency):
    expected = logits().double()
    for token_id in set(ANSWER):
        expected[0, token_id] -= presence + frequency * ANSWER.count(token_id)
    got = adjusted(logits(), {"presence_penalty": presence, "frequency_penalty": frequency}, ANSWER)
    torch.testing.assert_close(got, expected.float())
    untouched = [token_id for token_id in range(VOCAB_SIZE) if token_id not in ANSWER]
    assert torch.equal(got[:, untouched], logits()[:, untouched])


def test_all_at_once_are_applied_one_after_the_other():
    """Repetition, frequency and presence, then the bias, then the ban."""
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids(PROMPT, ANSWER), logits()).double()
    for token_id in set(ANSWER):
        expected[0, token_id] -= 0.7 - 0.4 * ANSWER.count(token_id)
    expected[0, 9] += 3.5
    expected[0, 200] -= 7.0
    expected = SuppressTokensLogitsProcessor([EOS])(ids(PROMPT), expected.float())
    torch.testing.assert_close(adjusted(logits(), EVERYTHING, ANSWER), expected)


# With drafts.


@pytest.mark.parametrize("name", [*EVERYTHING, "all"])
def test_a_row_with_drafts_before_it_is_the_row_of_a_sequence_in_which_they_stand(name):
    sampling = EVERYTHING if name == "all" else {name: EVERYTHING[name]}
    values = logits(1 + len(DRAFTS))
    together = adjusted(values, sampling, ANSWER, drafts=DRAFTS)
    for place in range(len(DRAFTS) + 1):
        alone = adjusted(values[place : place + 1], sampling, (*ANSWER, *DRAFTS[:place]))
        assert torch.equal(together[place], alone[0]), place
    assert not torch.equal(together, values)


def test_looking_ahead_over_drafts_leaves_no_trace():
    made = adjuster(EVERYTHING, ANSWER)
    first = made.adjust(())[1][0]
    made.adjust(DRAFTS)
    again = made.adjust(())[1][0]
    assert first.banned.tolist() == again.banned.tolist()
    assert dict(zip(first.penalties.token_ids, first.penalties.counts, strict=True)) == dict(
        zip(again.penalties.token_ids, again.penalties.counts, strict=True)
    )


def test_the_ban_ends_between_two_drafts_where_min_tokens_are_reached():
    got = adjusted(logits(4), {"min_tokens": 7}, ANSWER, drafts=DRAFTS)
    assert got[:, EOS].isneginf().tolist() == [True, True, False, False]


# Grammars.


@pytest.fixture(scope="module")
def vocabulary():
    table = TokenTable(
        tokens=(*(bytes([byte]) for byte in range(256)), b"", b"ab", b"bb"),
        special_ids=frozenset({EOS}),
        eos_token_ids=(EOS,),
    )
    return GrammarCompiler(table, VOCAB_SIZE)


def test_a_mask_leaves_what_the_grammar_allows_as_it_is_and_nothing_else(vocabulary):
    got = adjusted(logits(), {}, constraint=vocabulary.constrain(Grammar.choice(["ab", "c"])))
    allowed = {ord("a"), ord("c"), 257}
    assert {int(token_id) for token_id in got[0].isfinite().nonzero()} == allowed
    assert all(got[0, token_id] == logits()[0, token_id] for token_id in allowed)


def test_masks_follow_the_drafts_and_drafts_end_where_the_grammar_forbids_one(vocabulary):
    made = adjuster({}, constraint=vocabulary.constrain(Grammar.regex("a[bc]d")), stops=())
    drafts, adjustments = made.adjust((ord("a"), ord("c"), ord("a"), ord("b")))
    assert drafts == (ord("a"), ord("c"))
    values = logits(3)
    apply_adjustments(values, [entry(adjustments, 3)])
    found = [{int(token_id) for token_id in row.isfinite().nonzero()} for row in values]
    assert found == [{ord("a"), 257}, {ord("b"), ord("c")}, {ord("d")}]


def test_min_tokens_yield_to_a_grammar_that_allows_nothing_but_the_end(vocabulary):
    constraint = vocabulary.constrain(Grammar.choice(["ab"]))
    got = adjusted(logits(), {"min_tokens": 9}, (ord("a"), ord("b")), constraint)
    assert [int(token_id) for token_id in got[0].isfinite().nonzero()] == [EOS]


def test_min_tokens_ban_the_end_where_the_grammar_allows_more(vocabulary):
    constraint = vocabulary.constrain(Grammar.regex("a*"))
    got = adjusted(logits(), {"min_tokens": 9}, (ord("a"),), constraint)
    assert [int(token_id) for token_id in got[0].isfinite().nonzero()] == [ord("a")]


# Several sequences in a step.


def test_sequences_in_a_step_do_not_touch_each_others_rows():
    numbers = random.Random(1)
    ways = [{}, EVERYTHING, {"repetition_penalty": 2.0}, {"logit_bias": ((1, 2.0),)}, {}, {"min_tokens": 50}]
    values = logits(len(ways) * 3)
    entries, expected = [], []
    for place, way in enumerate(ways):
        rows = values[place * 3 : place * 3 + 3].clone()
        drafts = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(1 + place % 2))
        first_new = 2 - len(drafts)
        entries.append(entry(adjuster(way, ANSWER).adjust(drafts)[1], 3, first_new))
        expected += [rows[:first_new], adjusted(rows[first_new:], way, ANSWER, drafts=drafts)]
    apply_adjustments(values, entries)
    assert torch.equal(values, torch.cat(expected))


def test_a_request_that_asks_for_nothing_costs_nothing():
    assert adjuster({}, ANSWER).adjust(DRAFTS) == (DRAFTS, ())
    assert adjuster({"min_tokens": 5}, ANSWER).adjust(DRAFTS) == (DRAFTS, ())


# What cannot be computed.


class Walked:
    """A grammar that gives the masks that it is told, one for each draft and one more."""

    def __init__(self, *masks):
        self.masks = masks

    def masks_for(self, drafts):
        return drafts, self.masks[: 1 + len(drafts)]


def mask_of(*token_ids):
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def test_a_mask_that_allows_nothing_is_an_error_and_never_a_token():
    with pytest.raises(UnsupportedError, match="allows no token"):
        adjuster({}, constraint=Walked(mask_of())).adjust(())


def test_a_draft_after_which_nothing_is_allowed_is_not_tried():
    constraint = Walked(mask_of(9), mask_of(5), mask_of(), mask_of(1))
    drafts, adjustments = adjuster({}, constraint=constraint).adjust((9, 5, 200))
    assert drafts == (9,)
    assert len(adjustments) == 2


def test_a_mask_of_another_vocabulary_fails_its_own_row_alone():
    good, bad = mask_of(3), np.full(99, -1, dtype=np.int32)
    values = logits(3)
    parts = [entry(adjuster({}, constraint=Walked(mask)).adjust(())[1], 1) for mask in (good, bad, good)]
    failed = apply_adjustments(values, parts)
    assert list(failed) == [1]
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in values[::2]] == [[3], [3]]
    assert torch.equal(values[1], logits(3)[1])


def test_the_bias_of_a_token_that_is_named_twice_is_the_sum():
    got = adjusted(logits(), {"logit_bias": ((9, 3.5), (4, 1.0), (9, -1.5))})
    expected = logits()
    expected[0, 9] += 2.0
    expected[0, 4] += 1.0
    assert torch.equal(got, expected)


def test_a_row_with_a_long_prompt_does_not_widen_the_others(monkeypatch):
    monkeypatch.setattr("onebox.engine.logits._NARROW", 6)
    ways = [{"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"repetition_penalty": 0.5}]
    values = logits(3)
    parts = [entry(adjuster(way, ANSWER).adjust(())[1], 1) for way in ways]
    expected = torch.cat([adjusted(values[place : place + 1], way, ANSWER) for place, way in enumerate(ways)])
    apply_adjustments(values, parts)
    assert torch.equal(values, expected)
