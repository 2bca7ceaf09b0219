"""A plugin of LiteLLM: sends a request to the member that has most of its prompt cached.

LiteLLM loads this file by its name (`litellm_settings.callbacks: litellm_affinity.affinity`) from beside its
configuration and in its own environment, so it imports nothing of onebox. LiteLLM gives it the deployments that are
not cooling down and takes back those to choose from. Every member is asked at once, over /v1/cache/lookup, which
computes nothing. A member that does not answer in time counts as one with nothing cached. Where members have the
same, or have much less to do than the one with the prefix, all of those stay and LiteLLM's own strategy chooses.
"""

import asyncio
from typing import Any

import httpx
from litellm.integrations.custom_logger import CustomLogger

__all__ = ["PrefixAffinity", "affinity"]

LOOKUP_S = 1.0
SHARE = 0.1
"""Less of the prompt than this is not worth waiting for."""
BALANCE = 4
"""So many requests more than the least loaded member has, and the prefix is computed again elsewhere."""
_FIELDS = ("tools", "tool_choice", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "thinking_budget")


class PrefixAffinity(CustomLogger):  # type: ignore[misc] # LiteLLM is not in the environment that checks types
    """Asks members before each request."""

    def __init__(self) -> None:
        super().__init__()
        self._http = httpx.AsyncClient(timeout=LOOKUP_S)
        self._num_open: dict[str, int] = {}
        """Requests that this router has sent to a member and that have not ended, by its deployment's id."""

    async def async_filter_deployments(
        self,
        model: str,  # noqa: ARG002 - LiteLLM's signature
        healthy_deployments: list[dict[str, Any]],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        given = request_kwargs or {}
        if len(healthy_deployments) < 2:
            return healthy_deployments
        if messages:
            asked = {"messages": messages, **{name: given[name] for name in _FIELDS if given.get(name) is not None}}
        elif isinstance(given.get("prompt"), str):
            asked = {"prompt": given["prompt"]}
        else:
            return healthy_deployments
        shares = await asyncio.gather(*(self._share(deployment, asked) for deployment in healthy_deployments))
        best = max(shares)
        if best < SHARE:
            return self._least_loaded(healthy_deployments)
        chosen = [each for each, share in zip(healthy_deployments, shares, strict=True) if share >= best - 0.01]
        least = min(self._load(each) for each in healthy_deployments)
        light = [each for each in chosen if self._load(each) - least < BALANCE]
        return light or self._least_loaded(healthy_deployments)

    async def _share(self, deployment: dict[str, Any], asked: dict[str, Any]) -> float:
        """Of the prompt, 0 to 1, that the member has cached."""
        params = deployment["litellm_params"]
        headers = {"Authorization": f"Bearer {params.get('api_key') or 'none'}"}
        try:
            response = await self._http.post(f"{params['api_base']}/cache/lookup", json=asked, headers=headers)
            answer = response.raise_for_status().json()
            return float(answer["cached_tokens"]) / max(1, int(answer["num_tokens"]))
        except (httpx.HTTPError, ValueError, LookupError):
            return 0.0

    def _least_loaded(self, deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        least = min(self._load(each) for each in deployments)
        return [each for each in deployments if self._load(each) == least]

    def _load(self, deployment: dict[str, Any]) -> int:
        return self._num_open.get(deployment["model_info"]["id"], 0)

    # LiteLLM tells of each request that it sends, and of its end.

    def log_pre_api_call(self, model: Any, messages: Any, kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self._count(kwargs, 1)

    async def async_log_success_event(self, kwargs: dict[str, Any], *_: Any) -> None:
        self._count(kwargs, -1)

    async def async_log_failure_event(self, kwargs: dict[str, Any], *_: Any) -> None:
        self._count(kwargs, -1)

    def _count(self, kwargs: dict[str, Any], change: int) -> None:
        info = (kwargs.get("litellm_params") or {}).get("model_info") or {}
        if name := info.get("id"):
            self._num_open[name] = max(0, self._num_open.get(name, 0) + change)


affinity = PrefixAffinity()
