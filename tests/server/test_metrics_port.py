"""`--metrics-port`: a port where scrapers need no key, and nothing else is served."""

import http.client
import socket
import ssl
import threading
from contextlib import contextmanager

import httpx
import pytest

from onebox.cli.serve_options import HttpOptions
from onebox.server.app import create_app
from onebox.server.http import HttpServer
from onebox.server.keys import plain_keys
from onebox.server.run import bind
from onebox.server.settings import ConnectionLimits, ServerSettings, TlsFiles
from onebox.spec.errors import OneboxError, UsageError
from tests.server.conftest import wait_until
from tests.server.test_errors import refused
from tests.server.test_tls import certificate

__all__ = ["certificate"]

KEY = {"Authorization": "Bearer sk-one"}
ELSEWHERE = (
    *("GET /v1/models", "GET /health", "GET /", "GET /metrics/", "POST /metrics", "POST /v1/completions"),
    *("POST /v1/responses", "GET /onebox/v1/models", "OPTIONS /metrics", "GET //metrics"),
)


@contextmanager
def two_ports(service, tls=None, limits=None, **settings):
    """(API's URL, URL for scrapers) of a server with a key."""
    with bind("127.0.0.1", 0) as api, bind("127.0.0.1", 0) as scraped:
        port = scraped.getsockname()[1]
        settings = ServerSettings(api_keys=tuple(plain_keys(["sk-one"])), metrics_port=port, **settings)
        ready = threading.Event()
        server = HttpServer(create_app(service, settings), ready.set, limits or ConnectionLimits(), tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [api, scraped]})
        thread.start()
        wait_until(ready.is_set)
        try:
            scheme = "https" if tls else "http"
            yield tuple(f"{scheme}://127.0.0.1:{bound.getsockname()[1]}" for bound in (api, scraped))
        finally:
            server.should_exit = True
            thread.join()


def test_metrics_need_no_key_on_their_port_and_nothing_else_is_served_there(scripted):
    with httpx.Client() as client:
        with two_ports(scripted("Hi").service, root_path="/onebox") as (api, scraped):
            answer = client.get(f"{scraped}/metrics")
            assert answer.status_code == 200
            assert "onebox:engine_up" in answer.text
            assert client.get(f"{scraped}/onebox/metrics").status_code == 200
            refused(client.get(f"{api}/metrics"), 401, code="invalid_api_key")
            assert client.get(f"{api}/metrics", headers=KEY).status_code == 200
            assert client.get(f"{api}/v1/models", headers=KEY).status_code == 200
            for call in ELSEWHERE:
                method, path = call.split()
                for headers in ({}, KEY):
                    answer = client.request(method, scraped + path, headers=headers)
                    assert "GET /metrics alone" in refused(answer, 404, code="not_supported")
        for url in (api, scraped):
            with pytest.raises(httpx.ConnectError):
                client.get(f"{url}/metrics")


def test_where_the_api_speaks_tls_so_does_the_port_for_scrapers(scripted, certificate):
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with two_ports(scripted("Hi").service, TlsFiles(*certificate).context()) as (_, scraped):
        assert httpx.get(f"{scraped}/metrics", verify=trusting).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(scraped.replace("https", "http") + "/metrics")


def test_a_scraper_that_says_nothing_is_cut_off(scripted):
    with two_ports(scripted("Hi").service, limits=ConnectionLimits(header_timeout_s=0.2)) as (_, scraped):
        port = int(scraped.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            answer = http.client.HTTPResponse(slow)
            answer.begin()
            assert answer.status == 408


def test_a_port_that_cannot_be_had_is_refused_by_its_flag():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OneboxError, match=rf"Port {port} on 127.0.0.1 cannot be had .*--metrics-port\."):
            bind("127.0.0.1", port, "--metrics-port")


def test_the_address_is_that_of_the_api_unless_given():
    assert HttpOptions(port=8000).metrics_address() is None
    assert HttpOptions(host="0.0.0.0", metrics_port=9400).metrics_address() == ("0.0.0.0", 9400)  # noqa: S104
    assert HttpOptions(metrics_port=0, port=0).metrics_address() == ("127.0.0.1", 0)
    assert HttpOptions(metrics_host="::1", metrics_port=9400).metrics_address() == ("::1", 9400)
    with pytest.raises(UsageError, match="--metrics-port 8000 is the API's own port"):
        HttpOptions(port=8000, metrics_port=8000).metrics_address()
    with pytest.raises(UsageError, match="--metrics-host goes with --metrics-port"):
        HttpOptions(metrics_host="127.0.0.1").metrics_address()
