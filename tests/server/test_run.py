"""Serving on a socket: a signal lets running requests finish, a second one stops at once."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from onebox.server.run import bind
from onebox.spec.errors import OneboxError
from tests.server.conftest import wait_until


@contextmanager
def serving(drain_s, ending_s=2.0, freeze_s=600.0, unheard_s=600.0, under=()):
    """(process, URL) of a server that drains for so long, and is ended `ending_s` seconds after it should have.

    `under` is a command that starts it.
    """
    numbers = map(str, (drain_s, ending_s, freeze_s, unheard_s))
    command = [*under, sys.executable, "-m", "tests.server.draining", *numbers]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def counting(url, limit):
    """The lines of a running count, the first one read."""
    with httpx.stream("POST", f"{url}/count", params={"limit": limit}, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines) == "0"
        yield lines


def ended(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new(name):
    with serving(3600) as (process, url):
        with counting(url, 40) as lines:
            process.send_signal(name)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(f"{url}/count")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "takes no new requests" in refused.json()["error"]["message"]
            in_other_words = httpx.post(f"{url}/v1/messages")
            assert (in_other_words.status_code, in_other_words.headers["retry-after"]) == (503, "5")
            assert (in_other_words.json()["type"], in_other_words.json()["error"]["type"]) == (
                "error",
                "overloaded_error",
            )
            assert httpx.get(f"{url}/version").status_code == 200
            assert list(lines) == [*map(str, range(1, 40)), "done"]
        assert ended(process) == (0, "Stopped.\n", "")


def test_with_nobody_inside_it_stops_at_once():
    with serving(3600) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "Stopped.\n", "")


def test_what_does_not_finish_in_time_is_ended():
    with serving(0.3) as (process, url):
        with counting(url, 1_000_000) as lines:
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-1] == "stopped"
        assert ended(process) == (0, "Stopped.\n", "")


def test_a_second_signal_stops_at_once():
    with serving(3600) as (process, url), counting(url, 1_000_000):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        code, out, _ = ended(process)
        assert (code, out) == (0, "Stopped.\n")


@pytest.mark.parametrize("path", ["wait-in-thread", "wait-in-loop"])
def test_it_ends_whatever_hangs(path):
    with serving(0.3) as (process, url):
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/{path}", timeout=0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert code == 0
        assert time.monotonic() - began < 20
        assert "Traceback" not in err


def test_more_signals_end_it_though_the_loop_hangs():
    with serving(0.3, ending_s=600) as (process, url):
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/wait-in-loop", timeout=0.5)
        limit = time.monotonic() + 60
        # Three, unless the system has made one of two.
        while process.poll() is None and time.monotonic() < limit:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert ended(process) == (0, "", "")


def test_a_reader_that_reads_nothing_does_not_keep_it():
    with (
        serving(0.3, ending_s=50) as (process, url),
        socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection,
    ):
        connection.sendall(b"POST /flood HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        assert connection.recv(8) == b"HTTP/1.1"
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as half:
            half.sendall(b"POST /count HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc")
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            process.send_signal(signal.SIGTERM)
            # By itself, and not because the time to end was over.
            code, out, err = ended(process)
            assert (code, out) == (0, "Stopped.\n")
            assert "did not end in time" not in err


def test_when_nothing_can_be_served_any_more_it_exits_so_that_it_is_restarted():
    with serving(3600) as (process, url):
        assert httpx.post(f"{url}/fail").status_code == 200
        assert ended(process) == (70, "Stopped.\n", "onebox: Lost.\n")


def test_headers_are_bounded():
    with serving(0) as (_, url):
        assert httpx.get(f"{url}/version", headers={"x-long": "x" * 30_000}).status_code == 200
        # It may hang up before all of it is sent.
        with suppress(httpx.TransportError):
            assert httpx.get(f"{url}/version", headers={"x-long": "x" * 300_000}).status_code == 431
        assert httpx.get(f"{url}/version").status_code == 200


def test_a_port_in_use_is_one_sentence():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OneboxError, match=rf"Port {port} on 127\.0\.0\.1 cannot be had .*--port") as error:
            bind("127.0.0.1", port)
    assert error.value.exit_code == 1
