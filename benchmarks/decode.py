"""Times the whole engine at full size with random weights on one GPU: scheduler, graphs, drawing and drafting included.

    python benchmarks/decode.py [--shape qwen3.5-122b-a10b] [--rows plain,mtp2,...] [--profile]

INT4 experts and projections, FP8 shared expert, INT8 head, INT4 MTP layer. Drafts are kept at synthetic rates (0.9 and
0.72 of the steps), because random weights agree on nothing. A step's time is that between the events of one stream,
medians over the run; the bytes a step must read and the speed of a plain copy tell how near it came. The last line is
JSON. `--profile` prints the GPU time of a plain step by kernel.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import copy_speed
from onebox.engine.api import (
    Engine,
    EngineConfig,
    Failed,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
    Tokens,
)
from onebox.engine.runner import ModelRunner
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.planner.presets import named_preset
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec
from onebox.spec.traffic import Routing, Step, step_traffic

PAGE = 64
ACCEPTANCE = (0.9, 0.72)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    streams: int = 1
    context: int = 32
    drafts: int = 0
    kv: str = "bf16"
    num_tokens: int = 128


ROWS = [
    Row("plain"),
    Row("mtp2", drafts=2, num_tokens=256),
    Row("plain-8k", context=8000),
    Row("mtp2-8k", context=8000, drafts=2, num_tokens=256),
    Row("plain-x4", streams=4),
    Row("mtp2-x4", streams=4, drafts=2, num_tokens=256),
    Row("plain-128k", context=128_000, num_tokens=48),
    Row("turboquant-128k", context=128_000, kv="turboquant", num_tokens=48),
    Row("fp8-128k", context=128_000, kv="fp8", num_tokens=48),
]


def open_engine(model: Qwen35, row: Row) -> Engine:
    drafts = row.drafts
    method = SpeculationMethod.MTP if drafts else SpeculationMethod.NONE
    speculation = SpeculationConfig(method, drafts, synthetic_acceptance=ACCEPTANCE[:drafts])
    length = row.context + row.num_tokens + 16
    pages = row.streams * (-(-length // PAGE) + 1)
    config = EngineConfig(
        max_model_len=length,
        num_pages=pages,
        max_num_seqs=row.streams,
        max_num_batched_tokens=8192,
        speculation=speculation,
    )
    shape = MemoryShape(KVFormat.parse(row.kv), pages + 1, row.streams, 0, 1 + drafts, speculation.with_mtp)
    with torch.inference_mode():
        memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    return Engine(ModelRunner(model, memory, config), config)


def generate(engine: Engine, row: Row, name: str) -> tuple[float, list[list[tuple[float, int]]]]:
    """(seconds to the first token, of each stream the times and sizes of its Tokens events)."""
    prompts = [tuple((7 * i * i + 3 * i + 11 * s) % 5000 for i in range(row.context)) for s in range(row.streams)]
    sampling = SamplingParams(temperature=0, seed=1, max_tokens=row.num_tokens, ignore_eos=True)
    began = time.perf_counter()
    handles = engine.submit_all(
        [Request(f"{name}-{s}", prompt, sampling, cache_prompt=False) for s, prompt in enumerate(prompts)]
    )
    told: list[list[tuple[float, int]]] = []
    for handle in handles:
        times = []
        for event in handle:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Tokens):
                times.append((time.perf_counter(), len(event.token_ids)))
        told.append(times)
    return told[0][0][0] - began, told


def measure(model: Qwen35, row: Row, ceiling: float) -> dict:
    with open_engine(model, row) as engine:
        began = time.perf_counter()
        generate(engine, row, "warm")
        warm = time.perf_counter() - began
        drafts_before = engine.stats().totals.drafts
        steps_before = engine.stats().totals.num_steps
        began = time.perf_counter()
        first, told = generate(engine, row, "run")
        total = time.perf_counter() - began
        stats = engine.stats().totals
    # The first stream is read while it is made; the others' events wait in their queues, so its times count.
    times = [at for at, _ in told[0]]
    steps = [later - earlier for earlier, later in pairwise(times)]
    made = sum(count for _, count in told[0][1:])
    num_steps = stats.num_steps - steps_before
    seconds = times[-1] - times[0]
    stored = named_preset("hybrid").weight_bytes(model.spec)
    step = Step(row.streams, row.drafts, row.context, drafter_is_mtp=row.drafts > 0)
    traffic = step_traffic(model.spec, stored, step, KVFormat.parse(row.kv), Routing.EXPECTED).total_bytes
    median = statistics.median(steps)
    return {
        "row": row.name,
        "streams": row.streams,
        "context": row.context,
        "kv": row.kv,
        "drafts": row.drafts,
        "step_ms": round(median * 1e3, 3),
        "tokens_per_second": round(row.streams * made / seconds, 1),
        "tokens_per_step": round(made / len(steps), 3),
        "bytes": traffic,
        "share_of_copy": round(traffic / ceiling / median, 3),
        "first_token_s": round(first, 4),
        "steps": num_steps,
        "drafted": stats.drafts.num_drafted - drafts_before.num_drafted,
        "first_run_s": round(warm, 2),
        "run_s": round(total, 3),
    }


def profile(model: Qwen35, row: Row) -> None:
    """GPU time of the steps of one run, by kernel."""
    with open_engine(model, row) as engine:
        generate(engine, row, "warm")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(engine, row, "run")
            torch.cuda.synchronize()
        steps = engine.stats().totals.num_steps / 2
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"profile of {row.name}: {total / steps / 1e3:.3f} ms of kernels a step (prefill included)")
    for event in events[:28]:
        share = event.self_device_time_total / total
        calls = event.count / steps
        print(f"  {event.self_device_time_total / steps:9.1f} us {share:6.1%} {calls:7.1f} calls  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-122b-a10b")
    parser.add_argument("--rows", default="plain,mtp2,plain-8k,mtp2-8k,plain-x4,mtp2-x4")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    chosen = [row for row in ROWS if row.name in arguments.rows.split(",")]
    ceiling = copy_speed()
    begin = time.perf_counter()
    with torch.inference_mode():
        model = dummy_model(named_spec(arguments.shape), HYBRID, torch.device("cuda"))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() / 1e9
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
        f"copy {ceiling / 1e12:.2f} TB/s; {held:.1f} GB of weights in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    rows = []
    for row in chosen:
        rows.append(measure(model, row, ceiling))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.profile:
            profile(model, row)
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"shape": arguments.shape, **versions, "copy_tb_per_s": round(ceiling / 1e12, 3), "rows": rows}))


if __name__ == "__main__":
    main()
