"""A grammar's masks: whatever is drawn from them is what was asked for, and going back leaves no trace."""

import json
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.engine.grammar import Constraint, Grammar, GrammarCompiler, GrammarKind
from onebox.kernels.sampling import apply_mask
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from onebox.spec.vocabulary import TokenTable
from onebox.text.vocabulary import token_table

# Between two bytes' tokens, tokens of several bytes: among them ones that cross the borders of a grammar's parts and
# halves of a character. The ids up to 255 are not the bytes in order; a vocabulary may not rely on it.
BYTES = tuple(bytes([255 - byte]) for byte in range(256))
WORDS = (b'{"', b'":', b", ", b'"}', b"true", b"ab", b"abc", b"\xc3", b"\xa9x", b"12", b"<think>", b"\n  ")
EOS, OTHER_EOS, CONTROL, HOLE = 256, 257, 258, 259
TABLE = TokenTable(
    tokens=(*BYTES, b"", b"", b"", b"", *WORDS),
    special_ids=frozenset({EOS, OTHER_EOS, CONTROL}),
    eos_token_ids=(OTHER_EOS, EOS),
)
VOCAB_SIZE = 300

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["tree", "rock", "ab"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3},
        "is_old": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
LIST = 'start: "(" item ("," item)* ")"\nitem: /[a-c]{1,2}/ | start'
# Negated classes such as \S are left out: which characters they leave differs a little between Python and Unicode.
PATTERNS = [r"(ab|c)+[0-9]{2,3}é?", r"^[^x0-9]{3}x|/\.\"$", r"\s?[α-ω]{2}", "(?i)abc", "a*"]
GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.json_object(),
    Grammar.regex(r"(ab|c)+\d{2,3}é?"),
    Grammar.choice(["ab", "abc", 'say "no"', "é\n/"]),
    Grammar.cfg(LIST),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TABLE, VOCAB_SIZE)


def allowed(mask) -> list[int]:
    assert mask.shape == (10,)
    assert mask.dtype == np.int32
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walk(constraint: Constraint, seed: int, max_tokens: int = 400) -> list[int]:
    """Draws from the masks until an end token comes; the longer it takes, the more it leans to closing what is open."""
    rng = random.Random(seed)
    closing = {token_id for token_id, token in enumerate(TABLE.tokens) if token and token[-1:] in b'"}])'}
    token_ids: list[int] = []
    for step in range(max_tokens):
        choices = allowed(constraint.mask())
        preferred = [token_id for token_id in choices if token_id in closing | {EOS, OTHER_EOS}]
        if preferred and rng.random() < step / 100:
            choices = preferred
        token_ids.append(rng.choice(choices))
        constraint.advance(token_ids[-1])
        if token_ids[-1] in TABLE.eos_token_ids:
            return token_ids
    raise AssertionError(f"no end after {max_tokens} tokens: {text_of(token_ids)!r}")


def text_of(token_ids: list[int]) -> str:
    return b"".join(TABLE.tokens[token_id] for token_id in token_ids).decode()


def start_of(text: str) -> list[int]:
    """A text as the tokens of its bytes."""
    return [255 - byte for byte in text.encode()]


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
    constraint.rollback(1)
    assert not constraint.is_complete


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
def test_going_back_gives_the_masks_that_were_there(compiler, grammar, seed, data):
    path = [*walk(compiler.constrain(grammar), seed), EOS, OTHER_EOS]
    constraint, masks = compiler.constrain(grammar), []
    for token_id in path:
        masks.append(constraint.mask())
        constraint.advance(token_id)
    depth = len(path)
    for target in data.draw(st.lists(st.integers(0, len(path) - 1), min_size=1, max_size=5)):
        constraint.rollback(max(0, depth - target))
        for token_id in path[depth:target]:
            constraint.advance(token_id)
        depth = target
        assert np.array_equal(constraint.mask(), masks[depth])


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_every_depth_can_be_gone_back_to(compiler, grammar):
    path = walk(compiler.constrain(grammar), seed=3)
    constraint, masks = compiler.constrain(grammar), []
    for token_id in path:
        masks.append(constraint.mask())
        constraint.advance(token_id)
    while masks:
        constraint.rollback(1)
        assert np.array_equal(constraint.mask(), masks.pop())
    with pytest.raises(ValueError, match="0 advances cannot go back 1"):
        constraint.rollback(1)


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
        with pytest.raises(ValueError, match=f"does not allow token {token_id} here"):
            constraint.advance(token_id)
    assert np.array_equal(constraint.mask(), before)


def test_a_grammar_crosses_a_process_boundary_and_names_itself():
    grammar = Grammar.regex("a+")
    assert pickle.loads(pickle.dumps(grammar)) == grammar == Grammar(GrammarKind.REGEX, "a+")  # noqa: S301
    assert len({grammar, Grammar.regex("a+"), Grammar.choice(["a+"])}) == 2


@pytest.mark.parametrize(
    ("make", "argument", "sentence"),
    [
        (Grammar.json_schema, {"type": "strin"}, "The JSON schema cannot be used: Invalid type: strin."),
        (Grammar.json_schema, {"type": "string", "pattern": "("}, "The JSON schema cannot be used: unclosed group."),
        (Grammar.json_schema, {"not": {}}, 'The JSON schema cannot be used: Unimplemented keys: ["not"].'),
        (Grammar.json_schema, {"$ref": "#/nope"}, "The JSON schema cannot be used: Pointer '/nope' does not exist."),
        (Grammar.json_schema, [], "A JSON schema must be an object; this one is []."),
        (Grammar.json_schema, {"default": b""}, "The JSON schema cannot be written as JSON (Object of type bytes"),
        (Grammar.json_schema, {"x-guidance": {}}, "The JSON schema holds x-guidance, settings of the grammar library"),
        (Grammar.regex, "(a", "The regex cannot be used: unclosed group."),
        (Grammar.regex, "(?=a)b", "The regex cannot be used: look-around"),
        (Grammar.regex, "\ud800", "The regex cannot be used: it holds half of a surrogate pair"),
        (Grammar.choice, [], "The list of choices is empty; give at least one."),
        (Grammar.choice, ["a", ""], "Each choice must be a text of at least one character; one is ''."),
        (Grammar.choice, [1], "Each choice must be a text of at least one character; one is 1."),
        (Grammar.cfg, "nonsense", "The grammar cannot be used: 1(9): Expected token ':'"),
        (Grammar.cfg, "start: A", 'The grammar cannot be used: unknown name: "A".'),
        (Grammar.cfg, "", "The grammar cannot be used: no start rule found."),
    ],
)
def test_a_malformed_grammar_is_refused_with_a_sentence(make, argument, sentence):
    with pytest.raises(UsageError) as refusal:
        make(argument)
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("lark", "sentence"),
    [
        ("start: <|im_end|>", 'The grammar cannot be used: unknown special token: "<|im_end|>".'),
        ('start: x\nx: x "a"', "The grammar cannot be used: no text fits it."),
        (f'start: <[{CONTROL}]> "a"', "The grammar cannot be used: no text fits it."),
    ],
)
def test_a_grammar_that_no_text_of_this_vocabulary_fits_is_refused(compiler, lark, sentence):
    with pytest.raises(UsageError) as refusal:
        compiler.constrain(Grammar.cfg(lark))
    assert str(refusal.value) == sentence


def test_a_grammar_beyond_the_limits_of_the_library_fails_with_a_sentence(compiler):
    # After one x, each of the rules is still open.
    rules = [f'r{i}: "x" r{i} | "z"' for i in range(1000)]
    lark = "\n".join(["start: " + " | ".join(f'"x" r{i}' for i in range(1000)), *rules])
    constraint = compiler.constrain(Grammar.cfg(lark))
    with pytest.raises(UnsupportedError, match=r"cannot be held to its grammar any longer \(.+\): simplify it"):
        constraint.masks_for(tuple(start_of("xxz")))


def test_a_vocabulary_that_does_not_fit_the_model_is_refused():
    with pytest.raises(MismatchError, match="272 tokens and the model only 260"):
        GrammarCompiler(TABLE, 260)
    with pytest.raises(UsageError, match="No token ends an answer"):
        GrammarCompiler(TokenTable(BYTES, frozenset(), ()), VOCAB_SIZE)
    with pytest.raises(MismatchError, match="end token 300 is not among the model's 300"):
        GrammarCompiler(TokenTable(BYTES, frozenset({300}), (300,)), VOCAB_SIZE)


def test_the_checkpoint_s_own_tokenizer_works(tokenizer):
    compiler = GrammarCompiler(token_table(tokenizer, (258, 256)), 384)
    constraint = compiler.constrain(Grammar.json_schema(SCHEMA))
    for token_id in tokenizer.encode('{"name": "Grüße", "kind": "rock", "sizes": [1, 2]'):
        assert constraint.mask()[token_id // 32] >> token_id % 32 & 1
        constraint.advance(token_id)
    constraint.advance(*tokenizer.encode("}"))
    assert constraint.is_complete


def test_the_library_is_imported_only_for_a_grammar():
    program = "import sys, onebox.engine.grammar; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
