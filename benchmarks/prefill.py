"""Times the prefill of one prompt at full size with random weights on one GPU, through the real engine.

    python benchmarks/prefill.py [--shape qwen3.5-122b-a10b] [--tokens 8000 ...] [--runs 5] [--profile]

`--tokens 8000 512 --runs 1 --profile` tells within half a minute (kernels cached) where the time of both goes.

The weights are those of `onebox bench decode`: INT4 experts and projections, FP8 shared expert, INT8 head. A run's time
is that from submitting the prompt to its first token, scheduler and drawing included; the first run compiles and is
told apart.
`--profile` prints GPU time by kernel, with the arithmetic of the matrix products over that time, and how long the GPU
had nothing to do between the first kernel and the last. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.engine.api import Engine
from onebox.lab.decode import DecodeRow, generate, open_engine, random_model
from onebox.spec.model import ModelSpec
from onebox.spec.shapes import named_spec


def operations(spec: ModelSpec, tokens: int) -> dict[str, float]:
    """Multiplications and additions of a prefill's matrix products, by what a kernel's name begins with."""
    hidden, layers = spec.hidden_size, spec.num_hidden_layers
    attention_dim = spec.num_attention_heads * spec.head_dim
    kv_dim = spec.num_key_value_heads * spec.head_dim
    delta = hidden * (spec.conv_dim + spec.value_dim) + spec.value_dim * hidden
    attention = hidden * (2 * attention_dim + 2 * kv_dim) + attention_dim * hidden
    pairs = tokens * spec.num_experts_per_tok
    inner, shared = spec.moe_intermediate_size, spec.shared_expert_intermediate_size
    small = layers * (3 * hidden * shared + hidden * (spec.num_experts + 1))
    small += len(spec.linear_layers) * hidden * 2 * spec.linear_num_value_heads
    return {
        "matmul": 2 * tokens * (len(spec.linear_layers) * delta + len(spec.full_layers) * attention),
        "experts_prefill_gate_up": 2 * pairs * layers * 2 * hidden * inner,
        "experts_prefill_down": 2 * pairs * layers * hidden * inner,
        "float_linear_kernel": 2 * tokens * small,
        "paged_attention_prefill": 2 * tokens * tokens * attention_dim * len(spec.full_layers),
    }


def profile(engine: Engine, row: DecodeRow, spec: ModelSpec) -> list[dict]:
    """GPU time of one run by kernel, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        generate(engine, row, "profiled")
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    ranges = [event.time_range for event in profiler.events() if event.self_device_time_total]
    span = max(found.end for found in ranges) - min(found.start for found in ranges)
    calls = sum(event.count for event in events)
    print(f"profile of {row.context} tokens: {total / 1e3:.1f} ms of {calls} kernels and copies in {span / 1e3:.1f} ms")
    known, rows = operations(spec, row.context), []
    for event in events[:24]:
        taken = event.self_device_time_total
        work = sum(count for name, count in known.items() if event.key.startswith(name))
        rows.append({"kernel": event.key[:70], "calls": event.count, "ms": round(taken / 1e3, 2)})
        rows[-1]["tflops"] = round(work / taken / 1e6, 1)
        rate = f"{rows[-1]['tflops']:6.1f} TFLOP/s" if work else ""
        print(f"  {taken / 1e3:8.2f} ms {taken / total:6.1%} {event.count:5d} calls  {event.key[:70]:70s} {rate}")
    return rows


def measure(engine: Engine, row: DecodeRow, spec: ModelSpec, arguments: argparse.Namespace) -> dict:
    """Times a prompt and, if asked, profiles it."""
    work = sum(operations(spec, row.context).values()) / 1e12
    first = generate(engine, row, "first")[0]
    times = [generate(engine, row, f"run{run}")[0] for run in range(arguments.runs)]
    median = statistics.median(times)
    print(
        f"{row.context} tokens, {work:.1f} TFLOP in matrix products: first {first:.2f} s, then "
        f"{[round(t, 4) for t in times]}: median {median:.4f} s, {work / median:.0f} TFLOP/s",
        flush=True,
    )
    kernels = profile(engine, row, spec) if arguments.profile else []
    result = {"tokens": row.context, "first_s": round(first, 2), "median_s": round(median, 4)}
    return {**result, "tflop": round(work, 1), "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-122b-a10b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    spec = named_spec(arguments.shape)
    model = random_model(spec)
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(versions, flush=True)
    rows = [DecodeRow("prefill", context=tokens, num_tokens=1) for tokens in arguments.tokens]
    with open_engine(model, max(rows, key=lambda row: row.context)) as engine:
        results = [measure(engine, row, spec, arguments) for row in rows]
    print(json.dumps({"shape": arguments.shape, **versions, "prompts": results}))


if __name__ == "__main__":
    main()
