"""The checker's process: `python -m onebox.engine.grammar.check_process SOCKET PARENT`, of a `GrammarChecker`.

It never touches a client's grammar itself: for each one it forks, and the fork is bounded in time, memory and stack. So
the token table is built once, and a grammar that crashes the library or never ends costs a fork.
"""

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onebox.engine.grammar.checker import CheckLateError
from onebox.engine.grammar.checks import check_grammar
from onebox.engine.grammar.library import TokenMasks, open_tokenizer, start_thread
from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.engine.request import QueueFullError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["CHECK_STACK_BYTES", "main"]

CHECK_STACK_BYTES = 16 * 2**20
"""Smaller than the stacks of the engine's threads, so that what passes here does not overflow there."""
_FIRST_CPU_S = 0.1
"""Of a first try. Most legitimate grammars take less."""
_CPU_S = 0.6
"""Of a long one."""
_FIRST_WALL_S, _WALL_S = 2.0, 8.0
"""Only for a machine that is busy: what computes is ended by its CPU time."""
_ADDED_BYTES = 512 * 2**20
"""Address space beyond what the process has when it forks."""
_KEPT_BYTES = 32 * 2**20
"""Memory of one compiled grammar and of what its lexer learns on the first walks. Every sequence has its own."""
_PAGE_BYTES = resource.getpagesize()
_PR_SET_PDEATHSIG = 1


def main(socket: int, parent_id: int) -> None:
    _end_with(parent_id)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine: Connection[Any, Any] = Connection(socket)
    with contextlib.suppress(EOFError, OSError):
        table, vocab_size = engine.recv()
        tokenizer, masks = open_tokenizer(table, vocab_size), TokenMasks(table, vocab_size)
        _warm_up(tokenizer)
        engine.send(None)
        while True:
            grammar, is_long = engine.recv()
            engine.send(_verdict(tokenizer, masks, grammar, is_long=is_long))


def _warm_up(tokenizer: "LLTokenizer") -> None:
    """Everything that a check imports is imported before the first fork."""
    from onebox.engine.grammar.library import compile_matcher

    compile_matcher(tokenizer, Grammar.json_object()).compute_bitmask()


def _verdict(
    tokenizer: "LLTokenizer", masks: TokenMasks, grammar: Grammar, *, is_long: bool
) -> GrammarError | QueueFullError | CheckLateError | None:
    """None where the grammar can be used. The fork's last words count; without any, how it ended."""
    ours, theirs = Pipe(duplex=False)
    child_id = os.fork()
    if child_id == 0:
        _check_in_fork(tokenizer, masks, grammar, theirs, _CPU_S if is_long else _FIRST_CPU_S)
    theirs.close()
    found, is_done = None, True
    with ours, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        is_done = ours.poll(_WALL_S if is_long else _FIRST_WALL_S)
        found = ours.recv() if is_done else None
    os.kill(child_id, signal.SIGKILL)
    _, status = os.waitpid(child_id, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if isinstance(found, tuple):
        return found[0]  # type: ignore[no-any-return]
    if not is_long and (ended_by == signal.SIGPROF or not is_done):
        return CheckLateError()
    if not is_done and ended_by == signal.SIGKILL:
        return QueueFullError("This machine is too busy to check a new grammar; try again in a moment.")
    return GrammarError(f"The {grammar.kind.noun} is too complex: {_cause(ended_by)}; simplify it.", grammar.field_name)


def _cause(ended_by: int) -> str:
    if ended_by == signal.SIGPROF:
        return f"compiling it takes longer than {_CPU_S:g} s"
    if ended_by == signal.SIGABRT:
        return f"compiling it takes more than {_ADDED_BYTES // 2**20} MiB of memory"
    return "it is nested too deeply or too large to be compiled"


# In the fork.


def _check_in_fork(
    tokenizer: "LLTokenizer", masks: TokenMasks, grammar: Grammar, reply: "Connection[Any, Any]", cpu_s: float
) -> NoReturn:
    """Sends (the error or None,) and ends the process."""
    try:
        # The parent's exit ends this one too, a crash leaves no core file, and a panic's lines go nowhere.
        _end_with(os.getppid())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        own_bytes = _bound_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

        def check() -> None:
            error: GrammarError | None = None
            try:
                check_grammar(tokenizer, masks, grammar)
                added = _own_bytes() - own_bytes
                if added > _KEPT_BYTES:
                    raise _too_large(grammar, added)
            except GrammarError as refusal:
                error = refusal
            reply.send((error,))
            os._exit(0)

        start_thread(check, "check", CHECK_STACK_BYTES).join()
    finally:
        os._exit(1)


def _too_large(grammar: Grammar, num_bytes: int) -> GrammarError:
    sizes = f"{num_bytes // 2**20} MiB when compiled, and {_KEPT_BYTES // 2**20} are allowed"
    return GrammarError(f"The {grammar.kind.noun} is too complex: it takes {sizes}; simplify it.", grammar.field_name)


def _bound_memory() -> int:
    """Bounds the address space, where the system tells how much is taken; returns the process's own memory in bytes."""
    if sys.platform == "linux":
        address_bytes, *_ = _statm()
        limit = address_bytes + _ADDED_BYTES + CHECK_STACK_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return _own_bytes()


def _own_bytes() -> int:
    """Resident memory without mapped files, which a fork reads in again."""
    if not Path("/proc/self/statm").exists():
        return 0
    _, resident_bytes, shared_bytes = _statm()
    return resident_bytes - shared_bytes


def _statm() -> tuple[int, int, int]:
    """(address space, resident, of that mapped from files) in bytes."""
    pages = [int(number) for number in Path("/proc/self/statm").read_text().split()[:3]]
    return pages[0] * _PAGE_BYTES, pages[1] * _PAGE_BYTES, pages[2] * _PAGE_BYTES


def _end_with(parent_id: int) -> None:
    """Has the kernel kill this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
