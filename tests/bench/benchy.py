"""Recorded cells of a sweep, and llama-benchy's own computation over them.

`golden_benchy.json` holds what `COMPUTE` printed under llama-benchy 0.4.0. `make conformance-test` computes it again.
"""

import json
import random
from pathlib import Path

from onebox.bench.figures import CONTEXT_LABEL
from onebox.bench.record import RequestRecord, Role, WorkloadKind, WorkloadRecord

GOLDEN = Path(__file__).with_name("golden_benchy.json")
LATENCY_S = 0.0042


def recorded_request(draw, prompt_tokens, answer, run, *, with_ids, label="cell"):
    """An answer in steps of one to four tokens and 5 to 60 ms, some as two events in one write."""
    arrivals, tokens, clock, left = [], [], draw.uniform(0.1, 0.9), answer
    responded = clock - draw.uniform(0, 0.05)
    while left:
        made = min(draw.choice((1, 1, 2, 3, 4)), left)
        arrivals.append(clock)
        tokens.append(made)
        clock += draw.uniform(0.005, 0.06)
        left -= made
    return RequestRecord(
        Role.LOAD,
        draw.uniform(0, 0.2) + 10 * run,
        clock,
        tuple(arrivals),
        tuple(tokens) if with_ids else (),
        prompt_tokens,
        answer,
        "usage",
        run=run,
        label=label,
        responded_s=responded,
        arrival_chars=() if with_ids else tuple(4 * made for made in tokens),
    )


def recorded_cells():
    """Cells alone and concurrent, on a context and without, with token ids and without."""
    draw = random.Random(11)
    found = []
    for depth, concurrency, with_ids in ((0, 1, True), (0, 3, True), (1024, 2, True), (0, 1, False)):
        prompt, answer = 256, 90
        settings = {"prompt": prompt, "answer": answer, "depth": depth, "concurrency": concurrency}
        requests = []
        for run in range(3):
            for _ in range(concurrency):
                if depth:
                    requests.append(recorded_request(draw, depth, 1, run, with_ids=with_ids, label=CONTEXT_LABEL))
                requests.append(recorded_request(draw, depth + prompt, answer, run, with_ids=with_ids))
        name = f"pp{prompt} tg{answer} d{depth} c{concurrency}{'' if with_ids else ' without ids'}"
        settings |= {"latency_s": LATENCY_S}
        found.append(WorkloadRecord(name, WorkloadKind.SWEEP, settings, tuple(requests), 30.0))
    return found


def as_input(cells):
    """The cells for `COMPUTE`."""
    return json.dumps(
        [
            {
                **cell.settings,
                "requests": [
                    {
                        "is_context": request.label == CONTEXT_LABEL,
                        "run": request.run,
                        "start": request.start_s,
                        "total": request.total_s,
                        "arrivals": request.arrivals_s,
                        "tokens": request.arrival_tokens or None,
                        "responded": request.responded_s,
                        "prompt_tokens": request.prompt_tokens,
                        "made": request.completion_tokens,
                    }
                    for request in cell.requests
                ],
            }
            for cell in cells
        ]
    )


COMPUTE = """
import json, sys
from llama_benchy.client import LLMClient, RequestResult
from llama_benchy.results import BenchmarkMetadata, BenchmarkResults

client, results = LLMClient("http://x", "", "tiny"), BenchmarkResults()

def result(told):
    at = told["start"]
    made = RequestResult(start_ts=at, end_ts=at + told["total"], prompt_tokens=told["prompt_tokens"])
    made.first_response_ts, made.first_token_ts = at + told["responded"], at + told["arrivals"][0]
    tokens = told["tokens"] or [None] * len(told["arrivals"])
    chunks = [
        {"text": "x", "timestamp": at + arrived, "token_ids": None if count is None else list(range(count))}
        for arrived, count in zip(told["arrivals"], tokens, strict=True)
    ]
    client._finalize_stream_tokens(made, chunks, told["made"])
    return made

cells = json.load(sys.stdin)
for cell in cells:
    for is_context in (True, False):
        chosen = [told for told in cell["requests"] if told["is_context"] is is_context]
        runs = [[result(told) for told in chosen if told["run"] == run] for run in sorted({t["run"] for t in chosen})]
        if runs:
            expected = cell["depth"] if is_context else cell["prompt"]
            sizes = (cell["prompt"], cell["answer"], cell["depth"], cell["concurrency"])
            results.add("tiny", *sizes, runs, cell["latency_s"], expected, is_context_phase=is_context)
most = max(cell["concurrency"] for cell in cells)
results.metadata = BenchmarkMetadata(
    version="", timestamp="", latency_mode="api", latency_ms=0, model="tiny", prefix_caching_enabled=True,
    max_concurrency=most,
)
lines = results._generate_md_report(most).splitlines()[2:]
table = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
sys.stdout.write("\\n" + json.dumps({"runs": [run.model_dump() for run in results.runs], "table": table}))
"""
