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
OPEN_HEADER = "x-onebox-open"
"""Requests that a member has, the lookup included: the fleet's relays say it."""
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
        found = await asyncio.gather(*(self._ask(deployment, asked) for deployment in healthy_deployments))
        best = max(share for share, _ in found)
        answering = [load for _, load in found if load is not None]
        least = min(answering, default=0)
        if best >= SHARE:
            light = [
                deployment
                for deployment, (share, load) in zip(healthy_deployments, found, strict=True)
                if share >= best - 0.01 and load is not None and load - least < BALANCE
            ]
            if light:
                return light
        lightest = [each for each, (_, load) in zip(healthy_deployments, found, strict=True) if load == least]
        return lightest or healthy_deployments

    async def _ask(self, deployment: dict[str, Any], asked: dict[str, Any]) -> tuple[float, int | None]:
        """(share of the prompt that the member has cached, requests that it has); 0 and None where it does not say."""
        params = deployment["litellm_params"]
        headers = {"Authorization": f"Bearer {params.get('api_key') or 'none'}"}
        try:
            response = await self._http.post(f"{params['api_base']}/cache/lookup", json=asked, headers=headers)
            answer = response.raise_for_status().json()
            share = float(answer["cached_tokens"]) / max(1, int(answer["num_tokens"]))
            return share, int(response.headers.get(OPEN_HEADER, 1)) - 1
        except (httpx.HTTPError, ValueError, LookupError):
            return 0.0, None


affinity = PrefixAffinity()
