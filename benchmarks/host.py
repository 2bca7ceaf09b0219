"""What the host adds to a decode step, measured without a GPU: the real engine over graphs that compute nothing.

    python benchmarks/host.py [--device-us 1500] [--tokens 1000] [--rows plain,mtp2,...] [--parts]

Engine, scheduler, runner and graph decoder are the real ones. The graphs are fakes: a step's first one keeps a fake
device busy for a time, and reading the outcome waits for it, without the interpreter's lock, as CUDA does. Every draft
is accepted. What counts is the time from reading the outcome to queueing the next step's sampling: the device computes
that step's forward pass meanwhile, where it was predicted, and is idle where it was not. CUDA's own calls (a copy
each way, two launches, the wait) come on top. Medians over the run, tenth percentiles beside
them because other work may share the machine; `--parts` prints the medians by part, on a slower run. The last line is
JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.engine import graphs, inputs, runner
from onebox.engine.api import Engine, EngineConfig, Failed, Request, SamplingParams, SpeculationConfig
from onebox.engine.batch import decode_inputs
from onebox.engine.config import SpeculationMethod
from onebox.engine.decode import Forwarded, OutcomeLayout
from onebox.engine.scheduler import Scheduler
from onebox.engine.step import PromptChunk, Result
from onebox.spec.kv import PAGE_TOKENS

VOCAB_SIZE = 248_320
WARM_STEPS = 20
LEAST_TOKENS = 250
"""Fifty steps of five tokens."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    streams: int = 1
    context: int = 32
    drafts: int = 0
    method: SpeculationMethod = SpeculationMethod.NONE


ROWS = [
    Row("plain"),
    Row("mtp2", drafts=2, method=SpeculationMethod.MTP),
    Row("auto4", drafts=4, method=SpeculationMethod.AUTO),
    Row("plain-8k", context=8000),
    Row("plain-x4", streams=4),
    Row("mtp2-x4", streams=4, drafts=2, method=SpeculationMethod.MTP),
    Row("mtp2-x16", streams=16, drafts=2, method=SpeculationMethod.MTP),
]


@dataclass
class Device:
    """Busy for a while after each launch; stands in for a CUDA event, too."""

    busy_s: float
    free_at: float = 0.0
    """When all that was launched will be done."""
    done_at: float = 0.0
    """When what was launched before the last record will be done."""
    queued: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    def launch(self) -> None:
        self.free_at = max(self.free_at, time.perf_counter()) + self.busy_s

    def record(self) -> None:
        self.queued.append(time.perf_counter())
        self.done_at = self.free_at

    def synchronize(self) -> None:
        while time.perf_counter() < self.done_at:
            zlib.crc32(_BLOCK)  # lets go of the interpreter's lock, and keeps the core
        self.read.append(time.perf_counter())

    def host_us(self) -> list[float]:
        """Of each step, from its outcome to the next one's drawing."""
        pairs = zip(self.read, self.queued[1:], strict=False)
        return [(queued - read) * 1e6 for read, queued in pairs][WARM_STEPS:]


_BLOCK = bytes(50_000)


class Graph:
    """Replays as what it is given."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class EmptyGraphs(graphs.GraphDecoder):
    """The real decoder over graphs, whose outcome accepts every row."""

    def __init__(self, device: Device) -> None:
        self._shapes = {}
        self._done: Any = device
        self._last = None
        self._folded = set()

    def _capture(self, sizes: inputs.StepSizes) -> graphs._Shape:
        packer, forward = inputs.InputPacker(sizes), Graph(self._done.launch)
        forwarded = Forwarded(torch.empty(sizes.num_rows, 1), torch.empty(sizes.num_rows, 1))
        shape = graphs._Shape(sizes, packer, packer.words.clone(), forward, forwarded)
        self._shapes[sizes] = shape
        return shape

    def _capture_sampling(self, shape: graphs._Shape, depth: int) -> None:
        layout = OutcomeLayout(shape.sizes.num_rows, shape.sizes.num_sequences, depth)
        words = torch.ones(layout.size, dtype=torch.int64)
        outcome, pinned = layout.split(words), words.clone()
        cu_rows = decode_inputs(shape.packer.words, shape.sizes).batch.cu_rows

        def replay() -> None:
            outcome.num_accepted[:] = cu_rows.diff()

        shape.sampling[depth] = graphs._SamplingGraph(Graph(replay), layout, words, outcome, pinned, pinned.numpy())


class EmptyRunner(runner.ModelRunner):
    """The real runner without a model; prompts cost nothing."""

    def __init__(self, device: Device) -> None:
        self._graphs = EmptyGraphs(device)
        self._memory: Any = self

    vocab_size = VOCAB_SIZE

    def clear(self, slot: int) -> None:
        """As the memory would."""

    def _run_chunks(self, chunks: tuple[PromptChunk, ...]) -> tuple[Result | Exception, ...]:
        return tuple(Result((1,), 0, (1,) * chunk.draw.depth) if chunk.draw else Result() for chunk in chunks)


def measure(row: Row, device_us: float, num_tokens: int) -> dict[str, Any]:
    device = Device(device_us / 1e6)
    length = row.context + num_tokens
    config = EngineConfig(
        max_model_len=length,
        num_pages=row.streams * (length // PAGE_TOKENS + 2),
        max_num_seqs=row.streams,
        max_num_batched_tokens=8192,
        speculation=SpeculationConfig(row.method, row.drafts),
    )
    sampling = SamplingParams(temperature=0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    prompts = [tuple((7 * i * i + 11 * stream) % 5000 for i in range(row.context)) for stream in range(row.streams)]
    with Engine(EmptyRunner(device), config) as engine:
        handles = engine.submit_all(
            [Request(str(stream), prompt, sampling, cache_prompt=False) for stream, prompt in enumerate(prompts)]
        )
        for handle in handles:
            *_, last = handle
            if isinstance(last, Failed):
                raise RuntimeError(last.message)
    host = device.host_us()
    return {
        "row": row.name,
        "streams": row.streams,
        "context": row.context,
        "drafts": row.drafts,
        "steps": len(host),
        "host_us": round(statistics.median(host), 1),
        "host_us_p10": round(statistics.quantiles(host, n=10)[0], 1),
    }


def time_parts() -> dict[str, list[float]]:
    """From now on the parts' microseconds are recorded by name."""
    parts = [
        *((Scheduler, name) for name in ("commit", "expire", "plan", "stats", "observe")),
        *((Engine, name) for name in ("_take_requests", "_send")),
        (EmptyGraphs, "start"),
        (inputs.InputPacker, "pack"),
        (runner, "_result"),
    ]
    times_by_name: dict[str, list[float]] = {}
    for owner, name in parts:
        times = times_by_name[f"{owner.__name__.split('.')[-1]}.{name}"] = []
        setattr(owner, name, _timed(getattr(owner, name), times))
    return times_by_name


def _timed(work: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = work(*args, **kwargs)
        times.append((time.thread_time() - began) * 1e6)
        return result

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-us", type=float, default=1500, help="how long the device computes a step")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens a stream")
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS))
    parser.add_argument("--parts", action="store_true", help="also print the time of each part of a step")
    arguments = parser.parse_args()
    graphs.next_inputs = lambda *_: None  # the device's work
    names = arguments.rows.split(",")
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    if arguments.tokens < LEAST_TOKENS:
        parser.error(f"--tokens is {arguments.tokens}; medians need at least {LEAST_TOKENS}")
    parts = time_parts() if arguments.parts else {}
    rows = []
    for row in (row for row in ROWS if row.name in names):
        rows.append(measure(row, arguments.device_us, arguments.tokens))
        print(json.dumps(rows[-1]), flush=True)
        for name, times in parts.items():
            calls = len(times) / (rows[-1]["steps"] + WARM_STEPS)
            print(f"  {statistics.median(times):7.1f} us  {calls:4.1f} a step  {name}")
            times.clear()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({**versions, "device_us": arguments.device_us, "rows": rows}))


if __name__ == "__main__":
    main()
