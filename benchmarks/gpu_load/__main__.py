"""`python -m benchmarks.gpu_load`: see the package."""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import benchmarks.gpu_load
from benchmarks.gpu_load.clients import Client, quantiles, serve
from benchmarks.gpu_load.steps import Notes, TimedStarter, late_steps, longest_between, read_notes
from onebox.engine.remote.messages import DeviceMemory, Planned, Progress, StartPhase
from onebox.engine.remote.parent import EngineProcess
from onebox.engine.request import Request, SamplingParams
from onebox.engine.start import EngineOptions, TokenInfo
from onebox.spec.hardware import GIB
from onebox.spec.shapes import SHAPES

BEGAN = time.time()


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def start(options: EngineOptions, directory: Path, notes: Path) -> tuple[EngineProcess, dict[str, Any]]:
    """The engine, ready, and its start: seconds of each phase, memory in use and planned."""
    phases: dict[str, Any] = {}

    def report(progress: Progress) -> None:
        if isinstance(progress, StartPhase):
            phases[progress.name] = round(progress.seconds, 2)
        elif isinstance(progress, DeviceMemory):
            phases["used_gib"], phases["planned_gib"] = map(gib, progress)
        elif isinstance(progress, Planned):
            phases["plan_gib"] = {part.name: gib(part.bytes) for part in progress.memory.parts}

    engine = EngineProcess(TimedStarter(directory, options, TokenInfo(), notes=notes), report)
    engine.wait_ready()
    phases["ready"] = round(time.time() - BEGAN, 2)
    return engine, phases


def run_alone(engine: EngineProcess) -> None:
    alone = Request("alone", tuple(range(32)), SamplingParams(temperature=0, max_tokens=128, ignore_eos=True))
    for _ in engine.submit(alone):
        pass


def found(notes: Notes, clients: list[Client], seconds: float, alone_from: float) -> dict[str, Any]:
    steps = [step for step in notes.steps if step.began < alone_from]
    decode_s = [step.seconds for step in notes.steps if step.began >= alone_from and not step.num_prompt]
    late = late_steps(steps)
    return {
        "seconds": seconds,
        "requests": sum(len(client.first_s) for client in clients),
        "tokens_per_s": round(sum(client.num_tokens for client in clients) / seconds, 1),
        "failures": [message for client in clients for message in client.failures][:3],
        "first_token_s": quantiles([value for client in clients for value in client.first_s]),
        "between_tokens_s": quantiles([value for client in clients for value in client.gaps_s]),
        "one_stream_step_ms": round(1e3 * statistics.median(decode_s), 3),
        "steps": len(steps),
        "late_steps": [(round(beyond, 4), *step[2:]) for beyond, step in late[:10]],
        "num_late_steps": len(late),
        "longest_between_steps_s": [round(value, 4) for value in longest_between(steps)],
        "kernels_asked_for": notes.kernels,
        "used_at_ready_gib": gib(notes.used_bytes[0]),
        "highest_gib": gib(max(notes.used_bytes)),
        "segments_after_ready": notes.num_segments[-1] - notes.num_segments[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu_load",
        description=benchmarks.gpu_load.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-cache-dtype", default="bf16")
    given = parser.parse_args()
    options = EngineOptions(load_format="dummy", max_num_seqs=given.max_num_seqs, kv_cache_dtype=given.kv_cache_dtype)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        notes = Path(name) / "steps"
        engine, phases = start(options, Path(name), notes)
        print(json.dumps({"start": phases}), flush=True)
        with engine:
            clients = [Client(engine, number, engine.planned.vocab_size) for number in range(given.clients)]
            serve(clients, given.seconds)
            alone_from = time.perf_counter()
            run_alone(engine)
        print(json.dumps(found(read_notes(notes), clients, given.seconds, alone_from)), flush=True)


if __name__ == "__main__":
    main()
