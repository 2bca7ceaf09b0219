"""A process that is started before its engine is known."""

import os
import signal
from pathlib import Path

from onebox.engine.remote.parent import EngineProcess
from onebox.engine.remote.spawn import EarlyProcess
from tests.engine.fake import tokens_of, wait_until
from tests.engine.remote.processes import SOON, FakeStarter, is_running, wait_ok
from tests.engine.small import answer, request


def test_the_early_process_becomes_the_first_engine_and_no_later_one(tmp_path):
    with EarlyProcess("") as early:
        pid = early._spawned.process.pid
        with EngineProcess(FakeStarter(tmp_path / "starts"), policy=SOON, early=early) as engine:
            engine.wait_ready()
            assert engine.pid == pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: engine.health().num_restarts == 1)
            wait_ok(engine)
            assert engine.pid != pid
            assert tokens_of(engine.submit(request("a", [1]))) == answer([1])


def test_without_an_engine_it_ends_with_its_context():
    with EarlyProcess("") as early:
        process = early._spawned.process
    assert process.returncode is not None
    assert not is_running(process.pid)


def test_it_has_torch_before_it_is_told_what_to_start():
    with EarlyProcess("cpu") as early:
        maps = Path(f"/proc/{early._spawned.process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text())


def test_a_system_without_room_for_it_says_so_when_the_engine_starts(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("Too many open files")

    monkeypatch.setattr("onebox.engine.remote.spawn.spawn", refuse)
    with EarlyProcess("cpu") as early:
        assert early.take() is None
        with EngineProcess(FakeStarter(tmp_path / "starts"), early=early) as engine:
            engine.wait_ready()
