"""Mixed load on the whole engine on a GPU, from a cold start: what waits, and what memory grows.

    python benchmarks/gpu_load.py [--shape qwen3.5-122b-a10b] [--seconds 600] [--clients 12]

Starts an engine as `onebox serve` does (plan, kernels, weights, graphs, warm-up) with random weights, then lets clients
send prompts of 10 to 20,000 tokens (log-uniform) with answers of 16 to 300, a fifth of them aborted, and a tenth with
log-probabilities or penalties. Prints JSON: the phases of the start; then device memory when ready and at its highest
afterwards, kernels that Triton was asked for after that, the waits between tokens, what waited without need, and the
median step of one stream alone.

A step's work is known from its like: steps are grouped by their prompt tokens, context and rows, and a step is late if
it took 50 ms longer than the slowest tenth of its group. Time between two steps while requests run is a wait, too.
"""

import argparse
import gc
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from onebox.engine.warm.early import initialise_cuda

BEGAN = time.time()
gc.disable()
initialise_cuda()

import torch
import triton

from onebox.engine.api import Engine, EngineOptions, Failed, Request, SamplingParams, TokenInfo, Tokens
from onebox.engine.start import plan_engine, warm_runner
from onebox.engine.step import StepOutput, StepPlan
from onebox.spec.hardware import GIB
from onebox.spec.shapes import SHAPES

LATE_S = 0.05


class Step(NamedTuple):
    """A step: when it began and ended, its prompt tokens, the end of its furthest chunk, its decode rows."""

    began: float
    ended: float
    num_prompt: int
    context: int
    num_rows: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def like(self) -> tuple[int, ...]:
        return -(-self.num_prompt // 256), -(-self.context // 4096), -(-self.num_rows // 8)


class TimedRun(NamedTuple):
    runner: "TimedRunner"
    run: Any
    plan: StepPlan
    began: float

    def finish(self) -> StepOutput:
        output: StepOutput = self.run.finish()
        chunks = self.plan.chunks
        num_prompt = sum(len(chunk.token_ids) for chunk in chunks)
        num_rows = sum(len(part.token_ids) for part in self.plan.rows)
        context = max((chunk.end for chunk in chunks), default=0)
        self.runner.steps.append(Step(self.began, time.perf_counter(), num_prompt, context, num_rows))
        return output


class TimedRunner:
    """A runner that notes each step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.steps: list[Step] = []
        self.vocab_size: int = runner.vocab_size

    def start(self, plan: StepPlan) -> TimedRun:
        began = time.perf_counter()
        return TimedRun(self, self._runner.start(plan), plan, began)


class Client:
    """Sends one request after the other, and notes its waits."""

    def __init__(self, engine: Engine, number: int, vocab_size: int) -> None:
        self._engine = engine
        self._number = number
        self._draw = random.Random(number)
        self._vocab_size = vocab_size
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_tokens = 0
        self.failures: list[str] = []

    def run(self, until: float) -> None:
        count = 0
        while time.time() < until:
            count += 1
            self._ask(f"{self._number}-{count}")

    def _ask(self, name: str) -> None:
        draw, kind = self._draw, self._draw.random()
        num_prompt = int(math.exp(draw.uniform(math.log(10), math.log(20_000))))
        prompt = tuple(draw.randrange(self._vocab_size) for _ in range(num_prompt))
        max_tokens = draw.randint(16, 300)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=draw.choice([0.0, 0.8]),
            seed=draw.randrange(2**31),
            logprobs=5 if kind < 0.05 else None,
            repetition_penalty=1.1 if 0.05 <= kind < 0.1 else 1.0,
        )
        self._read(name, prompt, sampling, draw.randint(1, max_tokens) if draw.random() < 0.2 else None)

    def _read(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams, abort_after: int | None) -> None:
        last, num_read = time.perf_counter(), 0
        for event in self._engine.submit(Request(name, prompt, sampling)):
            now = time.perf_counter()
            if isinstance(event, Failed):
                self.failures.append(event.message)
            if isinstance(event, Tokens):
                (self.gaps_s if num_read else self.first_s).append(now - last)
                last, num_read = now, num_read + len(event.token_ids)
                if abort_after is not None and num_read >= abort_after:
                    self._engine.abort(name)
                    abort_after = None
        self.num_tokens += num_read


def late_steps(steps: list[Step]) -> list[tuple[float, Step]]:
    """Steps that took longer than their like, with the seconds beyond, the latest first."""
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for step in steps:
        groups[step.like].append(step.seconds)
    slow = {like: sorted(times)[int(0.9 * (len(times) - 1))] for like, times in groups.items()}
    late = [(step.seconds - slow[step.like], step) for step in steps if step.seconds - slow[step.like] > LATE_S]
    return sorted(late, reverse=True)


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    places = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("worst", 1.0))
    return {name: round(ordered[int(place * (len(ordered) - 1))], 4) for name, place in places}


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@contextmanager
def dummy_checkpoint(shape: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[shape]))
        yield Path(name)


def start(options: EngineOptions, shape: str) -> tuple[TimedRunner, Any, dict[str, Any]]:
    phases: dict[str, Any] = {"imports": round(time.time() - BEGAN, 2)}

    def report(progress: Any) -> None:
        if hasattr(progress, "seconds"):
            phases[progress.name] = round(progress.seconds, 2)
        elif hasattr(progress, "used_bytes"):
            phases["used_gib"], phases["planned_gib"] = map(gib, progress)

    with dummy_checkpoint(shape) as directory:
        plan = plan_engine(directory, options, TokenInfo())
        runner = TimedRunner(warm_runner(plan, report, owns_process=True))
    gc.enable()
    gc.collect()
    gc.freeze()
    phases["ready"] = round(time.time() - BEGAN, 2)
    phases["plan_gib"] = {part.name: gib(part.bytes) for part in plan.memory.parts}
    return runner, plan.config, phases


def serve(clients: list[Client], seconds: float) -> int:
    """Runs the clients; the most device memory that was in use meanwhile."""
    until, highest = time.time() + seconds, used_bytes()
    threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        highest = max(highest, used_bytes())
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-cache-dtype", default="bf16")
    given = parser.parse_args()
    options = EngineOptions(load_format="dummy", max_num_seqs=given.max_num_seqs, kv_cache_dtype=given.kv_cache_dtype)
    runner, config, phases = start(options, given.shape)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "start": phases}), flush=True)
    asked_for: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **known: asked_for.append(known["fn"].name)
    at_ready, segments = used_bytes(), torch.cuda.memory_stats()["segment.all.allocated"]
    with Engine(runner, config) as engine:
        clients = [Client(engine, number, runner.vocab_size) for number in range(given.clients)]
        highest = serve(clients, given.seconds)
        num_served = len(runner.steps)
        alone = Request("alone", tuple(range(32)), SamplingParams(temperature=0, max_tokens=128, ignore_eos=True))
        for _ in engine.submit(alone):
            pass
    decode_s = [step.seconds for step in runner.steps[num_served:] if not step.num_prompt]
    del runner.steps[num_served:]
    late = late_steps(runner.steps)
    between = sorted((later.began - earlier.ended for earlier, later in pairwise(runner.steps)), reverse=True)
    found = {
        "seconds": given.seconds,
        "requests": sum(len(client.first_s) for client in clients),
        "tokens_per_s": round(sum(client.num_tokens for client in clients) / given.seconds, 1),
        "failures": [message for client in clients for message in client.failures][:3],
        "first_token_s": quantiles([seconds for client in clients for seconds in client.first_s]),
        "between_tokens_s": quantiles([seconds for client in clients for seconds in client.gaps_s]),
        "one_stream_step_ms": round(1e3 * statistics.median(decode_s), 3),
        "steps": len(runner.steps),
        "late_steps": [(round(beyond, 4), *step[2:]) for beyond, step in late[:10]],
        "num_late_steps": len(late),
        "longest_between_steps_s": [round(seconds, 4) for seconds in between[:5]],
        "kernels_asked_for": asked_for,
        "used_at_ready_gib": gib(at_ready),
        "highest_gib": gib(highest),
        "segments_after_ready": torch.cuda.memory_stats()["segment.all.allocated"] - segments,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
