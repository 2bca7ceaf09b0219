"""A grammar's masks: whatever is drawn from them is what was asked for, and drafts never decide anything."""

import contextlib
import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.engine.grammar.compiler import GrammarCompiler
from onebox.engine.grammar.value import Grammar
from onebox.kernels.sampling import apply_mask
from onebox.spec.errors import UnsupportedError
from onebox.text.vocabulary import token_table
from tests.engine.grammar.vocabulary import (
    CONTROL,
    EOS,
    GRAMMARS,
    HOLE,
    LIST,
    OTHER_EOS,
    PATTERNS,
    SCHEMA,
    TABLE,
    VOCAB_SIZE,
    WORDS,
    allowed,
    start_of,
    text_of,
    walk,
)


@given(st.integers(0, 2**32))
def test_a_walk_through_a_schema_is_a_document_that_it_accepts(compiler, seed):
    document = json.loads(text_of(walk(compiler.constrain(Grammar.json_schema(SCHEMA)), seed)))
    assert {"name", "kind", "sizes"} <= document.keys() <= SCHEMA["properties"].keys()
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 6
    assert document["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert len(document["sizes"]) <= 3
    assert all(type(size) is int and -5 <= size <= 120 for size in document["sizes"])
    assert isinstance(document.get("is_old", False), bool)


@given(st.integers(0, 2**32))
def test_a_walk_through_any_object_is_an_object(compiler, seed):
    assert isinstance(json.loads(text_of(walk(compiler.constrain(Grammar.json_object()), seed))), dict)


@given(st.sampled_from(PATTERNS), st.integers())
def test_a_walk_through_a_regex_matches_from_end_to_end(compiler, pattern, seed):
    assert re.fullmatch(pattern, text_of(walk(compiler.constrain(Grammar.regex(pattern)), seed)))


@settings(max_examples=25)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5), st.integers())
def test_a_walk_through_choices_is_one_of_them(compiler, choices, seed):
    assert text_of(walk(compiler.constrain(Grammar.choice(choices)), seed)) in choices


def test_every_choice_can_be_reached(compiler):
    choices = {"ab", "abc", "tree", "é"}
    grammar = Grammar.choice(sorted(choices))
    assert {text_of(walk(compiler.constrain(grammar), seed)) for seed in range(60)} == choices


@given(st.integers(0, 2**32))
def test_a_walk_through_a_context_free_grammar_nests(compiler, seed):
    text = text_of(walk(compiler.constrain(Grammar.cfg(LIST)), seed))
    while text != "x":
        reduced = re.sub(r"\((x|[a-c]{1,2})(,(x|[a-c]{1,2}))*\)", "x", text)
        assert reduced != text
        text = reduced


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_the_rules_of_any_grammar_can_be_a_part_of_a_larger_one(compiler, grammar):
    larger = Grammar.cfg(f'start: "<think>" part "!"\npart: %lark {{\n{grammar.rules}\n}}')
    for seed in range(5):
        text = text_of(walk(compiler.constrain(larger), seed))
        assert text.startswith("<think>")
        part = compiler.constrain(grammar)
        for token_id in start_of(text[len("<think>") : -1]):
            part.advance(token_id)
        part.advance(EOS)


def test_every_split_of_a_text_into_tokens_is_allowed(compiler):
    constraint = compiler.constrain(Grammar.choice(["abc"]))
    assert allowed(constraint.mask()) == sorted([*start_of("a"), 260 + WORDS.index(b"ab"), 260 + WORDS.index(b"abc")])


def test_the_mask_is_in_the_layout_of_the_kernel(compiler):
    mask = compiler.constrain(Grammar.regex("[b-d]|true")).mask()
    logits = torch.zeros(1, VOCAB_SIZE)
    apply_mask(logits, torch.from_numpy(mask).unsqueeze(0))
    kept = torch.nonzero(logits[0] == 0).flatten().tolist()
    assert kept == sorted([*start_of("bcdt"), 260 + WORDS.index(b"true")])


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@given(seed=st.integers(0, 2**32))
def test_control_tokens_holes_and_padding_are_never_inside(compiler, grammar, seed):
    constraint = compiler.constrain(grammar)
    for token_id in walk(constraint, seed):
        assert token_id in TABLE.eos_token_ids or TABLE.tokens[token_id]
    for _ in range(2):
        assert allowed(constraint.mask()) == [EOS, OTHER_EOS]
        constraint.advance(EOS)


def test_a_control_token_named_by_its_number_is_not_allowed_either(compiler):
    constraint = compiler.constrain(Grammar.cfg(f'start: "ab" (<[{CONTROL}]> | "c")'))
    constraint.advance(260 + WORDS.index(b"ab"))
    assert allowed(constraint.mask()) == start_of("c")
    constraint = compiler.constrain(Grammar.cfg(f'start: "ab" <[{CONTROL}]>'))
    constraint.advance(260 + WORDS.index(b"ab"))
    assert allowed(constraint.mask()) == [EOS, OTHER_EOS]
    constraint.advance(EOS)
    assert constraint.is_complete


def test_complete_means_that_only_an_end_token_may_follow(compiler):
    constraint = compiler.constrain(Grammar.choice(["a", "ab"]))
    assert not constraint.is_complete
    assert EOS not in allowed(constraint.mask())
    constraint.advance(*start_of("a"))
    assert not constraint.is_complete
    assert allowed(constraint.mask()) == sorted([*start_of("b"), EOS, OTHER_EOS])
    constraint.advance(*start_of("b"))
    assert constraint.is_complete
    assert allowed(constraint.mask()) == [EOS, OTHER_EOS]


def test_blanks_in_a_document_are_bounded(compiler):
    constraint = compiler.constrain(Grammar.json_object())
    blank, *_ = start_of(" ")
    for token_id in start_of("{" + " " * 64):
        constraint.advance(token_id)
    assert blank not in allowed(constraint.mask())


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_masks_for_drafts_are_the_masks_on_the_way_and_the_place_stays(compiler, grammar, seed, data):
    path = walk(compiler.constrain(grammar), seed)
    depth = data.draw(st.integers(0, len(path)))
    constraint = compiler.constrain(grammar)
    for token_id in path[:depth]:
        constraint.advance(token_id)
    before, was_complete = constraint.mask(), constraint.is_complete
    wrong = data.draw(st.sampled_from([(), (CONTROL,), (HOLE, EOS), (VOCAB_SIZE - 1,), (VOCAB_SIZE + 100,), (-1,)]))
    right = tuple(path[depth : depth + data.draw(st.integers(0, 5))])
    kept, masks = constraint.masks_for(right + wrong)
    assert kept == right
    assert np.array_equal(constraint.mask(), before)
    assert constraint.is_complete == was_complete
    for mask, token_id in zip(masks, [*right, None], strict=True):
        assert np.array_equal(mask, constraint.mask())
        if token_id is not None:
            constraint.advance(token_id)


def test_drafts_that_meet_a_limit_are_cut_and_leave_no_trace(compiler):
    # The lexer cannot learn all of these states; the answer needs none of them.
    grammar = Grammar.regex("ab(x{20}|y([a-z]{1,1000}){1,1000})")
    drafting, plain = compiler.constrain(grammar), compiler.constrain(grammar)
    rng, num_kept = random.Random(0), []
    for token_id in start_of("abx" + "x" * 19):
        drafts = start_of("aby" + "".join(rng.choices("abcdefgh", k=600)))
        kept, masks = drafting.masks_for(tuple(drafts[len(num_kept) :]))
        num_kept.append(len(kept))
        assert len(masks) == len(kept) + 1
        assert np.array_equal(masks[0], plain.mask())
        drafting.advance(token_id)
        plain.advance(token_id)
    assert 3 <= num_kept[0] < 603
    assert set(num_kept[3:]) == {0}
    assert drafting.is_complete


def test_a_limit_is_met_at_the_same_token_with_drafts_and_without(compiler):
    grammar = Grammar.regex("([a-z]{1,1000}){1,1000}")
    path = start_of("".join(random.Random(2).choices("abcdefgh", k=2000)))
    plain = GrammarCompiler(TABLE, VOCAB_SIZE, has_drafts=False)
    alone, limit = plain.constrain(grammar), 0
    plain.close()
    with contextlib.suppress(UnsupportedError):
        for token_id in path:
            alone.mask()
            alone.advance(token_id)
            limit += 1
    assert 10 < limit < len(path)
    # The scout would come further, because it shares what others have learnt.
    drafting = compiler.constrain(grammar)
    for place in range(0, limit // 5 * 5, 5):
        kept, _ = drafting.masks_for(tuple(path[place : place + 4]))
        assert len(kept) in (0, 4)
        for token_id in path[place : place + 5]:
            drafting.advance(token_id)
        drafting.catch_up()
    drafting.finish(tuple(path[limit // 5 * 5 : limit]))
    with pytest.raises(UnsupportedError, match="any longer"):
        drafting.finish(tuple(path[limit - 1 : limit + 2]))


def test_two_sequences_of_one_grammar_do_not_disturb_each_other(compiler):
    grammar = Grammar.choice(["ab", "cd"])
    first, second = compiler.constrain(grammar), compiler.constrain(grammar)
    first.advance(*start_of("a"))
    assert allowed(second.mask()) == sorted([*start_of("a"), *start_of("c"), 260 + WORDS.index(b"ab")])
    assert allowed(first.mask()) == start_of("b")


def test_a_forbidden_token_is_a_mistake_and_changes_nothing(compiler):
    constraint = compiler.constrain(Grammar.choice(["ab"]))
    before = constraint.mask()
    for token_id in (*start_of("x"), EOS, CONTROL, VOCAB_SIZE - 1):
        with pytest.raises(UnsupportedError, match=f"does not allow token {token_id} here"):
            constraint.advance(token_id)
    assert np.array_equal(constraint.mask(), before)


def test_the_checkpoint_s_own_tokenizer_works(tokenizer):
    compiler = GrammarCompiler(token_table(tokenizer, (258, 256)), 384)
    constraint = compiler.constrain(Grammar.json_schema(SCHEMA))
    compiler.close()
    for token_id in tokenizer.encode('{"name": "Grüße", "kind": "rock", "sizes": [1, 2]'):
        assert constraint.mask()[token_id // 32] >> token_id % 32 & 1
        constraint.advance(token_id)
    constraint.advance(*tokenizer.encode("}"))
    assert constraint.is_complete
