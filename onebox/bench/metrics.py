"""Values from a server's /metrics: accepted drafts, memory plan, start-up phases. Prometheus text, vLLM's names.

Counters are used as differences between two readings, which are valid only without other traffic on the server.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from onebox.bench.record import Acceptance, RequestRecord

__all__ = ["DraftCounters", "acceptance", "draft_counters", "kv_tokens", "memory_bytes", "startup_seconds"]

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# vLLM's names, with and without the suffix of Prometheus clients; llama.cpp uses them with its own prefix.
_DRAFTS = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$"
)


@dataclass(frozen=True)
class DraftCounters:
    """The server's speculative decoding counters: since its start, or between two readings."""

    num_drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    by_position: dict[int, float] = field(default_factory=dict)

    def __add__(self, other: "DraftCounters") -> "DraftCounters":
        return self._combined(other, 1)

    def __sub__(self, other: "DraftCounters") -> "DraftCounters":
        return self._combined(other, -1)

    def _combined(self, other: "DraftCounters", sign: int) -> "DraftCounters":
        places = self.by_position.keys() | other.by_position.keys()
        return DraftCounters(
            self.num_drafts + sign * other.num_drafts,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            {place: self.by_position.get(place, 0) + sign * other.by_position.get(place, 0) for place in places},
        )


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and not line.startswith("#"):
            name, labels, value = found.groups()
            try:
                yield name, dict(_LABEL.findall(labels or "")), float(value)
            except ValueError:
                continue


def draft_counters(text: str | None) -> DraftCounters | None:
    """None if the server has no such counters."""
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for name, labels, value in _samples(text or ""):
        found = _DRAFTS.match(name)
        if not found:
            continue
        kind = found.group(1)
        if kind == "accepted_tokens_per_pos":
            place = int(labels.get("position", "0"))
            by_position[place] = by_position.get(place, 0) + value
        else:
            totals[kind] = totals.get(kind, 0) + value
    if "draft_tokens" not in totals:
        return None
    return DraftCounters(totals.get("drafts", 0), totals["draft_tokens"], totals.get("accepted_tokens", 0), by_position)


def acceptance(requests: Iterable[RequestRecord], counted: DraftCounters | None) -> Acceptance | None:
    """Acceptance over complete answers: from usage where the server reports it there, else from its metrics.

    `counted` is the difference of the metrics while those requests ran. A step produces one token plus its accepted
    drafts, so the number of steps is the tokens minus the accepted drafts.
    """
    answers = [request for request in requests if request.is_ok]
    told = [request for request in answers if request.accepted_drafts is not None]
    if told:
        accepted = sum(request.accepted_drafts or 0 for request in told)
        drafted, source = accepted + sum(request.rejected_drafts or 0 for request in told), "usage"
    elif counted:
        accepted, drafted, source = round(counted.accepted), round(counted.drafted), "metrics"
    else:
        return None
    if not drafted:
        return None
    made = sum(request.completion_tokens or 0 for request in answers)
    num_drafts = round(counted.num_drafts) if counted and counted.num_drafts > 0 else None
    by_position = (
        tuple(counted.by_position[place] / num_drafts for place in sorted(counted.by_position))
        if (counted and num_drafts)
        else ()
    )
    return Acceptance(accepted, drafted, made / max(made - accepted, 1), source, num_drafts, by_position)


def memory_bytes(text: str | None) -> dict[str, int]:
    """Parts of the server's memory plan, if reported."""
    return {
        labels["part"]: round(value)
        for name, labels, value in _samples(text or "")
        if name == "onebox:memory_bytes" and "part" in labels
    }


def kv_tokens(text: str | None) -> int | None:
    """Tokens that the KV cache holds (vLLM's cache_config_info), if reported."""
    for name, labels, _ in _samples(text or ""):
        if name.removesuffix("_info") == "vllm:cache_config":
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                return int(blocks) * int(size)
    return None


def startup_seconds(text: str | None) -> dict[str, float]:
    """Phases of the server's start, if reported."""
    return {
        labels["phase"]: value
        for name, labels, value in _samples(text or "")
        if name == "onebox:startup_seconds" and "phase" in labels
    }
