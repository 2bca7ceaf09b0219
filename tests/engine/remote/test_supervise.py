"""Whatever becomes of the engine's process, nobody is left waiting, and it serves again or says why not."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onebox.engine.api import (
    EngineClient,
    EngineRestartingError,
    EngineStoppedError,
    Failed,
    FinishReason,
    Grammar,
    GrammarKind,
    HealthStatus,
    QueueFullError,
    Request,
    Started,
    Tokens,
)
from onebox.engine.plan import EngineOptions, TokenInfo
from onebox.engine.remote import supervise
from onebox.engine.remote.messages import Planned, StartPhase
from onebox.engine.remote.parent import EngineProcess
from onebox.engine.remote.supervise import RestartPolicy
from onebox.engine.request import Pictures, Vision
from onebox.engine.start import CheckpointStarter
from onebox.spec.errors import DoesNotFitError, OneboxError, UsageError
from tests.engine.fake import FAILING, tokens_of, wait_until
from tests.engine.remote.processes import (
    CONFIG,
    DYING,
    FORKING,
    HALVING,
    HANGING,
    SLOW,
    SOON,
    UNSENDABLE,
    FakeStarter,
    is_running,
    stop_threads,
    wait_ok,
)
from tests.engine.small import answer, request


def test_killed_under_load_it_fails_everyone_at_once_and_serves_again(start):
    engine = start()
    assert tokens_of(engine.submit(request("first", [3]))) == answer([3])
    config, before = engine.config, engine.stats()
    handles = [engine.submit(request(str(i), [SLOW, i], max_tokens=400)) for i in range(6)]
    streams = [iter(handle) for handle in handles]
    for stream in streams[:4]:
        assert [type(next(stream)) for _ in range(3)] == [Started, Tokens, Tokens]
    old = engine.pid
    os.kill(old, signal.SIGKILL)
    message = "The engine died before this request was done: its process was killed by SIGKILL."
    assert [list(stream)[-1] for stream in streams] == [Failed(h.request_id, message) for h in handles]
    wait_ok(engine)
    assert tokens_of(engine.submit(request("0", [3]))) == answer([3])
    assert (engine.config, engine.health().num_restarts) == (config, 1)
    assert engine.pid != old
    totals = engine.stats().totals
    assert totals.num_failed == before.totals.num_failed + 6
    assert totals.completion_tokens >= before.totals.completion_tokens + 5
    assert totals.finished[FinishReason.LENGTH] == before.totals.finished[FinishReason.LENGTH] + 1


def test_while_it_restarts_requests_are_refused_and_health_says_so(start):
    engine = start(RestartPolicy(first_wait_s=3600))
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: engine.health().status is HealthStatus.RESTARTING)
    assert "killed by SIGKILL) and is restarting" in engine.health().message
    with pytest.raises(EngineRestartingError, match="is restarting; try again") as error:
        engine.submit(request("a", [1]))
    assert error.value.retry_after_s > 0
    engine.abort("a")
    stats = engine.stats()
    assert (stats.is_alive, stats.num_running, stats.num_free_pages) == (False, 0, CONFIG.num_pages)


def test_an_exception_in_a_step_fails_everyone_with_its_words_and_it_serves_again(start, capfd):
    engine = start()
    handles = engine.submit_all([request(str(i), [i, DYING]) for i in range(3)])
    assert {list(handle)[-1].message for handle in handles} == {"The engine died: no more."}
    wait_until(lambda: engine.health().num_restarts == 1)
    wait_ok(engine)
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])
    written = []
    wait_until(lambda: written.append(capfd.readouterr().err) or "MemoryError: no more" in "".join(written))


def test_failed_requests_are_counted_once_whoever_failed_them(start):
    engine = start()
    list(engine.submit(request("alone", [1, FAILING])))
    for handle in engine.submit_all([request(str(i), [i, DYING]) for i in range(3)]):
        list(handle)
    wait_until(lambda: engine.health().num_restarts == 1)
    wait_ok(engine)
    assert engine.stats().totals.num_failed == 4
    handle = engine.submit(request("killed", [SLOW, 1], max_tokens=400))
    next(iter(handle))
    os.kill(engine.pid, signal.SIGKILL)
    assert isinstance(list(handle)[-1], Failed)
    assert engine.stats().totals.num_failed == 5


def test_a_request_whose_events_cannot_be_pickled_fails_and_no_other(start, capfd):
    engine = start()
    good, bad = engine.submit_all([request("good", [1], max_tokens=30), request("bad", [2, UNSENDABLE], max_tokens=30)])
    events = list(bad)
    assert events[-1] == Failed("bad", "What the engine computed for this request could not be sent to the server.")
    assert tokens_of(events) == []
    assert tokens_of(good) == answer([1], 30)
    again = engine.submit(request("bad", [3]))
    assert tokens_of(again) == answer([3])
    stats = engine.stats()
    assert (stats.num_running, stats.totals.num_failed, engine.health().num_restarts) == (0, 1, 0)
    assert "an event of request bad cannot be sent" in capfd.readouterr().err


def test_a_stuck_step_is_ended_but_a_long_start_is_not(start):
    engine = start(RestartPolicy(hang_s=1.2, first_wait_s=0.01), takes_s=1.6)
    handle = engine.submit(request("a", [HANGING]))
    assert re.search(r"it has finished no step for \d+ s", list(handle)[-1].message)
    wait_until(lambda: engine.health().num_restarts == 1)
    wait_ok(engine)
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])
    assert engine.health().num_restarts == 1


def test_one_that_keeps_dying_is_given_up_with_a_sentence(start, tmp_path):
    engine = start(RestartPolicy(first_wait_s=0.01, max_quick_deaths=3), dies_from_start=2)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: engine.health().status is HealthStatus.FAILED)
    assert "died 3 times in a row soon after its start, the last time because" in engine.health().message
    assert "ended with status 3; onebox gave up on it" in engine.health().message
    assert len((tmp_path / "starts").read_text().splitlines()) == 3
    with pytest.raises(EngineStoppedError, match="gave up on it"):
        engine.submit(request("a", [1]))
    assert not engine.stats().is_alive


def test_waits_double_with_every_quick_death_in_a_row():
    assert [RestartPolicy().wait_s(deaths) for deaths in (0, 1, 2, 3, 4, 50)] == [1, 1, 2, 4, 8, 30]


def test_a_first_start_that_is_refused_raises_the_refusal_itself(tmp_path):
    with (
        EngineProcess(FakeStarter(tmp_path / "starts", is_too_large=True)) as engine,
        pytest.raises(DoesNotFitError, match="takes 80 GiB"),
    ):
        engine.wait_ready()
    assert not (tmp_path / "starts").exists()


def test_a_first_start_that_dies_is_one_sentence_and_not_tried_again(tmp_path):
    with EngineProcess(FakeStarter(tmp_path / "starts", dies_from_start=1), policy=SOON) as engine:
        with pytest.raises(OneboxError, match=r"The engine did not start: its process ended with status 3\."):
            engine.wait_ready()
        assert engine.health().status is HealthStatus.FAILED
        with pytest.raises(EngineStoppedError, match="did not start"):
            engine.submit(request("a", [1]))
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_progress_that_cannot_be_told_stops_nothing_at_the_start_or_at_a_restart(tmp_path):
    def tell(_):
        raise BrokenPipeError("nobody listens")

    with EngineProcess(FakeStarter(tmp_path / "starts"), tell, SOON) as engine:
        engine.wait_ready()
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: engine.health().num_restarts == 1)
        wait_ok(engine)
        assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_a_stopped_process_counts_as_hung_and_is_replaced(start):
    engine = start(RestartPolicy(hang_s=1.2, first_wait_s=0.01))
    stop_threads(engine.pid)
    assert "it has finished no step for" in list(engine.submit(request("a", [1])))[-1].message
    wait_ok(engine)
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_one_that_stops_in_the_middle_of_a_message_is_replaced(start):
    engine = start(RestartPolicy(hang_s=1.2, first_wait_s=0.01))
    handle = engine.submit(request("a", [HALVING]))
    message = "The engine died before this request was done: it stopped in the middle of a message."
    assert list(handle)[-1] == Failed("a", message)
    wait_ok(engine)
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_a_process_left_behind_by_the_engine_does_not_hide_its_death_and_ends_with_it(start, tmp_path):
    engine = start()
    handle = engine.submit(request("a", [FORKING]))
    left = tmp_path / "left"
    wait_until(lambda: left.exists() and left.read_text())
    os.kill(engine.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in list(handle)[-1].message
    wait_until(lambda: not is_running(int(left.read_text())))


def test_health_says_so_before_clients_are_told_of_a_death(start):
    engine = start(RestartPolicy(first_wait_s=3600))
    seen = []
    engine.observer = lambda _: lambda event, _: seen.append((type(event), engine.health().status))
    list(engine.submit(request("a", [DYING])))
    assert seen[-1] == (Failed, HealthStatus.RESTARTING)
    engine.close()


def test_starts_that_the_system_refuses_are_tried_again(start, monkeypatch):
    engine = start(RestartPolicy(first_wait_s=0.01, max_quick_deaths=2))
    spawn, refusals = supervise.spawn, [OSError(errno.EMFILE, "Too many open files")] * 4

    def refuse():
        if refusals:
            raise refusals.pop()
        return spawn()

    monkeypatch.setattr(supervise, "spawn", refuse)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: not refusals)
    wait_ok(engine)
    assert engine.health().num_restarts == 1
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_starts_that_the_system_refuses_for_long_are_given_up(start, monkeypatch):
    engine = start(RestartPolicy(first_wait_s=0.01, unstartable_s=0.1))

    def refuse():
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervise, "spawn", refuse)
    os.kill(engine.pid, signal.SIGKILL)
    message = engine.wait_failed()
    assert re.search(r"could not be started for \d+ s, the last time because .*temporarily unavailable", message)


def test_whoever_waits_for_the_end_is_told_when_it_is_closed(start):
    engine = start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.wait_failed)
        engine.close()
        assert waiting.result(20) is None


def test_what_waits_for_an_engine_that_does_not_read_is_bounded(start, monkeypatch):
    monkeypatch.setattr(supervise, "MAX_UNSENT_BYTES", 3 << 20)
    engine = start()
    stop_threads(engine.pid)
    patches = Vision(images=Pictures(np.zeros(2 << 18, np.float32), ()))
    handle = engine.submit(Request("a", (1,), vision=patches))
    with pytest.raises(QueueFullError, match=r"has not yet read 2 MiB of requests .* this one has 2 MiB"):
        engine.submit(Request("b", (1,), vision=patches))
    assert engine.stats().num_waiting == 1
    engine.close()
    assert list(handle)[-1].message == "The engine was closed before this request was done."


def test_a_request_that_cannot_be_sent_is_refused_and_concerns_nobody_else(start):
    engine = start()
    with pytest.raises(UsageError, match="cannot be sent to the engine"):
        engine.submit(Request("a", (1,), vision=threading.Lock()))
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_close_fails_what_is_open_and_leaves_no_process(start):
    engine = start()
    pid, handle = engine.pid, engine.submit(request("a", [HANGING]))
    engine.close()
    assert list(handle) == [Failed("a", "The engine was closed before this request was done.")]
    assert not is_running(pid)
    assert engine.health().status is HealthStatus.STOPPED
    with pytest.raises(EngineStoppedError, match="has stopped"):
        engine.submit(request("b", [1]))
    engine.close()


def test_a_terminals_signals_do_not_end_it(start):
    engine = start()
    for name in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, name)
    assert tokens_of(engine.submit(request("a", [1]))) == answer([1])
    assert engine.health().num_restarts == 0


@pytest.mark.parametrize("takes_s", [0.0, 3600.0], ids=["serving", "loading"])
def test_no_process_outlives_its_parent_even_when_that_is_killed(tmp_path, takes_s):
    starts = tmp_path / "starts"
    script = (
        "from pathlib import Path; from onebox.engine.remote.parent import EngineProcess\n"
        "from tests.engine.remote.processes import FakeStarter\n"
        f"EngineProcess(FakeStarter(Path({str(starts)!r}), takes_s={takes_s})).wait_ready(); print('ready'); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as parent:
        wait_until(lambda: starts.exists() and starts.read_text().endswith("\n"))
        if not takes_s:
            assert parent.stdout.readline() == b"ready\n"
        child = int(starts.read_text())
        assert is_running(child)
        parent.kill()
    wait_until(lambda: not is_running(child))


# With a model.


def test_a_model_killed_under_load_comes_back_and_says_the_same(checkpoint, tokenizer):
    from onebox.text.vocabulary import token_table

    tokens = TokenInfo((0,), (), token_table(tokenizer, (0,)))
    options = EngineOptions(max_model_len=1000, kv_cache_memory_bytes=16 << 20)
    told = []
    engine: EngineClient
    with EngineProcess(CheckpointStarter(checkpoint, options, tokens, 1), told.append, SOON) as engine:
        engine.wait_ready()
        asked = request("a", range(100), max_tokens=10, seed=7, ignore_eos=True)
        before = tokens_of(engine.submit(asked))
        assert len(before) == 10
        assert (engine.stats().num_finished, engine.stats().prefix.hit_tokens) == (1, 0), "the warm-up left traces"
        handles = [engine.submit(request(str(i), [i], max_tokens=900, ignore_eos=True)) for i in range(6)]
        first = iter(handles[0])
        assert next(first) == Started("0")
        os.kill(engine.pid, signal.SIGKILL)
        assert all(isinstance(list(handle)[-1], Failed) for handle in handles)
        wait_until(lambda: engine.health().num_restarts == 1)
        wait_ok(engine)
        assert tokens_of(engine.submit(asked)) == before
        digits = tokens_of(engine.submit(request("g", [1], grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}"))))
        assert tokenizer.decode(digits).isdigit()
    names = [part.name for part in told if isinstance(part, StartPhase)]
    assert names == ["import", "memory plan", "weights", "warm-up", "weights", "warm-up"]
    assert [part.config for part in told if isinstance(part, Planned)] == [engine.config]
