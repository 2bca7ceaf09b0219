"""A server that is frozen is ended by another process; one that is stopped, or late, is not."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from onebox.server import watchdog_process
from tests.server.conftest import wait_until
from tests.server.test_run import counting, ended, serving


def children(process_id):
    return [int(word) for word in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def is_running(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def full_stderr(process_id):
    """Its stderr, a pipe that nobody reads, filled."""
    pipe = os.open(f"/proc/{process_id}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    return pipe


def freeze(url):
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{url}/hold", timeout=0.3)


def test_a_server_whose_lock_is_held_ends_with_the_stacks_of_its_threads():
    with serving(3600, freeze_s=1.0) as (process, url):
        (watchdog,) = children(process.pid)
        freeze(url)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/health", timeout=0.3)
        began = time.monotonic()
        code, _, err = ended(process)
        assert code == watchdog_process.END_SIGNAL
        assert time.monotonic() - began < 20
        assert "the event loop has not run for 1 s" in err
        assert "in hold" in err, "the stack that froze it"
        wait_until(lambda: not is_running(watchdog))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=1)


def test_sigterm_ends_a_server_whose_lock_is_held():
    with serving(3600, unheard_s=0.5) as (process, url):
        freeze(url)
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert code == watchdog_process.END_SIGNAL
        assert "a signal to stop was not heard for 0.5 s" in err


@pytest.mark.parametrize("is_held", [False, True])
def test_a_frozen_server_that_is_the_first_process_of_a_container_ends_too(is_held):
    """Signals from inside end such a process only by handlers of its own; SIGKILL is ignored."""
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of processes here")
    with serving(3600, freeze_s=0.5, under=command) as (process, url):
        (server,) = children(process.pid)
        pipe = full_stderr(server) if is_held else None
        freeze(url)
        code = process.wait(timeout=30)
        assert code == (watchdog_process.EXIT_SIGNAL if pipe else watchdog_process.END_SIGNAL)
        if pipe:
            os.close(pipe)


def test_a_loop_that_hangs_without_the_lock_counts_as_frozen_too():
    with serving(3600, freeze_s=0.5) as (process, url):
        with suppress(httpx.TransportError):
            httpx.post(f"{url}/wait-in-loop", timeout=30)
        code, _, err = ended(process)
        assert (code, "in wait_in_loop" in err) == (watchdog_process.END_SIGNAL, True)


def test_a_server_that_was_stopped_for_longer_than_the_limit_goes_on():
    with serving(3600, freeze_s=1.5, unheard_s=1.5) as (process, url):
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_watchdog_that_was_stopped_itself_does_not_take_that_time_for_silence():
    """As both are on a laptop that sleeps: the first thing that runs again may be the watchdog."""
    with serving(3600, freeze_s=1.5) as (process, url):
        (watchdog,) = children(process.pid)
        os.kill(watchdog, signal.SIGSTOP)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.2)
        os.kill(watchdog, signal.SIGCONT)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert httpx.get(f"{url}/health").status_code == 200


def test_it_watches_while_running_requests_finish():
    with serving(3600, freeze_s=1.5) as (process, url), counting(url, 1_000_000):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        time.sleep(2.0)
        assert process.poll() is None, "a loop that drains still beats"


def test_without_its_watchdog_a_server_serves_on_and_says_so_once():
    with serving(3600, freeze_s=1.5) as (process, url):
        (watchdog,) = children(process.pid)
        os.kill(watchdog, signal.SIGKILL)
        wait_until(lambda: not children(process.pid))
        time.sleep(0.2)
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert (code, err.count("a frozen server would not be noticed")) == (0, 1)


def test_a_server_that_cannot_write_its_stacks_to_a_full_pipe_ends_without():
    with serving(3600, freeze_s=0.5) as (process, url):
        pipe = full_stderr(process.pid)
        freeze(url)
        assert process.wait(timeout=30) == watchdog_process.EXIT_SIGNAL
        os.close(pipe)
