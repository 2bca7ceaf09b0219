"""The fleet's simulation against a real run: three servers of the pocket model behind vllm-router, on this machine.

    python benchmarks/fleet_simulation.py [--rounds 3] [--users 9] [--requests 36]

Each round measures step times, runs the load, and measures again: other work on the machine changes all of them, so the
simulation gets the means of both measurements. The load is a closed loop of users with prompts and answers of fixed
lengths in turn, spread by round robin on both sides. Prints throughput and median waits, real and simulated, and their
ratios; exits with 1 where a median over the rounds is more than 20% off.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from onebox.fleet.config import read_fleet_config
from onebox.fleet.fleet import open_fleet
from onebox.fleet.process import free_ports
from onebox.fleet.simulation import simulate_clients
from onebox.fleet.step_times import StepTimes, measure_step_times
from onebox.fleet.study import figures_of
from onebox.fleet.traffic import Turn

LENGTHS = ((64, 48), (400, 64), (160, 96), (32, 32), (240, 64))
"""(prompt tokens, answer tokens) in turn; the median is one of those with 64, not a gap between two kinds."""
SLOTS = 4
LIMIT = 0.2
MEMBERS = 3


def write_config(directory: Path) -> Path:
    port, admin_port = free_ports(2)
    start = (
        f"{sys.executable} -m onebox.cli.main serve --port {{port}} --max-num-seqs {SLOTS} --max-model-len 2048 "
        '--kv-cache-memory-bytes 67108864 --disable-log-stats --speculative-config \'{\\"method\\": \\"none\\"}\''
    )
    lines = ["[fleet]", f"port = {port}", f"admin_port = {admin_port}", 'policy = "round_robin"']
    for number in range(MEMBERS):
        lines += ["[[member]]", f'name = "box-{number + 1}"', f'start = "{start}"']
    path = directory / "fleet.toml"
    path.write_text("\n".join(lines))
    return path


async def run_real(url: str, users: int, count: int, seed: int) -> dict[str, float]:
    """A closed loop: first-token and whole waits, and tokens per second."""
    draw = random.Random(seed)
    numbers = iter(range(count))
    firsts, wholes, made = [], [], 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        began = time.perf_counter()

        async def work() -> None:
            nonlocal made
            for number in numbers:
                prompt, answer = LENGTHS[number % len(LENGTHS)]
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

        await asyncio.gather(*(work() for _ in range(users)))
        span = time.perf_counter() - began
    return {
        "tokens_per_s": made / span,
        "first_p50_s": statistics.median(firsts),
        "total_p50_s": statistics.median(wholes),
    }


def run_simulated(times: StepTimes, users: int, count: int) -> dict[str, float]:
    """The same closed loop."""
    members = [replace(times, max_num_seqs=SLOTS, chunk_tokens=512, cache_tokens=0, answer_wait_s=None)] * MEMBERS
    turns = [Turn(0.0, *LENGTHS[number % len(LENGTHS)], session=number) for number in range(count)]
    figures = figures_of(
        simulate_clients(members, turns, users, "round_robin"), MEMBERS, "round_robin", times.request_s
    )
    return {name: getattr(figures, name) for name in ("tokens_per_s", "first_p50_s", "total_p50_s")}


def mean_times(first: StepTimes, second: StepTimes) -> StepTimes:
    both = {name: (getattr(first, name) + getattr(second, name)) / 2 for name in ("prompt_base_s", "prompt_token_s")}
    decode = {rows: (first.decode_s[rows] + second.decode_s[rows]) / 2 for rows in first.decode_s}
    request_s = (first.request_s + second.request_s) / 2
    tokens = (first.tokens_per_step + second.tokens_per_step) / 2
    return replace(first, decode_s=decode, request_s=request_s, tokens_per_step=tokens, **both)


async def compare(arguments: argparse.Namespace) -> int:
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        async with open_fleet(read_fleet_config(write_config(Path(name))), print) as fleet:
            urls, url = [member.url for member in fleet.members], fleet.config.url
            await run_real(url, arguments.users, arguments.users, seed=0)  # first-time work
            before = await measure_step_times(urls, (1, 2, 4))
            for turn in range(arguments.rounds):
                real = await run_real(url, arguments.users, arguments.requests, seed=turn + 1)
                after = await measure_step_times(urls, (1, 2, 4))
                times = mean_times(before, after)
                simulated = run_simulated(times, arguments.users, arguments.requests)
                rounds.append({key: (real[key], simulated[key]) for key in real})
                print(json.dumps({"round": turn + 1, "real": real, "simulated": simulated, "decode_s": times.decode_s}))
                before = after
    status = 0
    for key in rounds[0]:
        real, simulated = (statistics.median(each[key][side] for each in rounds) for side in range(2))
        ratio = simulated / real
        status |= abs(ratio - 1) > LIMIT
        print(f"{key:14} real {real:8.3f}  simulated {simulated:8.3f}  ratio {ratio:.2f}")
    return int(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=9)
    parser.add_argument("--requests", type=int, default=75)
    sys.exit(asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
