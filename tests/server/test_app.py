"""The application describes its API as it is, and needs no torch."""

import subprocess
import sys


def test_the_openapi_page_describes_every_endpoint(tiny):
    paths = tiny.request("GET", "/openapi.json").json()["paths"]
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    others = {"/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/models", "/health", "/version", "/metrics"}
    assert generating | others <= paths.keys()


def test_the_openapi_page_tells_refusals_as_they_are(tiny):
    for path, operations in tiny.request("GET", "/openapi.json").json()["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorReply")


def test_the_server_and_the_engines_api_load_no_torch():
    check = "import sys, onebox.server.app, onebox.engine.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
