"""Grammars in an engine: drafts decide nothing, and a grammar that is compiled holds up nobody."""

import threading
import time
from concurrent.futures import Future

import pytest

from onebox.engine.api import (
    Engine,
    EngineOptions,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    GrammarError,
    Request,
    SamplingParams,
    TokenInfo,
    Tokens,
    plan_engine,
    start_engine,
)
from onebox.engine.remote.parent import EngineProcess
from onebox.spec.vocabulary import TokenTable
from onebox.text.vocabulary import token_table
from tests.engine.fake import VOCAB_SIZE, FakeRunner
from tests.engine.remote.processes import CONFIG, GrammarStarter

TABLE = TokenTable((*(bytes([97 + i % 26]) for i in range(VOCAB_SIZE - 2)), b"", b""), frozenset(), (VOCAB_SIZE - 1,))
SLOW = Grammar.json_schema({"type": "integer", "multipleOf": 999_983})
"""Takes longer than is allowed."""


def request(name: str, prompt=(1, 2), **sampling) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 5, **sampling}))


class HeldGrammars:
    """A compiler whose grammars are compiled when the test says so."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def constrain_later(self, _grammar):
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        pass


@pytest.fixture
def held():
    with Engine(FakeRunner(CONFIG), CONFIG, TABLE) as engine:
        engine._grammars = HeldGrammars()
        yield engine, engine._grammars


def test_others_are_answered_while_a_grammar_is_compiled(held):
    engine, grammars = held
    waiting = engine.submit_later([request("slow", grammar=Grammar.regex("a"))])
    assert isinstance(list(engine.submit(request("other")))[-1], Finished)
    assert not waiting.done()
    assert engine.stats().num_waiting == 1
    grammars.futures[0].set_exception(GrammarError("No.", "guided_regex"))
    with pytest.raises(GrammarError, match="No"):
        waiting.result(timeout=20)
    assert engine.stats().num_waiting == 0
    assert isinstance(list(engine.submit(request("slow")))[-1], Finished), "its name is free again"


def test_an_abort_during_compilation_ends_the_request_at_once(held):
    engine, grammars = held
    waiting = engine.submit_later([request(name, grammar=Grammar.regex("a")) for name in ("a/0", "a/1")])
    engine.abort("a/0")
    engine.abort("a/1")
    deadline = time.monotonic() + 20
    while engine.stats().num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for future in grammars.futures:
        future.set_exception(GrammarError("No."))
    assert isinstance(waiting.exception(timeout=20), GrammarError)
    assert engine._open.ids() == []


def test_a_request_aborted_while_it_is_compiled_is_finished_as_aborted(held):
    engine, grammars = held
    waiting = engine.submit_later([request("a", grammar=Grammar.regex("a"))])
    engine.abort("a")
    deadline = time.monotonic() + 20
    while engine.stats().num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    grammars.futures[0].set_result(None)
    (handle,) = waiting.result(timeout=20)
    (event,) = handle
    assert (event.reason, event.counts.prompt_tokens) == (FinishReason.ABORT, 2)


def test_closing_the_engine_ends_what_waits_for_a_grammar():
    engine = Engine(FakeRunner(CONFIG), CONFIG, TABLE)
    waiting = [engine.submit_later([request(str(i), grammar=Grammar.regex(f"a{{{i + 1}}}"))]) for i in range(3)]
    engine.close()
    for submission in waiting:
        outcome = submission.exception(timeout=20) or list(submission.result()[0])[-1]
        assert isinstance(outcome, Failed | Exception)


def test_a_slow_grammar_in_the_engine_s_process_holds_up_nobody(tmp_path):
    with EngineProcess(GrammarStarter(tmp_path / "starts", table=TABLE)) as engine:
        engine.wait_ready()
        errors = []

        def submit() -> None:
            try:
                engine.submit(request("slow", grammar=SLOW.named("guided_json")))
            except GrammarError as error:
                errors.append((str(error), error.field_name))

        thread = threading.Thread(target=submit)
        thread.start()
        checked = engine.check_grammar(Grammar.regex("[a-z]*"))
        for place in range(3):
            assert isinstance(list(engine.submit(request(str(place))))[-1], Finished)
        assert not errors
        assert checked.result(timeout=30) is None
        thread.join(timeout=30)
        sentence = "The JSON schema is too complex: compiling it takes longer than 0.6 s; simplify it."
        assert errors == [(sentence, "guided_json")]
        assert engine.health().num_restarts == 0


# With a model.

# Without drafts the answer never meets the 3,000 alternatives.
FORKED = Grammar.cfg('start: "ab" ("x" | "y" big)\nbig: ' + " | ".join(f'"a{i}"' for i in range(3000)))
GRAMMARS = {
    "a limit beside the answer": (FORKED, "aby aby aby aby ", "x"),
    "no way back": (Grammar.cfg('start: word "!"\nword[stop="."]: /[a-z ]*/'), "ab ab ab ab ab ab ", "ab "),
    "no limit": (Grammar.regex("(aby ){2,6}"), "aby aby aby ", "aby "),
}


@pytest.fixture(scope="module")
def engines(checkpoint, tokenizer):
    """(without drafts, with n-gram drafts)."""
    tokens = TokenInfo((258,), (), token_table(tokenizer, (258,)))

    def start(method: str, max_drafts: int | None) -> Engine:
        options = EngineOptions(
            device="cpu",
            max_model_len=500,
            kv_cache_memory_bytes=16 << 20,
            speculation=method,
            num_speculative_tokens=max_drafts,
        )
        return start_engine(plan_engine(checkpoint, options, tokens), tokens)

    with start("none", None) as plain, start("ngram", 4) as drafting:
        yield plain, drafting


@pytest.mark.parametrize(("grammar", "prompt", "liked"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_drafts_change_no_answer_that_is_held_to_a_grammar(engines, tokenizer, grammar, prompt, liked):
    bias = tuple((token_id, 50.0) for token_id in set(tokenizer.encode(liked)))
    num_drafted = 0
    for temperature in (0.0, 1.0):
        answers = []
        for engine in engines:
            sampling = {"temperature": temperature, "logit_bias": bias, "seed": 3, "max_tokens": 40}
            *events, last = engine.submit(request("a", tokenizer.encode(prompt), grammar=grammar, **sampling))
            assert isinstance(last, Finished), last
            answers.append([token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids])
            num_drafted += last.counts.drafts.num_drafted
        assert answers[0] == answers[1]
    assert num_drafted > 0


def test_a_grammar_s_limit_ends_its_own_answer_and_no_other(engines, tokenizer):
    """The answer itself goes to the 3,000 alternatives, with drafts and without."""
    bias = tuple((token_id, 50.0) for token_id in tokenizer.encode("y"))
    for engine in engines:
        sampling = {"temperature": 0.0, "logit_bias": bias}
        failing = engine.submit(request("a", tokenizer.encode("aby aby "), grammar=FORKED, **sampling))
        beside = engine.submit(request("b", tokenizer.encode("aby "), grammar=Grammar.regex("[a-z]{3}")))
        *_, last = failing
        assert isinstance(last, Failed)
        assert "cannot be held to its grammar any longer" in last.message
        assert isinstance(list(beside)[-1], Finished)
