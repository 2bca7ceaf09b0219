"""An engine that nobody asks frees its memory by ending its process; the next request starts it again."""

from concurrent.futures import wait

import pytest

from onebox.engine.api import EngineRestartingError, EngineStoppedError, HealthStatus
from onebox.engine.remote.parent import EngineProcess
from tests.engine.fake import tokens_of, wait_until
from tests.engine.remote.processes import FakeStarter, is_running
from tests.engine.small import answer, request


@pytest.fixture
def sleepy(tmp_path):
    with EngineProcess(FakeStarter(tmp_path / "starts"), idle_release_s=0.0) as engine:
        engine.wait_ready()
        yield engine


def wait_idle(engine):
    """Its process is gone, too."""
    pid = engine._child.pid if engine._child else None
    wait_until(lambda: engine.health().status is HealthStatus.IDLE and engine._child is None)
    assert pid is None or not is_running(pid)


def test_an_idle_engine_ends_its_process_and_says_so(sleepy):
    wait_idle(sleepy)
    health = sleepy.health()
    assert health.status.takes_requests
    assert "the next request starts it again" in health.message
    assert sleepy.stats().is_alive


def test_the_next_request_wakes_it_and_is_answered_as_before(sleepy):
    for number in range(3):
        sleepy.awake().result(60)
        # It may go to sleep again between the two: nothing keeps it awake here, not even for a moment.
        for _ in range(100):
            try:
                handle = sleepy.submit(request(f"{number}", range(10, 20), max_tokens=5))
                break
            except EngineRestartingError:
                sleepy.awake().result(60)
        assert tokens_of(handle) == answer(range(10, 20), 5)
        wait_idle(sleepy)
    assert sleepy.health().num_restarts == 0
    assert sleepy.stats().totals.completion_tokens == 3 * 5


def test_many_that_wait_are_woken_together_and_who_gives_up_disturbs_nobody(sleepy):
    wait_idle(sleepy)
    waiting = [sleepy.awake() for _ in range(20)]
    waiting[0].cancel()
    done, late = wait(waiting[1:], 60)
    assert not late
    assert all(future.exception() is None for future in done)


def test_closing_an_idle_engine_ends_it_and_who_waits_is_told(tmp_path):
    engine = EngineProcess(FakeStarter(tmp_path / "starts"), idle_release_s=0.0)
    engine.wait_ready()
    wait_idle(engine)
    engine.close()
    assert not engine._thread.is_alive()
    engine.awake().result(1)
    with pytest.raises(EngineStoppedError):
        engine.submit(request("late", [1]))


def test_an_engine_at_work_is_left_alone(tmp_path):
    with EngineProcess(FakeStarter(tmp_path / "starts"), idle_release_s=3600.0) as engine:
        engine.wait_ready()
        assert tokens_of(engine.submit(request("a", range(30)))) == answer(range(30))
        assert engine.health().status is HealthStatus.OK
        assert engine.awake().done()
