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
def serving(drain_s):
    """(process, URL) of a server that drains for so long."""
    command = [sys.executable, "-m", "tests.server.draining", str(drain_s)]
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


@pytest.mark.parametrize(("path", "count"), [("wait-in-thread", 1), ("wait-in-loop", 1), ("wait-in-loop", 3)])
def test_it_ends_whatever_hangs(path, count):
    with serving(0.3) as (process, url):
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/{path}", timeout=0.5)
        began = time.monotonic()
        for _ in range(count):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        code, _, err = ended(process)
        assert code == 0
        assert time.monotonic() - began < (20 if count == 1 else 3)
        assert "Traceback" not in err


def test_a_reader_that_reads_nothing_does_not_keep_it():
    with serving(0.3) as (process, url), socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as connection:
        connection.sendall(b"POST /count?limit=1000000 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as half:
            half.sendall(b"POST /count HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc")
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert ended(process)[0] == 0
            # About 2 s; on a busy machine more.
            assert time.monotonic() - began < 4.5


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
