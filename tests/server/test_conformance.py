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

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import positive_data_acceptance
from schemathesis.generation import GenerationMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.conftest import events
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
    limits = ("--max-model-len", "128", "--kv-cache-memory-bytes", "16000000")
    with launched(str(checkpoint), "--served-model-name", NAME, *limits) as url:
        yield url


def made_plausible(case):
    """The case with a conversation that holds, so that its other fields are what is tried; drawn ones seldom are."""
    if isinstance(case.body, dict):
        case.body.update({name: value for name, value in PLAUSIBLE.items() if name in case.body})
    if "name" in (case.path_parameters or {}):
        case.path_parameters["name"] = NAME
    if "response_id" in (case.path_parameters or {}):
        case.path_parameters["response_id"] = stored_response(case.operation.schema.get_base_url().rstrip("/"))
    return case


def stored_response(url):
    """The id of an answer that can be retrieved or deleted."""
    body = {"input": "Hi", "max_output_tokens": 1}
    reply = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


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
    seen = {operation.label: fuzz(operation, GenerationMode.POSITIVE, 10) for operation in operations}
    # What is refused whole has not been tried.
    never = [label for label, statuses in seen.items() if 200 not in statuses]
    # Of those that are done none can be cancelled or told to stop thinking; tests of their own try both.
    assert never == ["POST /v1/chat/completions/control", "POST /v1/responses/{response_id}/cancel"]
    assert len(seen) >= 12


def test_schemathesis_gets_refusals_for_what_breaks_the_schema(tiny_url):
    schema = schemathesis.openapi.from_url(f"{tiny_url}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        if operation.body:
            assert fuzz(operation, GenerationMode.NEGATIVE, 10) <= set(range(400, 500)), operation.label


# What clients that measure a stream rely on.


def test_a_stream_of_chat_says_nothing_before_its_first_token(scripted, tokenizer):
    client = scripted("ok", fails_on=tokenizer.encode("é")[0])
    (failure,) = events(client.chat("é", stream=True))
    assert "error" in failure


def test_token_ids_come_with_the_text_that_they_make(scripted):
    client = scripted("Let me see.\n</think>\n\n🎻 and é.")
    *chunks, last = [chunk["choices"][0] for chunk in events(client.chat(stream=True, return_token_ids=True))]
    shown = [chunk for chunk in chunks if chunk["delta"].get("content") or chunk["delta"].get("reasoning")]
    (whole,) = client.chat(return_token_ids=True).json()["choices"]
    assert [i for chunk in shown for i in chunk["token_ids"]] == whole["token_ids"]
    assert last["token_ids"] == []


# lm-eval and llama-benchy, from an environment of their own.


@pytest.fixture(scope="module")
def pocket_url():
    limits = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "64000000")
    with launched(str(POCKET), "--served-model-name", "pocket", "--dtype", "float32", *limits) as url:
        yield url


def run_client(name, *arguments, home, cwd=ROOT):
    """What it said. Nothing but the server under test can be asked: caches are empty and the hub is shut."""
    assert (CLIENTS / name).exists(), f"{CLIENTS / name} is not there: `make conformance-test` makes it first"
    environment = {**os.environ, "HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [str(CLIENTS / name), *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def reference():
    """(model, tokenizer) of transformers."""
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(POCKET)


def likelihood(reference, question, answer):
    """(nats, whether every token of the answer is the likeliest)."""
    model, tokenizer = reference
    num_asked, ids = len(tokenizer(question).input_ids), tokenizer(question + answer).input_ids
    logprobs = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    places = range(num_asked, len(ids))
    total = sum(logprobs[place - 1, ids[place]].item() for place in places)
    return total, all(logprobs[place - 1].argmax() == ids[place] for place in places)


def first_line(reference, prompt):
    """What greedy decoding goes on with, up to the end of the line or sixteen tokens."""
    model, tokenizer = reference
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=16, do_sample=False, temperature=None, top_p=None, top_k=None)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]


def samples(directory, task):
    (path,) = directory.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.conformance
@pytest.mark.parametrize("as_ids", [True, False])
def test_lm_eval_measures_what_transformers_computes(pocket_url, reference, tmp_path, as_ids):
    model = {
        "model": "pocket",
        "base_url": f"{pocket_url}/v1/completions",
        "tokenizer": POCKET,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": as_ids,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    run_client(
        "lm-eval",
        *("run", "--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in model.items())),
        *("--tasks", "likelihood,generation", "--include_path", str(HERE / "lm_eval")),
        *("--batch_size", "2", "--log_samples", "--output_path", str(tmp_path)),
        home=tmp_path / "home",
        cwd=HERE / "lm_eval",
    )
    read, written = samples(tmp_path, "likelihood"), samples(tmp_path, "generation")
    assert (len(read), len(written)) == (3, 2)
    for sample in read:
        for asked, ((nats, is_greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            expected, is_likeliest = likelihood(reference, asked["arg_0"], asked["arg_1"])
            assert float(nats) == pytest.approx(expected, abs=ROUNDING_OF_THE_CACHE)
            assert is_greedy == str(is_likeliest)
    for sample in written:
        assert sample["resps"] == [[first_line(reference, sample["doc"]["prompt"])]]


@contextmanager
def book():
    """The URL of a text; llama-benchy takes its prompts from one."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT / "docs")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/architecture.md"
        server.shutdown()


@pytest.mark.conformance
def test_llama_benchy_finishes_with_figures_of_whole_answers(pocket_url, tmp_path):
    result, progress = tmp_path / "result.json", tmp_path / "progress.jsonl"
    with book() as text_url:
        run_client(
            "llama-benchy",
            *("--base-url", f"{pocket_url}/v1", "--model", "pocket", "--tokenizer", str(POCKET)),
            *("--pp", "64", "--tg", "16", "--depth", "0", "96", "--concurrency", "1", "2", "--runs", "1"),
            *("--exact-tg", "--no-cache", "--no-results-on-fail", "--skip-coherence", "--book-url", text_url),
            *("--format", "json", "--save-result", str(result), "--emit-progress", str(progress)),
            home=tmp_path,
        )
    benchmarks = json.loads(result.read_text())["benchmarks"]
    assert [(row["context_size"], row["concurrency"]) for row in benchmarks] == [(0, 1), (0, 2), (96, 1), (96, 2)]
    for row in benchmarks:
        assert row["pp_throughput"]["mean"] > 0
        assert row["tg_throughput"]["mean"] > 0
    ends = [e for e in map(json.loads, progress.read_text().splitlines()) if e["type"] == "request_end"]
    assert [end["error"] for end in ends] == [""] * 6
    # It counts tokens that show as text; marks at the very end do not.
    assert all(12 <= end["total_tokens"] <= 16 for end in ends), ends
