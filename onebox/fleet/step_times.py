"""A member as the simulation knows it: what its steps take, as a file, and how that is measured over HTTP.

    {"decode_s": {"1": 0.021, "4": 0.027}, "tokens_per_step": 2.1, "prompt_base_s": 0.01, "prompt_token_s": 0.0008,
     "request_s": 0.004, "max_num_seqs": 8, "chunk_tokens": 2048, "cache_tokens": 400000}

`decode_s` is the time of a decode step by the number of streams, straight between and beyond what was measured. A step
with prompt tokens takes `prompt_base_s` + `prompt_token_s` each longer. `request_s` is what a request takes
beside steps.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from onebox.spec.errors import OneboxError, UnreadableError, UsageError

__all__ = ["StepTimes", "measure_step_times", "read_step_times", "write_step_times"]

_PAGE_TOKENS = 64
_ANSWER_TOKENS = 96
_PROMPTS = (64, 512)
_WORDS = "the river ran past the old mill where a miller counted sacks of flour by candle light".split()  # noqa: SIM905
_ROUNDS = 3


@dataclass(frozen=True)
class StepTimes:
    """Times in seconds; lengths in tokens."""

    decode_s: dict[int, float]
    tokens_per_step: float = 1.0
    """Of one stream: more than 1 where drafts are accepted."""
    prompt_base_s: float = 0.0
    prompt_token_s: float = 0.0
    request_s: float = 0.0
    max_num_seqs: int = 8
    chunk_tokens: int = 2048
    """Prompt tokens of one step, at most."""
    cache_tokens: int = 100_000
    """That prefixes may hold."""
    answer_wait_s: float | None = 0.05
    """How long running answers may wait for a step with prompts; None: as long as it takes, as on a CPU."""

    def __post_init__(self) -> None:
        if not self.decode_s or min(self.decode_s) < 1 or min(self.decode_s.values()) <= 0:
            raise UsageError("decode_s must have the seconds of a step for at least one number of streams.")
        for name in ("tokens_per_step", "max_num_seqs", "chunk_tokens"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0.")

    def decode_step_s(self, num_rows: int) -> float:
        """Of a decode step of so many streams."""
        known = sorted(self.decode_s.items())
        if len(known) == 1 or num_rows <= known[0][0]:
            return known[0][1]
        after = next((place for place, (rows, _) in enumerate(known) if rows >= num_rows), len(known) - 1)
        (few, few_s), (many, many_s) = known[after - 1], known[after]
        return max(known[0][1], few_s + (many_s - few_s) * (num_rows - few) / (many - few))

    def prompt_room(self, num_rows: int) -> int:
        """Prompt tokens of a step beside so many running answers, as the engine paces them: in whole pages."""
        if not num_rows or not self.prompt_token_s or self.answer_wait_s is None:
            return self.chunk_tokens
        fixed_s = self.decode_step_s(num_rows) + self.prompt_base_s
        tokens = max(self.answer_wait_s - fixed_s, fixed_s) / self.prompt_token_s
        return min(self.chunk_tokens, max(1, round(tokens / _PAGE_TOKENS)) * _PAGE_TOKENS)

    def step_s(self, num_rows: int, prompt_tokens: int) -> float:
        """Of a step with decode rows, prompt tokens, or both."""
        decode = self.decode_step_s(num_rows) if num_rows else 0.0
        return decode + (self.prompt_base_s + self.prompt_token_s * prompt_tokens if prompt_tokens else 0.0)


def read_step_times(path: Path) -> StepTimes:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["decode_s"] = {int(rows): float(seconds) for rows, seconds in content["decode_s"].items()}
        return StepTimes(**content)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableError(
            f"{path} does not describe step times ({error}); measure them with --measure URL."
        ) from None


def write_step_times(times: StepTimes, path: Path) -> None:
    path.write_text(json.dumps(asdict(times), indent=1) + "\n", encoding="utf-8")


async def measure_step_times(
    urls: Sequence[str], streams: Sequence[int] = (1, 2, 4, 8), api_key: str = ""
) -> StepTimes:
    """Measures servers that have nothing else to do, all of them under the same load at the same time.

    Several servers on one machine slow each other down; measured together, their times hold for when all are busy.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=3600, trust_env=False, limits=limits) as http:
        try:
            limit = (await http.get(f"{urls[0]}/v1/models")).raise_for_status().json()["data"][0]["max_model_len"]
            cache_tokens = await _cache_tokens(http, urls[0])
            await _decode(http, urls, 1)  # first-time work
            decode = {count: await _decode(http, urls, count) for count in streams}
            base_s, token_s, request_s = await _prompts(http, urls, limit)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise OneboxError(f"{urls[0]} cannot be measured ({str(error) or type(error).__name__}).") from None
    return StepTimes(
        {count: step_s for count, (step_s, _) in decode.items()},
        tokens_per_step=statistics.fmean(tokens for _, tokens in decode.values()),
        prompt_base_s=base_s,
        prompt_token_s=token_s,
        request_s=request_s,
        max_num_seqs=max(streams),
        cache_tokens=cache_tokens,
    )


async def _decode(http: httpx.AsyncClient, urls: Sequence[str], count: int) -> tuple[float, float]:
    """(seconds of a step, tokens of one stream in it) with `count` streams on every server."""
    asks = [_stream(http, url, number) for url in urls for number in range(count)]
    found = await asyncio.gather(*asks)
    # The first and last quarter of a stream may run beside fewer others.
    gaps = [gap for arrivals, _ in found for gap in _middle_gaps(arrivals)]
    return statistics.fmean(gaps), statistics.fmean(tokens / max(1, len(arrivals) - 1) for arrivals, tokens in found)


def _middle_gaps(arrivals: Sequence[float]) -> list[float]:
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    quarter = len(gaps) // 4
    return gaps[quarter : len(gaps) - quarter] or gaps or [1e-6]


async def _stream(http: httpx.AsyncClient, url: str, number: int) -> tuple[list[float], int]:
    """(arrivals of a stream's chunks, its tokens after the first chunk)."""
    body = _body(_text(24, f"{url} {number}"), _ANSWER_TOKENS) | {"stream": True}
    arrivals, sizes = [], []
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if ids:
                    arrivals.append(time.perf_counter())
                    sizes.append(len(ids))
    return arrivals, sum(sizes[1:])


async def _prompts(http: httpx.AsyncClient, urls: Sequence[str], limit: int) -> tuple[float, float, float]:
    """(seconds of a step with prompts, of each token, of a request beside steps), from two lengths."""
    lengths = [min(length, limit // 2) for length in _PROMPTS]
    waits: dict[int, list[float]] = {length: [] for length in lengths}
    tokens: dict[int, list[int]] = {length: [] for length in lengths}
    quick = []
    for turn in range(_ROUNDS):
        for length in lengths:
            asked = [_first(http, url, _text(length, f"{turn} {url}")) for url in urls]
            for wait_s, counted in await asyncio.gather(*asked):
                waits[length].append(wait_s)
                tokens[length].append(counted)
        began = time.perf_counter()
        await http.get(f"{urls[0]}/v1/models")
        quick.append(time.perf_counter() - began)
    (short_s, long_s), (short, long) = (
        [statistics.median(values[length]) for length in lengths] for values in (waits, tokens)
    )
    token_s = max(0.0, (long_s - short_s) / max(1, long - short))
    request_s = statistics.median(quick)
    return max(0.0, short_s - token_s * short - request_s), token_s, request_s


async def _first(http: httpx.AsyncClient, url: str, text: str) -> tuple[float, int]:
    """(seconds to an answer of one token, tokens of its prompt)."""
    began = time.perf_counter()
    response = await http.post(f"{url}/v1/completions", json=_body(text, 1) | {"cache_prompt": False})
    wait_s = time.perf_counter() - began
    return wait_s, int(response.raise_for_status().json()["usage"]["prompt_tokens"])


async def _cache_tokens(http: httpx.AsyncClient, url: str) -> int:
    """All pages, if they held prefixes only; by /metrics."""
    for line in (await http.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.index("}")].split(","))
            return int(labels["block_size"].strip('"')) * int(labels["num_gpu_blocks"].strip('"'))
    return StepTimes({1: 1.0}).cache_tokens


def _body(text: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def _text(num_tokens: int, nonce: str) -> str:
    """About so many tokens; a word is about one."""
    words = [_WORDS[place % len(_WORDS)] for place in range(num_tokens)]
    return f"{nonce} {' '.join(words)}"
