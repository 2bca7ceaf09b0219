"""Verdicts on grammars and compiled grammars, made on threads of their own: neither intake nor steps wait for them.

A grammar that was not seen before waits for one of two checkers, which try it in a process of their own; only one of
them takes those that need long (`check_queue.py`). After a good verdict it is compiled here, once for each sequence
that asks for it: the library's copies of a compiled grammar share a lexer, and a lexer that failed for one would fail
for all.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from subprocess import SubprocessError
from typing import TYPE_CHECKING, TypeVar

from onebox.engine.grammar.check_queue import CheckQueue, GrammarCheck, Verdict
from onebox.engine.grammar.checker import CheckLateError, GrammarChecker
from onebox.engine.grammar.constraint import Constraint
from onebox.engine.grammar.library import (
    TokenMasks,
    compile_matcher,
    has_failed_lexer,
    open_tokenizer,
    start_thread,
)
from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.engine.request import EngineStoppedError, QueueFullError
from onebox.spec.errors import MismatchError, OneboxError, UsageError
from onebox.spec.vocabulary import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["LIBRARY_STACK_BYTES", "GrammarCompiler"]

LIBRARY_STACK_BYTES = 64 * 2**20
"""Of every thread that calls the library; more than the checker's, where deeper grammars end."""
_NUM_CHECKERS = 2
_NUM_COMPILERS = 2
_NUM_VERDICTS = 4096
_NUM_SCOUTS = 32
"""Compiled grammars kept for drafts. One takes from a few kilobytes to a few megabytes; clients repeat theirs."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class GrammarCompiler:
    """Holds sequences to grammars over one vocabulary.

    `vocab_size` is the number of logits' columns, V. It may exceed the table: ids without text are never allowed. There
    are no threads, no processes and nothing of the library before the first grammar, or `warm_up`.
    """

    def __init__(self, table: TokenTable, vocab_size: int, *, has_drafts: bool = True) -> None:
        _refuse_mismatch(table, vocab_size)
        self._table = table
        self._vocab_size = vocab_size
        self._has_drafts = has_drafts
        self._library = threading.Lock()
        self._opened: tuple[LLTokenizer, TokenMasks] | None = None
        # Guards all below.
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._checkers: list[GrammarChecker] = []
        self._checks = CheckQueue()
        self._compiles: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._scouts: OrderedDict[bytes, LLMatcher] = OrderedDict()

    # Called from any thread.

    def warm_up(self) -> None:
        """Starts the checkers and reads the token table, in the background."""
        self.constrain_later(Grammar.json_object())

    def check(self, grammar: Grammar) -> "Future[None]":
        """Done when it is known that the grammar can be used; a GrammarError says why not. Known ones are done now."""
        checked: Future[None] = _future()
        self._verdict(grammar).add_done_callback(lambda verdict: _pass_on(verdict, checked))
        return checked

    def constrain_later(self, grammar: Grammar) -> "Future[Constraint]":
        """A sequence's place in the grammar, at its start, once it is checked and compiled."""
        constrained: Future[Constraint] = _future()

        def compile_next(checked: "Future[None]") -> None:
            error = checked.exception()
            with self._lock:
                if error is None and not self._is_closed:
                    self._compiles.put(lambda: _settle(constrained, partial(self._compile, grammar)))
                    return
            constrained.set_exception(error or _stopped())

        self.check(grammar).add_done_callback(compile_next)
        return constrained

    def constrain(self, grammar: Grammar) -> Constraint:
        """A sequence's place in the grammar, at its start; waits until it is checked and compiled."""
        return self.constrain_later(grammar).result()

    def close(self) -> None:
        """Ends the threads and the checkers; what waits for a grammar fails. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
            for checker in self._checkers:
                checker.close()
            for _ in threads:
                self._compiles.put(None)
        for check in self._checks.close():
            check.verdict.set_exception(_stopped())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    # Verdicts.

    def _verdict(self, grammar: Grammar) -> "Future[Verdict]":
        key = grammar.key
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            verdict: Future[Verdict] = _future()
            if self._is_closed:
                verdict.set_exception(_stopped())
            else:
                self._begin_check(GrammarCheck(grammar, verdict))
        return verdict

    def _begin_check(self, check: GrammarCheck) -> None:
        """Called with `_lock` held."""
        try:
            self._checks.put(check)
        except QueueFullError as error:
            check.verdict.set_exception(error)
            return
        self._verdicts[check.grammar.key] = check.verdict
        if len(self._verdicts) > _NUM_VERDICTS:
            self._verdicts.popitem(last=False)
        self._start_threads()

    def _check(self, checker: GrammarChecker, check: GrammarCheck) -> None:
        try:
            check.verdict.set_result(checker.check(check.grammar, is_long=check.is_long))
        except CheckLateError:
            self._check_longer(check)
        except OneboxError as error:
            self._fail_check(check, error)
        except Exception as error:
            _log.exception("a grammar could not be checked")
            self._fail_check(check, OneboxError(f"The grammar could not be checked: {error}."))

    def _check_longer(self, check: GrammarCheck) -> None:
        try:
            self._checks.put(replace(check, is_long=True))
        except OneboxError as error:
            self._fail_check(check, error)

    def _fail_check(self, check: GrammarCheck, error: OneboxError) -> None:
        """It is no verdict: the grammar may be checked again."""
        with self._lock:
            if self._verdicts.get(check.grammar.key) is check.verdict:
                del self._verdicts[check.grammar.key]
        check.verdict.set_exception(error)

    # Compiling, on the threads for it.

    def _compile(self, grammar: Grammar) -> Constraint:
        tokenizer, masks = self._open()
        scout = self._scout(tokenizer, grammar) if self._has_drafts else None
        return Constraint(masks, compile_matcher(tokenizer, grammar), scout)

    def _scout(self, tokenizer: "LLTokenizer", grammar: Grammar) -> "LLMatcher":
        """A copy of the one compiled for all scouts of this grammar: they share what its lexer learns."""
        with self._lock:
            matcher = self._scouts.pop(grammar.key, None)
        if matcher is None or matcher.is_error() or has_failed_lexer(matcher):
            matcher = compile_matcher(tokenizer, grammar)
        with self._lock:
            self._scouts[grammar.key] = matcher
            if len(self._scouts) > _NUM_SCOUTS:
                self._scouts.popitem(last=False)
        return matcher.deep_copy()

    def _open(self) -> tuple["LLTokenizer", TokenMasks]:
        with self._library:
            if self._opened is None:
                self._opened = open_tokenizer(self._table, self._vocab_size), TokenMasks(self._table, self._vocab_size)
            return self._opened

    # The threads.

    def _start_threads(self) -> None:
        """Called with `_lock` held."""
        if self._threads:
            return
        self._checkers = [GrammarChecker(self._table, self._vocab_size) for _ in range(_NUM_CHECKERS)]
        work: list[Callable[[], None]] = [
            *(partial(self._check_all, checker, takes_long=place == 0) for place, checker in enumerate(self._checkers)),
            *[self._compile_all] * _NUM_COMPILERS,
        ]
        self._threads = [start_thread(target, "onebox-grammars", LIBRARY_STACK_BYTES) for target in work]

    def _check_all(self, checker: GrammarChecker, *, takes_long: bool) -> None:
        # Both at once, so that no grammar has to wait for a process; where it fails now, the first check says so.
        with suppress(OneboxError, OSError, SubprocessError):
            checker.start()
        while (check := self._checks.take(takes_long=takes_long)) is not None:
            self._check(checker, check)
        checker.stop()

    def _compile_all(self) -> None:
        while (task := self._compiles.get()) is not None:
            task()


def _refuse_mismatch(table: TokenTable, vocab_size: int) -> None:
    if len(table.tokens) > vocab_size:
        raise MismatchError(
            f"The tokenizer has {len(table.tokens)} tokens and the model only {vocab_size} columns for them: "
            "they do not belong together."
        )
    if not table.eos_token_ids:
        raise UsageError("No token ends an answer, so no answer can be held to a grammar: name the end tokens.")
    if max(table.eos_token_ids) >= vocab_size:
        raise MismatchError(f"The end token {max(table.eos_token_ids)} is not among the model's {vocab_size}.")


def _future() -> "Future[T]":
    """One that a caller who gives up cannot cancel: others may wait for the same."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _pass_on(verdict: "Future[Verdict]", checked: "Future[None]") -> None:
    """A refusal becomes a new error for each caller: raising the one that is kept would grow its traceback."""
    error, refused = verdict.exception(), None if verdict.exception() else verdict.result()
    if error:
        checked.set_exception(error)
    elif refused:
        checked.set_exception(GrammarError(str(refused), refused.field_name))
    else:
        checked.set_result(None)


def _settle(future: "Future[T]", make: Callable[[], T]) -> None:
    try:
        value = make()
    except OneboxError as error:
        future.set_exception(error)
    except Exception as error:
        _log.exception("a grammar could not be compiled")
        future.set_exception(OneboxError(f"The grammar could not be compiled: {error}."))
    else:
        future.set_result(value)


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("The engine has stopped and accepts nothing more.")
