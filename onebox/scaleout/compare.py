"""The same prompts through vLLM and through onebox: log-probabilities side by side, and whether it is one model.

onebox continues each prompt greedily, and both servers then score prompt and continuation, token for token. Greedy
texts are no test by themselves: in BF16 two right engines part at the first near-tie. A wrongly read scale or a missing
weight moves the mean difference of log-probabilities from some hundredths to whole nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import httpx

from onebox.spec.authorization import authorization
from onebox.spec.errors import MismatchError, OneboxError, UnreadableError

__all__ = ["DEFAULT_TOLERANCE", "PROMPTS", "ComparedPrompt", "ServedModel", "VllmComparison", "compare_servers"]

DEFAULT_TOLERANCE = 0.06
"""Nats: the mean difference seen between two BF16 computations of one model; between BF16 and float32 it is 0.05."""
LEAST_SAME = 0.9
"""Share of positions at which both must find the same token likeliest."""
PROMPTS = (
    "The capital of Hungary is",
    "A bridge does not fail all at once. Long before the first crack can be seen,",
    "def greatest_common_divisor(a: int, b: int) -> int:\n    while b:\n",
    '{"invoice": {"number": "2026-114", "total": 1250.00, "currency": "EUR", "lines": [',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Before you replace the disk, make sure that the copy of your data can be read. Start the machine from",
    "A vonat tizenhét perc késéssel indult, ezért az utasok többsége",
    "Le premier train part à six heures; le suivant",
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome |",
    "Q: Which planet is nearest to the Sun?\nA:",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON orders.customer_id =",
    "She had expected the office to be larger. There were two desks, a shelf of folders, and a window that",
)
_TOP = 5
_CONTINUATION_TOKENS = 24
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt with its continuation, scored by both. Differences are vLLM's minus onebox's, in nats."""

    prompt: str
    num_tokens: int
    onebox_mean: float
    """Mean log-probability of the tokens under onebox."""
    vllm_mean: float
    differences: tuple[float, ...]
    num_same: int
    """Positions at which both find the same token likeliest."""
    num_equal_tokens: int
    """Of vLLM's own greedy continuation, the tokens before it parts from onebox's."""
    num_continued: int

    @property
    def mean_difference(self) -> float:
        return fmean(map(abs, self.differences))

    @property
    def largest_difference(self) -> float:
        return max(map(abs, self.differences))


@dataclass(frozen=True)
class VllmComparison:
    """All prompts, and the verdict."""

    prompts: tuple[ComparedPrompt, ...]
    tolerance: float

    @property
    def mean_difference(self) -> float:
        """Over all tokens, in nats."""
        return fmean(abs(value) for prompt in self.prompts for value in prompt.differences)

    @property
    def largest_difference(self) -> float:
        return max(prompt.largest_difference for prompt in self.prompts)

    @property
    def same_share(self) -> float:
        return sum(prompt.num_same for prompt in self.prompts) / sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def is_same(self) -> bool:
        return self.mean_difference <= self.tolerance and self.same_share >= LEAST_SAME

    @property
    def verdict(self) -> str:
        figures = (
            f"log-probabilities differ by {self.mean_difference:.4f} nats on average (at most {self.tolerance:g} are "
            f"allowed), and {self.same_share:.1%} of the likeliest tokens are the same (at least {LEAST_SAME:.0%})"
        )
        if self.is_same:
            return f"One model: {figures}."
        return f"Not one model, or wrongly loaded: {figures}. Run `onebox scaleout check`, and `onebox verify` there."


class ServedModel:
    """A server of one model, by its OpenAI API."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        self.url = root if "://" in root else f"http://{root}"
        headers = authorization(api_key)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        try:
            self._model = str(self._asked("GET", "/v1/models")["data"][0]["id"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._http.close()

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._asked("POST", "/tokenize", body)["tokens"]]

    def continued(self, tokens: Sequence[int]) -> list[int]:
        """The greedy continuation."""
        body = {"max_tokens": _CONTINUATION_TOKENS, "return_token_ids": True}
        return [int(token) for token in self._completed(tokens, body)["token_ids"]]

    def scores(self, tokens: Sequence[int]) -> list[dict[int, float]]:
        """For each token but the first: log-probabilities of the likeliest tokens there, and of the token itself."""
        found = self._completed(tokens, {"max_tokens": 1, "prompt_logprobs": _TOP})["prompt_logprobs"]
        return [_values(place) for place in found[1:]]

    def _completed(self, tokens: Sequence[int], more: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, "prompt": list(tokens), "temperature": 0.0, **more}
        choice: dict[str, Any] = self._asked("POST", "/v1/completions", body)["choices"][0]
        return choice

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnreadableError(f"{self.url}{path} does not answer ({error or type(error).__name__}).") from None
        if answer.is_error:
            raise OneboxError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        try:
            found: dict[str, Any] = answer.json()
        except ValueError:
            raise UnreadableError(f"{self.url}{path} answered something else than JSON.") from None
        return found


def _values(place: Mapping[str, Any]) -> dict[int, float]:
    values = {int(token): float(entry["logprob"]) for token, entry in place.items()}
    if any(math.isnan(value) for value in values.values()):
        raise OneboxError("A log-probability is not a number: the weights were not read as they are stored.")
    return values


def compare_servers(
    vllm: ServedModel, onebox: ServedModel, tolerance: float = DEFAULT_TOLERANCE, prompts: Sequence[str] = PROMPTS
) -> VllmComparison:
    """Every prompt through both. Raises `MismatchError` where the two do not even have one tokenizer."""
    return VllmComparison(tuple(_compared(vllm, onebox, prompt) for prompt in prompts), tolerance)


def _compared(vllm: ServedModel, onebox: ServedModel, prompt: str) -> ComparedPrompt:
    tokens = onebox.tokenize(prompt)
    if vllm.tokenize(prompt) != tokens:
        raise MismatchError(f"The two servers tokenise {prompt[:40]!r} differently: they serve different models.")
    ours, theirs = onebox.continued(tokens), vllm.continued(tokens)
    whole = [*tokens, *ours]
    first, second = onebox.scores(whole), vllm.scores(whole)
    pairs = [(one[token], other[token]) for token, one, other in zip(whole[1:], first, second, strict=True)]
    return ComparedPrompt(
        prompt=prompt,
        num_tokens=len(pairs),
        onebox_mean=fmean(one for one, _ in pairs),
        vllm_mean=fmean(other for _, other in pairs),
        differences=tuple(other - one for one, other in pairs),
        num_same=sum(_likeliest(one) == _likeliest(other) for one, other in zip(first, second, strict=True)),
        num_equal_tokens=_equal_beginning(ours, theirs),
        num_continued=len(ours),
    )


def _likeliest(place: Mapping[int, float]) -> int:
    return max(place, key=place.__getitem__)


def _equal_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
