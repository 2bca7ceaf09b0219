"""Which grammar is checked next."""

import threading
from concurrent.futures import Future

import pytest

from onebox.engine.grammar import check_queue
from onebox.engine.grammar.check_queue import CheckQueue, GrammarCheck
from onebox.engine.grammar.value import Grammar
from onebox.engine.request import EngineStoppedError, QueueFullError


def check(text: str, *, is_long: bool = False) -> GrammarCheck:
    return GrammarCheck(Grammar.regex(text), Future(), is_long)


def test_first_tries_pass_long_ones_and_keep_their_order():
    queue = CheckQueue()
    checks = [check("a", is_long=True), check("b"), check("c", is_long=True), check("d"), check("e")]
    for one in checks:
        queue.put(one)
    assert [queue.take(takes_long=False) for _ in range(2)] == [checks[1], checks[3]]
    assert [queue.take(takes_long=True) for _ in range(3)] == [checks[0], checks[2], checks[4]]


def test_who_takes_no_long_ones_waits_for_a_first_try():
    queue = CheckQueue()
    taken: Future[GrammarCheck | None] = Future()
    taker = threading.Thread(target=lambda: taken.set_result(queue.take(takes_long=False)), daemon=True)
    taker.start()
    queue.put(check("a", is_long=True))
    first = check("b")
    queue.put(first)
    assert taken.result(timeout=20) is first


@pytest.mark.parametrize("is_long", [False, True])
def test_each_lane_has_its_own_limit(monkeypatch, is_long):
    monkeypatch.setattr(check_queue, "MAX_LONG" if is_long else "MAX_FIRST", 1)
    queue = CheckQueue()
    queue.put(check("a", is_long=is_long))
    with pytest.raises(QueueFullError, match=r"^1 new grammars .*; try again in a moment\.$"):
        queue.put(check("b", is_long=is_long))
    queue.put(check("c", is_long=not is_long))


def test_a_closed_queue_returns_what_waits_and_wakes_who_takes():
    queue = CheckQueue()
    taken: Future[GrammarCheck | None] = Future()
    threading.Thread(target=lambda: taken.set_result(queue.take(takes_long=False)), daemon=True).start()
    left = check("a", is_long=True)
    queue.put(left)
    assert queue.close() == [left]
    assert taken.result(timeout=20) is None
    with pytest.raises(EngineStoppedError):
        queue.put(check("b"))
