"""Clients that we did not write, unchanged, against `onebox serve`.

Schemathesis is part of the default suite. lm-eval and llama-benchy need an environment of their own: `make
conformance-test` makes it and runs them. The official clients of OpenAI and Anthropic have tests beside these.
"""

import functools
import http.server
import json
import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation import GenerationMode

from tests.server.launching import launched

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POCKET = ROOT / "onebox" / "pocket" / "model"
CLIENTS = ROOT / ".venv-conformance" / "bin"
ROUNDING_OF_THE_CACHE = 0.05  # nats; a sum of a few tokens in float32 over a BF16 KV cache differs by 0.02 at most


# Schemathesis: whatever follows from the OpenAPI page.

QUESTION = {"role": "user", "content": "Hi"}
NAME = "tiny"
PLAUSIBLE = {"model": NAME, "messages": [QUESTION], "prompt": "Hi", "input": "Hi", "tokens": [5]}


@pytest.fixture(scope="module")
def tiny_url(checkpoint):
    # A short context, so that what asks for an answer of any length gets a short one.
    limits = ("--max-model-len", "192", "--kv-cache-memory-bytes", "16000000")
    with launched(str(checkpoint), "--served-model-name", NAME, *limits) as url:
        yield url


def made_plausible(case):
    """The case with a conversation that holds, so that its other fields are what is tried; drawn ones seldom are."""
    if isinstance(case.body, dict):
        case.body.update({name: value for name, value in PLAUSIBLE.items() if name in case.body})
    if "name" in (case.path_parameters or {}):
        case.path_parameters["name"] = NAME
    return case


def checked_status(case):
    """The status of the answer, which is neither a failure of ours nor other than the OpenAPI page tells."""
    response = case.call(timeout=120)
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if response.headers["content-type"][0].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        errors = [event["error"] for event in map(json.loads, lines) if event.get("error")]
        assert not errors, (case.as_curl_command(), errors)
    return response.status_code


def fuzz(operation, mode, max_examples):
    """The statuses that were seen."""
    seen = set()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case):
        seen.add(checked_status(case))
        if mode is GenerationMode.POSITIVE:
            seen.add(checked_status(made_plausible(case)))

    send()
    return seen


def test_schemathesis_finds_no_failure_in_any_operation(tiny_url):
    schema = schemathesis.openapi.from_url(f"{tiny_url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    seen = {operation.label: fuzz(operation, GenerationMode.POSITIVE, 12) for operation in operations}
    # What is refused whole has not been tried.
    assert [label for label, statuses in seen.items() if 200 not in statuses] == []
    assert len(seen) >= 12


def test_schemathesis_gets_refusals_for_what_breaks_the_schema(tiny_url):
    schema = schemathesis.openapi.from_url(f"{tiny_url}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        if operation.body:
            assert fuzz(operation, GenerationMode.NEGATIVE, 12) <= set(range(400, 500)), operation.label
