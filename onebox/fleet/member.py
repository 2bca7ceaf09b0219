"""What a member says of itself over HTTP: who it is, whether it is well, and how much it has to do."""

import re
from dataclasses import dataclass
from typing import Any

import httpx

from onebox.spec.errors import MismatchError, OneboxError, UnsupportedError, UsageError

__all__ = [
    "Identity",
    "MemberCounters",
    "differences",
    "read_counters",
    "read_identity",
    "refuse_differences",
    "refuse_open",
]

ASK_S = 10.0
"""For answers that compute nothing."""
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")


@dataclass(frozen=True)
class Identity:
    """What members of one fleet must have in common."""

    model: str
    fingerprint: str
    """Of all that decides an answer beside the program: weights, formats, tokenizer, template, defaults."""
    version: str
    context: int


@dataclass(frozen=True)
class MemberCounters:
    """Of /metrics. Counters since the member's start."""

    num_running: float = 0
    num_waiting: float = 0
    kv_share: float = 0
    generated_tokens: float = 0
    computed_tokens: float = 0
    """Prompt tokens that were computed, not found."""
    queried_tokens: float = 0
    hit_tokens: float = 0
    num_answered: float = 0


_METRICS = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_share",
    "vllm:generation_tokens_total": "generated_tokens",
    "onebox:prompt_tokens_computed_total": "computed_tokens",
    "vllm:prefix_cache_queries_total": "queried_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:request_success_total": "num_answered",
}


async def read_identity(http: httpx.AsyncClient, url: str) -> Identity:
    """Asks /v1/models and /version; an OneboxError says what is wrong."""
    models = await _ask(http, f"{url}/v1/models")
    version = await _ask(http, f"{url}/version")
    try:
        model = models["data"][0]  # others are names of the same
        return Identity(model["id"], model["fingerprint"], version["version"], model["max_model_len"])
    except (ValueError, LookupError, TypeError):
        raise UnsupportedError(
            f"{url} is no onebox server that tells its model's fingerprint; a fleet's members are onebox servers."
        ) from None


async def read_counters(http: httpx.AsyncClient, url: str) -> MemberCounters:
    """Reads /metrics; values of several labels are added."""
    response = await http.get(f"{url}/metrics", timeout=ASK_S)
    response.raise_for_status()
    found: dict[str, float] = {}
    for line in response.text.splitlines():
        matched = _LINE.match(line)
        name = matched and _METRICS.get(matched.group(1))
        if matched and name:
            found[name] = found.get(name, 0) + float(matched.group(2))
    return MemberCounters(**found)


def differences(identity: Identity, other: Identity, *, with_version: bool = True) -> list[str]:
    """What of `identity` is not as in `other`, as parts of a sentence."""
    found = []
    for name in ("model", "fingerprint", "version", "context"):
        mine, its = getattr(identity, name), getattr(other, name)
        if mine != its and (with_version or name != "version"):
            cut = 12 if name == "fingerprint" else None
            found.append(f"{name} {str(mine)[:cut]} is not {str(its)[:cut]}")
    return found


def refuse_differences(identities: dict[str, Identity]) -> None:
    """Refuses members that are not all alike; the majority is taken for right, the first of equals."""
    kinds = list(identities.values())
    if not kinds:
        return
    usual = max(kinds, key=kinds.count)
    for name, identity in identities.items():
        if wrong := differences(identity, usual):
            raise MismatchError(
                f"{name} is not like the other members: {'; '.join(wrong)}. Answers would depend on who gives them; "
                "serve the same build with the same version and --max-model-len everywhere."
            )


async def refuse_open(http: httpx.AsyncClient, name: str, url: str) -> None:
    """Refuses a member that answers without a key, for a fleet that other machines can call."""
    try:
        response = await http.get(f"{url}/v1/models", headers={"Authorization": ""}, timeout=ASK_S)
    except httpx.HTTPError:
        return  # it is asked again when it answers
    if response.is_success:
        raise UsageError(
            f"The fleet's host lets other machines call {name}, which asks for no API key: serve it with --api-key and "
            "name a file with the key as api_key_file, or set allow_open_server = true."
        )


async def _ask(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    try:
        response = await http.get(url, timeout=ASK_S)
        if response.status_code in (401, 403):
            raise OneboxError(f"{url} wants an API key: name a file with it as api_key_file in the fleet's file.")
        if response.is_error:
            raise OneboxError(f"{url} answers {response.status_code}: no server of onebox is there, or it is failing.")
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise OneboxError(f"{url} cannot be asked ({str(error) or type(error).__name__}).") from None
    if not isinstance(answer, dict):
        raise UnsupportedError(f"{url} answers with something that is not an object.")
    return answer
