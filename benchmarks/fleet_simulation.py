"""The fleet's simulation against a real run: three servers of the pocket model behind vllm-router, on this machine.

    python benchmarks/fleet_simulation.py [--rounds 3] [--save FILE]

Each round measures the servers through their relays, as `onebox fleet simulate --measure` does, runs two loads, and
measures again: other work on the machine changes all of it, so the simulation is run with both measurements, with
several seeds, and the median counts. Neither load is the one that is measured with. Both are closed loops of users
with prompts (random tokens) and answers of fixed lengths in turn, spread by round robin on both sides: nine users, and
four with other lengths. Prints throughput and median waits, real and simulated, and their ratios; exits with 1 where a
median over the rounds is more than 20% off.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from onebox.fleet.config import read_fleet_config
from onebox.fleet.fleet import open_fleet
from onebox.fleet.measure import measure_step_times
from onebox.fleet.process import free_ports
from onebox.fleet.simulation import simulate_clients
from onebox.fleet.step_times import StepTimes
from onebox.fleet.study import figures_of
from onebox.fleet.traffic import Turn


@dataclass(frozen=True)
class Load:
    """Users who each send the next request when they have an answer."""

    name: str
    users: int
    count: int
    lengths: tuple[tuple[int, int], ...]
    """(prompt tokens, answer tokens) in turn."""

    def length(self, number: int) -> tuple[int, int]:
        return self.lengths[number % len(self.lengths)]


LOADS = (
    Load("nine users", 9, 75, ((64, 48), (400, 64), (160, 96), (32, 32), (240, 64))),
    Load("four users", 4, 40, ((120, 80), (300, 40), (200, 56))),
)
SEEDS = 9
SLOTS = 4
LIMIT = 0.2
MEMBERS = 3


def write_config(directory: Path) -> Path:
    port, admin_port = free_ports(2)
    start = (
        f"{sys.executable} -m onebox.cli.main serve --port {{port}} --max-num-seqs {SLOTS} --max-model-len 2048 "
        '--kv-cache-memory-bytes 33554432 --disable-log-stats --speculative-config \'{\\"method\\": \\"none\\"}\''
    )
    lines = ["[fleet]", f"port = {port}", f"admin_port = {admin_port}", 'policy = "round_robin"']
    for number in range(MEMBERS):
        lines += ["[[member]]", f'name = "box-{number + 1}"', f'start = "{start}"']
    path = directory / "fleet.toml"
    path.write_text("\n".join(lines))
    return path


async def run_real(url: str, load: Load, seed: int) -> dict[str, float]:
    """First-token and whole waits, and tokens per second."""
    draw = random.Random(seed)
    numbers = iter(range(load.count))
    firsts, wholes, made = [], [], 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        began = time.perf_counter()

        async def work() -> None:
            nonlocal made
            for number in numbers:
                prompt, answer = load.length(number)
                ids = [draw.randrange(300, 8000) for _ in range(prompt)]
                body = {"model": "pocket", "prompt": ids, "max_tokens": answer, "ignore_eos": True, "stream": True}
                sent, first = time.perf_counter(), None
                async with http.stream("POST", f"{url}/v1/completions", json=body | {"temperature": 0}) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if first is None and line.startswith("data: {"):
                            first = time.perf_counter()
                firsts.append((first or sent) - sent)
                wholes.append(time.perf_counter() - sent)
                made += answer

        await asyncio.gather(*(work() for _ in range(load.users)))
        span = time.perf_counter() - began
    return {
        "tokens_per_s": made / span,
        "first_p50_s": statistics.median(firsts),
        "total_p50_s": statistics.median(wholes),
    }


def run_simulated(measured: Sequence[StepTimes], load: Load) -> dict[str, float]:
    """The same load; medians over measurements and seeds."""
    turns = [Turn(0.0, *load.length(number), session=number) for number in range(load.count)]
    found = []
    for times in measured:
        # What the servers were started with; no prompt has been there before; on a CPU prompts are not paced.
        members = [replace(times, max_num_seqs=SLOTS, chunk_tokens=512, cache_tokens=0, answer_wait_s=None)] * MEMBERS
        for seed in range(SEEDS):
            requests = simulate_clients(members, turns, load.users, "round_robin", seed=seed)
            found.append(figures_of(requests, MEMBERS, "round_robin", times.request_s))
    names = ("tokens_per_s", "first_p50_s", "total_p50_s")
    return {name: statistics.median(getattr(figures, name) for figures in found) for name in names}


async def compare(arguments: argparse.Namespace) -> int:
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        async with open_fleet(read_fleet_config(write_config(Path(name))), print) as fleet:
            url = fleet.config.url
            await run_real(url, replace(LOADS[0], count=LOADS[0].users), seed=0)  # first-time work
            before = await measure_step_times(fleet.relay_urls, (1, 2, SLOTS))
            for turn in range(arguments.rounds):
                real = {load.name: await run_real(url, load, seed=turn + 1) for load in LOADS}
                after = await measure_step_times(fleet.relay_urls, (1, 2, SLOTS))
                rounds.append({"real": real, "measured": [asdict(before), asdict(after)]})
                simulated = {load.name: run_simulated([before, after], load) for load in LOADS}
                rounds[-1]["simulated"] = simulated
                print(json.dumps({"round": turn + 1, **rounds[-1]}), flush=True)
                before = after
    if arguments.save:
        arguments.save.write_text(json.dumps(rounds, indent=1))
    return max(summarise(load, rounds) for load in LOADS)


def summarise(load: Load, rounds: list[dict[str, Any]]) -> int:
    """1 where a median is more than LIMIT off."""
    status = 0
    for key in rounds[0]["real"][load.name]:
        real, simulated = (
            statistics.median(each[side][load.name][key] for each in rounds) for side in ("real", "simulated")
        )
        status |= abs(simulated / real - 1) > LIMIT
        print(f"{load.name:12} {key:14} real {real:8.3f}  simulated {simulated:8.3f}  ratio {simulated / real:.2f}")
    return int(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="where all figures are written, as JSON")
    sys.exit(asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
