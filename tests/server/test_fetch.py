"""What a URL of a request may lead to, and what it may not."""

import asyncio
import base64
import os
import socket
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Event, Thread

import httpx
import pytest

from onebox.server import fetch as module
from onebox.server.errors import ServerBusyError
from onebox.server.fetch import Allowance, FetchLimits, fetch
from onebox.spec.errors import UsageError

PRIVATE = FetchLimits(allows_private=True)


def get(url, limits=PRIVATE, kind="image", allowance=None):
    return asyncio.run(fetch(kind, url, limits, allowance or Allowance(limits)))


def refusal(url, limits=PRIVATE, kind="image", allowance=None):
    with pytest.raises(UsageError) as refused:
        get(url, limits, kind, allowance)
    assert str(refused.value).endswith(".")
    return str(refused.value)


@contextmanager
def site(answer):
    """A web server on this machine. `answer` gets (path, headers) and gives (status, headers, pieces of the body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, pieces = answer(self.path, self.headers)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(piece)
            except ConnectionError:
                pass

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Data URLs.


def data_url(data, content_type="image/png"):
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def test_a_data_url_is_its_bytes():
    assert get(data_url(b"\0pixels")) == b"\0pixels"
    assert get(data_url(b"moving", "image/gif"), kind="video") == b"moving"
    assert get("data:;base64,aGk=") == b"hi"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png,pixels", "not of the form"),
        ("data:image/png;base64", "not of the form"),
        ("data:image/png;base64,a", "cannot be decoded"),
        ("data:image/png;base64,\xe9\xe9\xe9\xe9", "cannot be decoded"),
        (data_url(b"x", "text/html"), "no image"),
        (data_url(b"x", "video/mp4"), "no image"),
        ("ftp://example.org/a.png", "no URL of a kind"),
        ("/etc/passwd", "no URL of a kind"),
        ("", "no URL of a kind"),
        ("http://", "no http"),
        ("http://[", "not known"),
        ("http://host:port/", "cannot be fetched"),
        ("http://a\ud800.example/", "cannot be fetched"),
        ("data:image/png;base64,\ud800", "cannot be decoded"),
        ("file://[/", "File URLs are not served"),
    ],
)
def test_what_is_no_url_of_a_picture_is_refused(url, words):
    assert words in refusal(url)


def test_bytes_are_bounded_one_by_one_and_together():
    limits = FetchLimits(max_bytes=10, max_total_bytes=15)
    assert "longer than 10 bytes" in refusal(data_url(bytes(11)), limits)
    allowance = Allowance(limits)
    get(data_url(bytes(10)), limits, allowance=allowance)
    assert "15 bytes together" in refusal(data_url(bytes(10)), limits, allowance=allowance)


# Files.


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open" / "deep" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "open" / "way-out.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path


def test_files_are_read_under_the_allowed_directory_alone(folder):
    limits = FetchLimits(local_path=folder / "open")
    assert get(f"file://{folder}/open/deep/a%20b.png", limits) == b"inside"
    assert get(f"file://localhost{folder}/open/deep/../deep/a%20b.png", limits) == b"inside"
    paths = ["secret.png", "open/../secret.png", "open/way-out.png", "open/absent.png", "open/deep", "open/pipe"]
    sentences = {refusal(f"file://{folder}/{path}", limits).split("' ", 1)[1] for path in [*paths, "open/a\0b"]}
    assert sentences == {"is no readable file in the directory that the operator allows."}
    assert "another machine" in refusal("file://elsewhere/a.png", limits)
    assert "no readable file" in refusal("file://[/", limits)
    assert "longer than 3 bytes" in refusal(
        f"file://{folder}/open/deep/a%20b.png", FetchLimits(local_path=folder / "open", max_bytes=3)
    )


def test_files_are_refused_where_no_directory_is_allowed(folder):
    assert "--allowed-local-media-path" in refusal(f"file://{folder}/open/deep/a%20b.png", FetchLimits())


# The web.


def test_a_file_of_the_web_is_its_bytes_through_redirects():
    def answer(path, headers):
        if path == "/start":
            return 302, {"Location": "middle"}, []
        if path == "/middle":
            return 308, {"Location": f"http://localhost:{headers['Host'].rpartition(':')[2]}/end?of=it"}, []
        assert headers["Host"].startswith("localhost:")
        return 200, {"Content-Type": "image/png"}, [path.encode(), b"!"]

    with site(answer) as url:
        assert get(f"{url}/start") == b"/end?of=it!"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"])  # noqa: S104
def test_this_machine_is_not_fetched_from(host):
    def answer(path, headers):
        raise AssertionError("it was asked")

    with site(answer) as url:
        port = url.rpartition(":")[2]
        assert "private address" in refusal(f"http://{host}:{port}/", FetchLimits())


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses_are_told_from_others(address, is_public):
    assert module._is_public(address) is is_public


def test_a_redirect_to_a_private_address_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_is_public", lambda address: address == "127.0.0.1")
    with site(lambda *_: (302, {"Location": "http://169.254.169.254/latest/meta-data/"}, [])) as url:
        message = refusal(url, FetchLimits())
    assert "169.254.169.254" in message
    assert "private address" in message


def test_a_name_with_one_private_address_among_others_is_refused(monkeypatch):
    def getaddrinfo(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert "private address" in refusal("http://example.org/", FetchLimits())


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A second look-up could answer otherwise. The name stays in the Host header and in the TLS handshake."""

    async def checked(*_):
        return "93.184.216.34"

    async def make():
        async with httpx.AsyncClient() as client:
            return await module._request(client, "https://someone:word@bücher.example:8443/a.png?b", FetchLimits())

    monkeypatch.setattr(module, "_checked_address", checked)
    request = asyncio.run(make())
    assert str(request.url) == "https://93.184.216.34:8443/a.png?b"
    assert request.headers["host"] == "xn--bcher-kva.example:8443"
    assert request.extensions["sni_hostname"] == "xn--bcher-kva.example"
    assert "authorization" not in request.headers


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {}, []), "status 404"),
        ((200, {"Content-Type": "text/html; charset=utf-8"}, [b"<html>"]), "type 'text/html', which is no image"),
        ((302, {"Location": "/again"}, []), "more than 5 redirects"),
        ((302, {"Location": "file:///etc/passwd"}, []), "no http(s) URL"),
        ((302, {"Location": "http://host:port/"}, []), "cannot be fetched"),
        ((200, {"Content-Length": "50"}, [b"short"]), "cannot be fetched"),
    ],
)
def test_answers_that_are_no_picture_are_refused(answer, words):
    with site(lambda *_: answer) as url:
        assert words in refusal(url)


def test_an_endless_answer_is_cut_off_at_the_limit():
    sent = []

    def pieces():
        while True:
            sent.append(1)
            yield bytes(1000)

    limits = FetchLimits(max_bytes=100_000, allows_private=True)
    with site(lambda *_: (200, {"Content-Type": "image/png"}, pieces())) as url:
        assert "longer than 100000 bytes" in refusal(url, limits)
    # What the sockets between us hold came too; an endless answer would have gone on.
    assert len(sent) < 50_000


def test_a_silent_answer_is_given_up():
    ended = Event()
    limits = FetchLimits(timeout_s=0.2, allows_private=True)
    with site(lambda *_: (ended.wait(30) and 200, {}, [])) as url:
        assert "within 0.2 seconds" in refusal(url, limits)
        ended.set()


def test_a_host_that_does_not_exist_is_named():
    assert "not known" in refusal("http://nowhere.invalid/a.png")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "cannot be fetched" in refusal(f"http://127.0.0.1:{closed.getsockname()[1]}/")


def test_a_name_server_that_hangs_costs_the_urls_own_time_and_nobody_elses(monkeypatch):
    answered = Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60))
    impatient = FetchLimits(timeout_s=0.2)

    async def fetch_all():
        urls = [f"http://{place}.example/" for place in range(20)]
        tasks = [fetch("image", url, impatient, Allowance(impatient)) for url in urls]
        refusals = await asyncio.gather(*tasks, return_exceptions=True)
        assert all("within 0.2 seconds" in str(refused) for refused in refusals)
        # The threads that everything else uses are free.
        await asyncio.wait_for(asyncio.to_thread(int), 30)

    try:
        asyncio.run(fetch_all())
    finally:
        answered.set()


def test_an_answer_that_drips_has_the_same_time_as_a_silent_one():
    def drip():
        while True:
            time.sleep(0.05)
            yield b"x"

    with site(lambda *_: (200, {"content-type": "image/png"}, drip())) as url:
        assert "within 0.5 seconds" in refusal(url, FetchLimits(allows_private=True, timeout_s=0.5))


def test_only_so_many_urls_are_fetched_at_once(monkeypatch):
    monkeypatch.setattr(module, "_fetches", BoundedSemaphore(1))
    asked, waiting = Event(), Event()

    def slow(*_):
        asked.set()
        waiting.wait(30)
        return 200, {"content-type": "image/png"}, [b"x"]

    async def two(url):
        first = asyncio.create_task(fetch("image", url, PRIVATE, Allowance(PRIVATE)))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        with pytest.raises(ServerBusyError):
            await fetch("image", url, PRIVATE, Allowance(PRIVATE))
        waiting.set()
        assert await first == b"x"
        assert await fetch("image", url, PRIVATE, Allowance(PRIVATE)) == b"x"

    with site(slow) as url:
        asyncio.run(two(url))


def test_spaces_in_a_data_url_are_left_out():
    assert get("data:;base64,a G\tk\n=") == b"hi"
    assert len(get("data:;base64," + "A " * 4_000_000)) == 3_000_000
