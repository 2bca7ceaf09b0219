"""Clients that load an engine: one request after the other, until the time is over."""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from onebox.engine.client import EngineClient
from onebox.engine.request import Failed, Request, SamplingParams, Tokens

__all__ = ["LoadClient", "quantiles", "serve"]


_PROMPT_TOKENS = (10, 20_000)
_ANSWER_TOKENS = (16, 300)


class LoadClient:
    """Sends requests that differ in all ways, and notes its waits.

    Prompts of 10 to 20,000 tokens (log-uniform), answers of 16 to 300, a fifth of them aborted, and a tenth with
    log-probabilities or penalties.
    """

    def __init__(self, engine: EngineClient, number: int, vocab_size: int) -> None:
        self._engine = engine
        self._number = number
        self._draw = random.Random(number)  # noqa: S311 - a load, not a secret
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
        num_prompt = int(math.exp(draw.uniform(*map(math.log, _PROMPT_TOKENS))))
        prompt = tuple(draw.randrange(self._vocab_size) for _ in range(num_prompt))
        max_tokens = draw.randint(*_ANSWER_TOKENS)
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


def serve(clients: list[LoadClient], seconds: float, every_s: float, report: Callable[[float], None]) -> None:
    """Runs the clients; what one of them raises is raised. `report` gets the seconds so far, each `every_s`."""
    began = time.time()
    with ThreadPoolExecutor(len(clients)) as pool:
        running = {pool.submit(client.run, began + seconds) for client in clients}
        while running:
            done, running = wait(running, timeout=every_s, return_when=FIRST_EXCEPTION)
            for client in done:
                client.result()
            if running:
                report(time.time() - began)


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    places = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("worst", 1.0))
    return {name: round(ordered[int(place * (len(ordered) - 1))], 4) for name, place in places}
