"""Mixed load on the whole engine on a GPU, from a cold start: what waits, and what memory grows.

    python benchmarks/gpu_load.py [--shape qwen3.5-122b-a10b] [--seconds 600] [--clients 12]

Starts an engine as `onebox serve` does (plan, kernels, weights, graphs, warm-up) with random weights, then lets clients
send prompts of 10 to 20,000 tokens (log-uniform) with answers of 16 to 300, a fifth of them aborted, and a tenth with
log-probabilities or penalties. Prints JSON: the phases of the start, device memory when ready and at its highest
afterwards, kernels compiled after "ready", the waits between tokens, and the steps that took longer than their work.

A step's work is known from its like: steps are grouped by their prompt tokens, rows and context, and a step is late if
it took 50 ms longer than the slowest tenth of its group. Time between two steps while requests run is a wait of its own.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

BEGAN = time.time()

import torch
import triton

from onebox.engine.api import Engine, EngineOptions, Failed, Request, SamplingParams, TokenInfo, Tokens
from onebox.engine.start import plan_engine, warm_runner
from onebox.spec.shapes import SHAPES

LATE_S = 0.05


class TimedRunner:
    """A runner that notes when each step begins and ends, and what it computes."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []
        self.vocab_size = runner.vocab_size

    def start(self, plan):
        chunk_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        context = max((chunk.end for chunk in plan.chunks), default=0)
        step = [time.perf_counter(), 0.0, chunk_tokens, context, sum(len(part.token_ids) for part in plan.rows)]
        run = self._runner.start(plan)
        steps = self.steps

        class Run:
            def finish(self):
                output = run.finish()
                step[1] = time.perf_counter()
                steps.append(step)
                return output

        return Run()


def used_bytes():
    free, total = torch.cuda.mem_get_info()
    return total - free


def client(engine, number, until, gaps, firsts, failures, vocab_size):
    draw = random.Random(number)
    count = 0
    while time.time() < until:
        count += 1
        num_prompt = int(math.exp(draw.uniform(math.log(10), math.log(20_000))))
        prompt = tuple(draw.randrange(vocab_size) for _ in range(num_prompt))
        kind = draw.random()
        sampling = SamplingParams(
            max_tokens=draw.randint(16, 300),
            ignore_eos=True,
            temperature=draw.choice([0.0, 0.8]),
            seed=draw.randrange(2**31),
            logprobs=5 if kind < 0.05 else None,
            repetition_penalty=1.1 if 0.05 <= kind < 0.1 else 1.0,
        )
        stop_after = draw.randint(1, sampling.max_tokens) if draw.random() < 0.2 else None
        name = f"{number}-{count}"
        began = last = time.perf_counter()
        num_tokens = 0
        for event in engine.submit(Request(name, prompt, sampling)):
            now = time.perf_counter()
            if isinstance(event, Failed):
                failures.append(event.message)
            if isinstance(event, Tokens):
                (gaps if num_tokens else firsts).append(now - (last if num_tokens else began))
                num_tokens += len(event.token_ids)
                last = now
                if stop_after is not None and num_tokens >= stop_after:
                    engine.abort(name)
                    stop_after = None


def late_steps(steps):
    """(steps that took longer than their like, waits between steps), seconds beyond and the step."""
    groups = defaultdict(list)
    for begin, end, tokens, context, rows in steps:
        groups[-(-tokens // 256), -(-context // 4096), -(-rows // 8)].append(end - begin)
    typical = {key: sorted(times)[int(0.9 * (len(times) - 1))] for key, times in groups.items()}
    late = []
    for begin, end, tokens, context, rows in steps:
        beyond = end - begin - typical[-(-tokens // 256), -(-context // 4096), -(-rows // 8)]
        if beyond > LATE_S:
            late.append([round(beyond, 4), tokens, context, rows, round(begin - steps[0][0], 1)])
    between = [
        [round(later[0] - earlier[1], 4), round(later[0] - steps[0][0], 1)]
        for earlier, later in pairwise(steps)
        if later[0] - earlier[1] > LATE_S
    ]
    return sorted(late, reverse=True), sorted(between, reverse=True)


def quantiles(values):
    ordered = sorted(values)
    return {
        name: round(ordered[int(q * (len(ordered) - 1))], 4)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("worst", 1))
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--kv-cache-dtype", default="bf16")
    given = parser.parse_args()
    phases = {"imports": round(time.time() - BEGAN, 2)}
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **known: compiled.append(known["fn"].name)

    def report(progress):
        if hasattr(progress, "seconds"):
            phases[progress.name] = round(progress.seconds, 2)
            print(
                progress.name, phases[progress.name], f"{torch.cuda.memory_reserved() / 2**30:.3f} GiB held", flush=True
            )
        elif hasattr(progress, "used_bytes"):
            phases["used_GiB"], phases["planned_GiB"] = (round(value / 2**30, 3) for value in progress)

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        options = EngineOptions(
            load_format="dummy",
            max_num_seqs=given.max_num_seqs,
            max_model_len=given.max_model_len,
            kv_cache_dtype=given.kv_cache_dtype,
        )
        plan = plan_engine(Path(name), options, TokenInfo())
        runner = TimedRunner(warm_runner(plan, report))
    phases["ready"] = round(time.time() - BEGAN, 2)
    print(
        json.dumps({"start": phases, "parts": {part.name: round(part.bytes / 2**30, 3) for part in plan.memory.parts}}),
        flush=True,
    )
    compiled.clear()
    at_ready = highest = used_bytes()
    held, segments = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["segment.all.allocated"]
    gaps, firsts, failures = [], [], []
    with Engine(runner, plan.config) as engine:
        until = time.time() + given.seconds
        arguments = (engine,), (until, gaps, firsts, failures, runner.vocab_size)
        threads = [
            threading.Thread(target=client, args=(*arguments[0], number, *arguments[1]))
            for number in range(given.clients)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            highest = max(highest, used_bytes())
        totals = engine.stats().totals
    late, between = late_steps(runner.steps) if runner.steps else ([], [])
    print(
        json.dumps(
            {
                "seconds": given.seconds,
                "tokens_per_s": round(totals.num_generated_tokens / given.seconds, 1)
                if hasattr(totals, "num_generated_tokens")
                else None,
                "requests": len(firsts),
                "failures": failures[:3],
                "gap_s": quantiles(gaps) if gaps else None,
                "first_token_s": quantiles(firsts) if firsts else None,
                "steps": len(runner.steps),
                "late_steps": len(late),
                "latest": late[:8],
                "waits_between_steps": len(between),
                "longest_between": between[:8],
                "compiled_after_ready": compiled,
                "used_at_ready_GiB": round(at_ready / 2**30, 3),
                "highest_GiB": round(highest / 2**30, 3),
                "torch_held_GiB": [round(held / 2**30, 3), round(torch.cuda.memory_reserved() / 2**30, 3)],
                "segments_allocated_after_ready": torch.cuda.memory_stats()["segment.all.allocated"] - segments,
                "median_decode_step_ms": round(
                    1e3 * statistics.median([e - b for b, e, t, _, _ in runner.steps if not t] or [0]), 2
                ),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
