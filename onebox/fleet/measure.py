"""What a member's steps take, measured over HTTP.

Servers that share a machine are measured with one of them at work, with two, and with all: what they take from each
other, and what clients and relays take from them, is in the figures. Prompts are measured beside running answers, as
they are computed under load.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from onebox.fleet.step_times import StepTimes
from onebox.spec.authorization import authorization
from onebox.spec.errors import OneboxError

__all__ = ["measure_step_times"]

_ANSWER_TOKENS = 128
_PROMPT_WORDS = (24, 96, 256)
"""Short enough for one step where a step takes 512 tokens, with a tokenizer that makes two of a word."""
_PASSES = 3
_ROUNDS = 2
"""Of all lengths, in each pass."""
_NUM_BESIDE = 2
"""Answers that run while prompts are measured: a server that runs three at once has a place left."""
_WORDS = "the river ran past the old mill where a miller counted sacks of flour by candle light".split()  # noqa: SIM905


async def measure_step_times(
    urls: Sequence[str], streams: Sequence[int] = (1, 2, 4, 8), api_key: str = ""
) -> StepTimes:
    """Measures servers that have nothing else to do; several URLs are servers of one machine."""
    headers = authorization(api_key)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=3600, trust_env=False, limits=limits) as http:
        try:
            await _decode(http, urls, 1)  # first-time work
            # In turns: what else the machine does changes from minute to minute.
            counts = sorted({1, min(2, len(urls)), len(urls)})
            passes = [{n: await _measure(http, urls[:n], streams) for n in counts} for _ in range(_PASSES)]
            cache_tokens = await _cache_tokens(http, urls[0])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise OneboxError(f"{urls[0]} cannot be measured ({str(error) or type(error).__name__}).") from None
    busy = {count: _merge([each[count] for each in passes]) for count in counts}
    all_busy = busy[len(urls)]
    alone = busy.pop(1)
    base_s, token_s = alone.prompt_costs()
    return StepTimes(
        alone.decode_s,
        tokens_per_step=alone.tokens_per_step,
        prompt_base_s=base_s,
        prompt_token_s=token_s,
        request_s=statistics.fmean(all_busy.requests_s),
        max_num_seqs=max(streams),
        cache_tokens=cache_tokens,
        slowdowns={count: found.slowdown(alone) for count, found in busy.items()},
        prompt_ratios=all_busy.prompt_ratios(),
    )


@dataclass
class _Measurement:
    """Of servers that all do the same at the same time."""

    decode_s: dict[int, float]
    tokens_per_step: float
    num_beside: int
    """Running answers on each server while prompts were measured."""
    waits: list[tuple[int, float]] = field(default_factory=list)
    """(tokens of a prompt, seconds to its first token)."""
    requests_s: list[float] = field(default_factory=list)

    @property
    def _other_s(self) -> float:
        """Of a wait, beside the prompt: the request, the rest of the step that runs, the answers' rows beside it."""
        return statistics.fmean(self.requests_s) + 1.5 * StepTimes(self.decode_s).decode_step_s(self.num_beside)

    def prompt_costs(self) -> tuple[float, float]:
        """(seconds of a step with prompts, of each token): a straight line through all waits."""
        fit = statistics.linear_regression(*zip(*self.waits, strict=True))
        token_s = max(0.0, fit.slope)
        mean_tokens, mean_s = (statistics.fmean(column) for column in zip(*self.waits, strict=True))
        return max(0.0, mean_s - token_s * mean_tokens - self._other_s), token_s

    def slowdown(self, alone: "_Measurement") -> tuple[float, float]:
        """(decode, prompts) against one server alone."""
        decode = statistics.fmean(self.decode_s[rows] / alone.decode_s[rows] for rows in self.decode_s)
        prompts = [statistics.fmean(wait_s for _, wait_s in each.waits) - each._other_s for each in (self, alone)]
        return max(1.0, decode), max(1.0, prompts[0] / max(1e-6, prompts[1]))

    def prompt_ratios(self) -> tuple[float, ...]:
        base_s, token_s = self.prompt_costs()
        fixed_s = base_s + self._other_s
        return tuple(sorted(round(wait_s / (fixed_s + token_s * tokens), 3) for tokens, wait_s in self.waits))


def _merge(parts: Sequence[_Measurement]) -> _Measurement:
    return _Measurement(
        {rows: statistics.fmean(part.decode_s[rows] for part in parts) for rows in parts[0].decode_s},
        statistics.fmean(part.tokens_per_step for part in parts),
        parts[0].num_beside,
        [wait for part in parts for wait in part.waits],
        [request_s for part in parts for request_s in part.requests_s],
    )


async def _measure(http: httpx.AsyncClient, urls: Sequence[str], streams: Sequence[int]) -> _Measurement:
    decode = {count: await _decode(http, urls, count) for count in streams}
    tokens = statistics.fmean(tokens for _, tokens in decode.values())
    found = _Measurement({count: step_s for count, (step_s, _) in decode.items()}, tokens, _NUM_BESIDE)
    async with _running_answers(http, urls, found.num_beside):
        await asyncio.gather(*(_prompts(http, url, place, found) for place, url in enumerate(urls)))
    return found


async def _decode(http: httpx.AsyncClient, urls: Sequence[str], count: int) -> tuple[float, float]:
    """(seconds of a step, tokens of one stream in it) with `count` streams on every server."""
    asks = [_stream(http, url, f"{number} of {count}") for url in urls for number in range(count)]
    found = await asyncio.gather(*asks)
    # The first and last quarter of a stream may run beside fewer others.
    gaps = [gap for arrivals, _ in found for gap in _middle_gaps(arrivals)]
    return statistics.fmean(gaps), statistics.fmean(tokens / max(1, len(arrivals) - 1) for arrivals, tokens in found)


def _middle_gaps(arrivals: Sequence[float]) -> list[float]:
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    quarter = len(gaps) // 4
    return gaps[quarter : len(gaps) - quarter] or gaps or [1e-6]


async def _stream(
    http: httpx.AsyncClient, url: str, nonce: str, begun: asyncio.Event | None = None
) -> tuple[list[float], int]:
    """(arrivals of a stream's chunks, its tokens after the first chunk); `begun` is set at the first one."""
    body = _body(_text(24, f"{url} {nonce}"), _ANSWER_TOKENS) | {"stream": True}
    arrivals, sizes = [], []
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if ids:
                    arrivals.append(time.perf_counter())
                    sizes.append(len(ids))
                if begun:
                    begun.set()
    return arrivals, sum(sizes[1:])


@contextlib.asynccontextmanager
async def _running_answers(http: httpx.AsyncClient, urls: Sequence[str], count: int) -> AsyncIterator[None]:
    """Keeps so many answers running on every server."""

    async def keep(url: str, number: int, begun: asyncio.Event) -> None:
        for turn in itertools.count():
            await _stream(http, url, f"{turn} beside, {number}", begun)

    places = [(url, number, asyncio.Event()) for url in urls for number in range(count)]
    try:
        async with asyncio.TaskGroup() as group:
            keeping = [group.create_task(keep(*place)) for place in places]
            for _, _, begun in places:
                await begun.wait()
            yield
            for task in keeping:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _prompts(http: httpx.AsyncClient, url: str, place: int, found: _Measurement) -> None:
    """Waits of one server: half of its time it computes prompts, each server another length."""
    for turn in range(_ROUNDS):
        for number in range(len(_PROMPT_WORDS)):
            words = _PROMPT_WORDS[(number + place) % len(_PROMPT_WORDS)]
            began = time.perf_counter()
            body = _body(_text(words, f"{turn} {url}"), 1) | {"cache_prompt": False}
            response = await http.post(f"{url}/v1/completions", json=body)
            wait_s = time.perf_counter() - began
            found.waits.append((int(response.raise_for_status().json()["usage"]["prompt_tokens"]), wait_s))
            began = time.perf_counter()
            await http.get(f"{url}/v1/models")
            found.requests_s.append(time.perf_counter() - began)
            await asyncio.sleep(wait_s)


async def _cache_tokens(http: httpx.AsyncClient, url: str) -> int:
    """All pages, if they held prefixes only; by /metrics."""
    for line in (await http.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.index("}")].split(","))
            return int(labels["block_size"].strip('"')) * int(labels["num_gpu_blocks"].strip('"'))
    return StepTimes({1: 1.0}).cache_tokens


def _body(text: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def _text(num_words: int, nonce: str) -> str:
    words = [_WORDS[place % len(_WORDS)] for place in range(num_words)]
    return f"{nonce} {' '.join(words)}"
