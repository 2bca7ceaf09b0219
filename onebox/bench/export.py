"""Export of a run as llama-benchy's JSON or as `vllm bench serve`'s JSON.

Field names are those of the tool; each figure is computed from the requests of the record. A field for which the record
has no figure is null or omitted, never invented.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from onebox.bench.benchy import BENCHY_SPEEDS, BENCHY_TIMES, benchy_values, peak_tok_s
from onebox.bench.figures import CONTEXT_LABEL, percentile
from onebox.bench.record import RequestRecord, Role, Run, WorkloadKind, WorkloadRecord
from onebox.bench.timing import gaps_s, tpot_s
from onebox.spec.errors import UsageError

__all__ = ["as_llama_benchy", "as_vllm_bench"]


def as_llama_benchy(run: Run) -> dict[str, Any]:
    """The cells of a sweep as `llama-benchy --format json` writes them."""
    cells = [workload for workload in run.workloads if workload.kind is WorkloadKind.SWEEP and workload.requests]
    if not cells:
        raise UsageError(
            "llama-benchy's format holds the cells of a sweep, and this run has none; see `onebox bench sweep`."
        )
    runs = []
    for cell in cells:
        loads = [request for request in cell.measured if request.label == CONTEXT_LABEL]
        if loads:
            runs.append(_benchy_run(cell, loads, is_load=True))
        runs.append(_benchy_run(cell, [r for r in cell.measured if r.label != CONTEXT_LABEL], is_load=False))
    return {
        "version": f"onebox {run.versions.get('onebox', '')}".strip(),
        "timestamp": run.started,
        "latency_mode": "api" if any("latency_s" in cell.settings for cell in cells) else "none",
        "latency_ms": 1000 * max(cell.settings.get("latency_s", 0.0) for cell in cells),
        "model": run.server.model,
        "prefix_caching_enabled": any(cell.settings["depth"] for cell in cells),
        "max_concurrency": max(cell.settings["concurrency"] for cell in cells),
        "benchmarks": runs,
    }


def _benchy_run(cell: WorkloadRecord, requests: Sequence[RequestRecord], *, is_load: bool) -> dict[str, Any]:
    settings = cell.settings
    size = settings["depth"] if is_load else settings["prompt"]
    values = benchy_values(requests, size, settings["concurrency"], settings.get("latency_s", 0.0))
    names = {"pp": "pp_throughput", "tg": "tg_throughput", "peak": "peak_throughput"}
    names |= {f"{name}_req": f"{name}_req_throughput" for name in names}
    return {
        "concurrency": settings["concurrency"],
        "context_size": settings["depth"],
        "prompt_size": settings["prompt"],
        "response_size": settings["answer"],
        "is_context_prefill_phase": is_load,
        **{names[name]: _metric(values[name]) for name in BENCHY_SPEEDS},
        **{name: _metric([value * 1000 for value in values[name]]) for name in BENCHY_TIMES},
        "throughput_over_time": None,
        "requests_throughput_over_time": None,
    }


def _metric(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    return {"mean": statistics.fmean(values), "std": statistics.pstdev(values), "values": list(values)}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def as_vllm_bench(run: Run, name: str | None = None) -> dict[str, Any]:
    """One load of a run, selected by name, as `vllm bench serve --save-result --save-detailed` writes it."""
    loads = {
        workload.name: workload
        for workload in run.workloads
        if workload.kind is WorkloadKind.LOAD and workload.measured
    }
    if name is None and len(loads) == 1:
        name = next(iter(loads))
    if name not in loads:
        offered = f"name one with --load: {', '.join(loads)}" if loads else "this run has none; see `onebox bench load`"
        raise UsageError(f"vllm bench's format holds one load; {offered}.")
    load = loads[name]
    sent = [request for request in load.requests if request.role is not Role.WARM_UP]
    good = load.measured
    return {
        "date": run.started.replace("-", "").replace(":", "").replace("T", "-")[:15],
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": load.name,
        "model_id": run.server.model,
        "tokenizer_id": run.server.model,
        "num_prompts": len(sent),
        "request_rate": load.settings.get("rate") or "inf",
        "burstiness": 1.0,
        "max_concurrency": load.settings["concurrency"] if load.settings.get("rate") is None else None,
        **_vllm_totals(load, sent, good),
        **_vllm_lists(sent),
        **_vllm_times("ttft", _known(request.first_s for request in good)),
        **_vllm_times("tpot", _known(map(tpot_s, good))),
        **_vllm_times("itl", [gap for request in good for gap in gaps_s(request)]),
        **_vllm_times("e2el", [request.total_s for request in good]),
        **_vllm_drafts(load),
    }


def _vllm_totals(load: WorkloadRecord, sent: Sequence[RequestRecord], good: Sequence[RequestRecord]) -> dict[str, Any]:
    duration = load.duration_s
    prompts = _known(request.prompt_tokens for request in good)
    read = sum(prompts) if len(prompts) == len(good) else None
    made = sum(request.completion_tokens or 0 for request in good)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(sent) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(good) / duration,
        "request_goodput": load.figures.get("goodput_req_s"),
        "output_throughput": made / duration,
        "total_token_throughput": None if read is None else (read + made) / duration,
        "max_output_tokens_per_s": peak_tok_s(good),
        "max_concurrent_requests": _most_at_once(sent),
    }


def _vllm_lists(sent: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [request.prompt_tokens for request in sent],
        "output_lens": [(request.completion_tokens or 0) if request.is_ok else 0 for request in sent],
        "ttfts": [request.first_s or 0.0 for request in sent],
        "itls": [gaps_s(request) for request in sent],
        "start_times": [request.start_s for request in sent],
        "errors": [
            f"{request.failure.reason}: {request.failure.message}" if request.failure else "" for request in sent
        ],
    }


def _vllm_times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = [second * 1000 for second in seconds]
    shares = {f"p{share}_{name}_ms": percentile(values, share) for share in (50, 95, 99)}
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **shares,
    }


def _vllm_drafts(load: WorkloadRecord) -> dict[str, Any]:
    found = load.acceptance
    if found is None:
        return {}
    drafts: dict[str, Any] = {
        "spec_decode_acceptance_rate": found.rate * 100,
        "spec_decode_draft_tokens": found.drafted,
        "spec_decode_accepted_tokens": found.accepted,
        "spec_decode_per_position_acceptance_rates": list(found.by_position),
    }
    if found.num_drafts:
        drafts["spec_decode_num_drafts"] = found.num_drafts
        drafts["spec_decode_acceptance_length"] = 1 + found.accepted / found.num_drafts
    return drafts


def _most_at_once(sent: Sequence[RequestRecord]) -> int:
    changes = sorted(
        itertools.chain(((r.start_s, 1) for r in sent), ((r.start_s + r.total_s, -1) for r in sent)),
        key=lambda change: (change[0], change[1]),
    )
    return max(itertools.accumulate((step for _, step in changes), initial=0), default=0)
