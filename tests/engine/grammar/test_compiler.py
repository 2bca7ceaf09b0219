"""Verdicts: every grammar compiles or is refused with a sentence, and none takes anything else down or holds it up."""

import os
import random
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from onebox.engine.grammar import check_queue
from onebox.engine.grammar.compiler import GrammarCompiler
from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.engine.request import EngineStoppedError, QueueFullError
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from onebox.spec.vocabulary import TokenTable
from tests.engine.fake import wait_until
from tests.engine.grammar.hostile import HOSTILE, random_grammar
from tests.engine.grammar.vocabulary import BYTES, CONTROL, TABLE, VOCAB_SIZE, allowed, start_of


def slow(name: str) -> Grammar:
    """One that takes longer to compile than is allowed."""
    return Grammar.json_schema({"type": "integer", "multipleOf": 999_983, "title": name})


def checker_ids(compiler: GrammarCompiler) -> list[int]:
    return [checker.pid for checker in compiler._checkers if checker.pid]


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar.json_schema({"type": "strin"}), "The JSON schema cannot be used: Invalid type: strin."),
        (Grammar.json_schema({"type": "string", "pattern": "("}), "The JSON schema cannot be used: unclosed group."),
        (Grammar.json_schema({"not": {}}), 'The JSON schema cannot be used: Unimplemented keys: ["not"].'),
        (Grammar.json_schema({"$ref": "#/nope"}), "The JSON schema cannot be used: Pointer '/nope' does not exist."),
        (Grammar.json_schema({"title": "\ud800"}), "The JSON schema cannot be used: failed to parse"),
        (Grammar.regex("(a"), "The regex cannot be used: unclosed group."),
        (Grammar.regex("(?=a)b"), "The regex cannot be used: look-around"),
        (Grammar.cfg("nonsense"), "The grammar cannot be used: 1(9): Expected token ':'"),
        (Grammar.cfg("start: A"), 'The grammar cannot be used: unknown name: "A".'),
        (Grammar.cfg(""), "The grammar cannot be used: no start rule found."),
        (Grammar.cfg("start: <|im_end|>"), 'The grammar cannot be used: unknown special token: "<|im_end|>".'),
        (Grammar.cfg('start: x\nx: x "a"'), "The grammar cannot be used: no text fits it."),
        (Grammar.cfg(f'start: <[{CONTROL}]> "a"'), "The grammar cannot be used: no text fits it."),
        (slow("refused"), "The JSON schema is too complex: compiling it takes longer than 0.6 s; simplify it."),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, Grammar) else None,
)
def test_a_grammar_that_cannot_be_used_is_refused_with_a_sentence(compiler, grammar, sentence):
    for _ in range(2):
        with pytest.raises(GrammarError) as refusal:
            compiler.constrain(grammar.named("guided"))
        assert str(refusal.value).startswith(sentence)
        assert "\n" not in str(refusal.value)
        assert refusal.value.field_name == "guided"


def test_both_checkers_run_after_the_first_grammar():
    """A second one that started later, under load, would look like a leak and keep two grammars at once waiting."""
    compiler = GrammarCompiler(TABLE, VOCAB_SIZE)
    try:
        compiler.warm_up()
        compiler.constrain(Grammar.regex("a"))
        wait_until(lambda: len(checker_ids(compiler)) == 2)
    finally:
        compiler.close()


def test_a_refusal_is_about_the_part_that_is_at_fault(compiler):
    right, wrong = Grammar.regex("a").named("regex"), Grammar.json_schema({"type": "strin"}).named("tools")
    whole = Grammar.cfg(f"start: %lark {{\n{right.rules}\n}} | %lark {{\n{wrong.rules}\n}}", parts=(right, wrong))
    with pytest.raises(GrammarError, match=r"^The JSON schema cannot be used: Invalid type: strin\.$") as refusal:
        compiler.constrain(whole)
    assert refusal.value.field_name == "tools"


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_grammar_is_compiled_or_refused(compiler, make):
    begun = time.monotonic()
    try:
        constraint = compiler.constrain(make())
    except (UsageError, UnsupportedError) as error:
        assert 20 < len(str(error)) < 500  # noqa: PT017
    else:
        assert allowed(constraint.mask())
    assert time.monotonic() - begun < 20


def test_random_grammars_are_compiled_or_refused_and_walk_without_a_crash(compiler):
    """Any exception but the two, a crash, or an empty mask fails."""
    rng, ended_at, num_compiled = random.Random(15), time.monotonic() + 3, 0
    for number in range(400):
        try:
            constraint = compiler.constrain(random_grammar(rng))
            num_compiled += 1
            for _ in range(20):
                choices = allowed(constraint.mask())
                assert choices, f"grammar {number}"
                constraint.advance(rng.choice(choices))
        except (UsageError, UnsupportedError):
            pass
        if time.monotonic() > ended_at and num_compiled > 5:
            break
    assert num_compiled > 5


def test_a_slow_grammar_holds_up_neither_known_nor_other_new_ones(compiler):
    known = Grammar.regex("known")
    compiler.constrain(known)
    held = compiler.check(slow("beside others"))
    other = compiler.constrain_later(Grammar.regex("other"))
    began = time.monotonic()
    compiler.constrain(known)
    assert time.monotonic() - began < 5
    other.result(timeout=20)
    with pytest.raises(GrammarError):
        held.result(timeout=20)


def test_one_verdict_serves_all_who_wait_for_it_and_the_field_is_their_own(compiler):
    schema = {"type": "strin", "title": "asked by many"}
    grammars = [Grammar.json_schema(schema).named("guided_json") for _ in range(4)]
    for checked in [compiler.check(grammar) for grammar in grammars]:
        with pytest.raises(GrammarError) as refusal:
            checked.result(timeout=20)
        assert refusal.value.field_name == "guided_json"
    with pytest.raises(GrammarError) as refusal:
        compiler.check(Grammar.json_schema(schema).named("response_format")).result(timeout=20)
    assert refusal.value.field_name == "response_format"


def test_who_gives_up_takes_the_verdict_from_nobody(compiler):
    grammar = Grammar.regex("wanted by two")
    first, second = compiler.constrain_later(grammar), compiler.constrain_later(grammar)
    assert not first.cancel()
    assert allowed(second.result(timeout=20).mask())


def test_a_sequence_that_meets_a_limit_leaves_others_of_its_grammar_alone(compiler):
    # Every repetition is another state of the lexer, which copies of one compiled grammar would share.
    grammar = Grammar.regex("([a-z]{1,1000}){1,1000}")
    failing, later = compiler.constrain(grammar), compiler.constrain(grammar)
    rng = random.Random(1)

    def write() -> None:
        for _ in range(2000):
            failing.mask()
            failing.advance(*start_of(rng.choice("abcdefgh")))

    with pytest.raises(UnsupportedError, match="cannot be held to its grammar any longer"):
        write()
    # The scouts of both shared a lexer: the one that was there goes on without drafts, a new one has its own again.
    for constraint, num_masks in ((later, 1), (compiler.constrain(grammar), 2)):
        assert len(allowed(constraint.mask())) >= 26
        constraint.advance(*start_of("a"))
        assert len(constraint.masks_for(tuple(start_of("b")))[1]) == num_masks


def test_a_killed_checker_is_replaced(compiler):
    compiler.constrain(Grammar.regex("before"))
    for process_id in checker_ids(compiler):
        os.kill(process_id, signal.SIGKILL)
    assert allowed(compiler.constrain(Grammar.regex("after")).mask())


def test_many_slow_grammars_hold_up_neither_known_nor_quick_ones(monkeypatch):
    """Those that need long wait for each other, and are refused beyond some; the others pass them."""
    monkeypatch.setattr(check_queue, "MAX_LONG", 1)
    compiler = GrammarCompiler(TABLE, VOCAB_SIZE)
    known = Grammar.regex("known")
    compiler.constrain(known)
    waiting = [compiler.check(slow(f"queued {i}")) for i in range(5)]
    quick = compiler.constrain_later(Grammar.regex("new"))
    assert allowed(compiler.constrain(known).mask())
    assert allowed(quick.result(timeout=20).mask())
    errors = [checked.exception(timeout=30) for checked in waiting]
    full = [error for error in errors if isinstance(error, QueueFullError)]
    assert 1 <= len(full) <= 4
    assert {str(error) for error in full} == {"1 new grammars that take long to check wait; try again in a moment."}
    assert all(isinstance(error, GrammarError) for error in errors if error not in full)
    # A full queue is no verdict.
    refused = compiler.check(slow(f"queued {errors.index(full[0])}"))
    with pytest.raises(GrammarError, match=r"takes longer than 0\.6 s"):
        refused.result(timeout=30)
    compiler.close()


def test_closing_ends_threads_processes_and_waits():
    compiler = GrammarCompiler(TABLE, VOCAB_SIZE)
    compiler.constrain(Grammar.json_object())
    waiting: list[Future[None]] = [compiler.check(slow(f"open {i}")) for i in range(5)]
    processes = checker_ids(compiler)
    threads = [thread for thread in threading.enumerate() if thread.name == "onebox-grammars"]
    began = time.monotonic()
    compiler.close()
    compiler.close()
    assert time.monotonic() - began < 5
    errors = [checked.exception(timeout=5) for checked in waiting]
    assert all(isinstance(error, GrammarError | EngineStoppedError) for error in errors)
    assert isinstance(errors[-1], EngineStoppedError)
    with pytest.raises(EngineStoppedError):
        compiler.constrain(Grammar.regex("late"))
    assert processes
    assert not any(Path(f"/proc/{process_id}").exists() for process_id in processes)
    assert all(thread.daemon for thread in threads)


def test_a_vocabulary_that_does_not_fit_the_model_is_refused():
    with pytest.raises(MismatchError, match="272 tokens and the model only 260"):
        GrammarCompiler(TABLE, 260)
    with pytest.raises(UsageError, match="No token ends an answer"):
        GrammarCompiler(TokenTable(BYTES, frozenset(), ()), VOCAB_SIZE)
    with pytest.raises(MismatchError, match="end token 300 is not among the model's 300"):
        GrammarCompiler(TokenTable(BYTES, frozenset({300}), (300,)), VOCAB_SIZE)


def test_masks_do_not_depend_on_what_others_of_the_grammar_did(compiler):
    grammar = Grammar.json_object()
    path = start_of('{"a": [1, 2.5e3, "é"]}')

    def masks():
        constraint = compiler.constrain(grammar)
        for token_id in path:
            yield constraint.mask()
            constraint.advance(token_id)

    alone = list(masks())
    for pair in zip(masks(), masks(), strict=True):
        assert np.array_equal(*pair)
    assert all(np.array_equal(first, second) for first, second in zip(alone, masks(), strict=True))
