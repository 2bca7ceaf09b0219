"""HTTPS by flag, and paths behind a reverse proxy that passes its prefix on."""

import io
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from onebox.server.app import create_app
from onebox.server.http import HttpServer
from onebox.server.keys import plain_keys
from onebox.server.run import bind
from onebox.server.settings import ConnectionLimits, ServerSettings, TlsFiles
from onebox.spec.errors import UnreadableError
from tests.server.conftest import wait_until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) for 127.0.0.1, signed by itself."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    made = directory / "cert.pem", directory / "key.pem"
    names = ("-subj", "/CN=onebox", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", made[1])
    command = ["openssl", "req", "-x509", *key, "-out", made[0], "-days", "2", *names]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return made


@contextmanager
def serving(app, tls, limits):
    """(server, port) of an application that speaks HTTPS."""
    bound = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = HttpServer(app, ready.set, limits, tls.context())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(ready.is_set)
    yield server, bound.getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture
def https_url(scripted, certificate):
    """Of a server that asks clients for a certificate too."""
    tls = TlsFiles(certificate[0], certificate[1], client_authorities=certificate[0])
    with serving(create_app(scripted("Hi").service), tls, ConnectionLimits()) as (_, port):
        yield f"https://127.0.0.1:{port}"


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\n\r\n"])
def test_clients_that_never_finish_their_handshake_keep_nobody_out(scripted, certificate, hello):
    limits = ConnectionLimits(max_connections=16, header_timeout_s=60)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    before = num_descriptors()
    with (
        serving(create_app(scripted("Hi").service), TlsFiles(*certificate), limits) as (server, port),
        ExitStack() as held,
    ):
        for _ in range(60):
            silent = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):
                silent.sendall(hello)
        assert httpx.get(f"https://127.0.0.1:{port}/health", verify=trusting).status_code == 200
        wait_until(lambda: len(server._door.handshakes) <= 4)
        # The test's own ends, and a few of the server's.
        wait_until(lambda: num_descriptors() - before < 60 + 16)


def test_a_handshake_has_the_time_of_a_header(scripted, certificate):
    limits = ConnectionLimits(header_timeout_s=0.2)
    with serving(create_app(scripted("Hi").service), TlsFiles(*certificate), limits) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.settimeout(30)
            assert silent.recv(1) == b""
        wait_until(lambda: not server._door.handshakes)


def test_answers_come_over_tls_to_who_trusts_and_is_trusted(https_url, certificate):
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    trusting.load_cert_chain(*certificate)
    body = {"prompt": "Hi", "max_tokens": 2}
    with httpx.Client(verify=trusting) as client:
        assert client.get(f"{https_url}/health").json()["status"] == "ok"
        assert client.post(f"{https_url}/v1/completions", json=body).json()["choices"][0]["text"] == "Hi"
        with client.stream("POST", f"{https_url}/v1/completions", json={**body, "stream": True}) as response:
            assert "data: [DONE]" in response.read().decode()
    stranger = ssl.create_default_context(cafile=str(certificate[0]))
    with httpx.Client(verify=stranger) as client, pytest.raises(httpx.HTTPError):
        client.get(f"{https_url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(https_url.replace("https", "http") + "/health")


def test_chat_says_what_to_do_about_a_certificate_that_it_does_not_trust(https_url, run_cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    refused = run_cli("chat", "--url", https_url, "Hi")
    assert (refused.code, refused.out) == (1, "")
    assert "is not trusted (self-signed certificate); SSL_CERT_FILE=FILE names" in refused.err


def test_files_that_are_no_certificate_are_refused_at_the_start(tmp_path, certificate):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for files in (TlsFiles(wrong), TlsFiles(tmp_path / "absent.pem"), TlsFiles(certificate[0], wrong)):
        with pytest.raises(UnreadableError, match="TLS cannot be set up with"):
            files.context()


def test_a_prefix_is_taken_off_before_anything_looks_at_the_path(scripted):
    client = scripted("Hi")
    keys = tuple(plain_keys(["sk-one"]))
    client.app = create_app(client.service, ServerSettings(api_keys=keys, root_path="/onebox"))
    for path in ("/onebox/health", "/health", "/onebox"):
        assert client.request("GET", path).status_code == 200
    assert client.request("GET", "/onebox/v1/models").status_code == 401
    allowed = {"Authorization": "Bearer sk-one"}
    assert client.request("GET", "/onebox/v1/models", headers=allowed).status_code == 200
    assert client.request("GET", "/oneboxes/v1/models", headers=allowed).status_code == 404
