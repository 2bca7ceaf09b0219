"""Times of one request: deliveries, gaps, decode speed. Pure functions over `RequestRecord`.

A delivery is all chunks that arrived within a millisecond: the tokens of one step may be written as one event or as
several, in one TCP segment or in several, and no figure may depend on that.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from onebox.bench.record import RequestRecord

__all__ = [
    "DELIVERY_S",
    "LEAST_DECODE_S",
    "LEAST_GAPS",
    "Delivery",
    "batch_tok_s",
    "batches",
    "decode_tok_s",
    "deliveries",
    "e2e_tok_s",
    "gaps_s",
    "token_times",
    "tokens_after_first",
    "tpot_s",
]

DELIVERY_S = 0.001
"""Chunks within this time of a delivery's first chunk belong to it."""
LEAST_GAPS = 2
LEAST_DECODE_S = 0.02
"""A decode speed needs this many gaps and this much time after the first delivery. In less, the time to write and read
the events is measured, not the server's steps."""


class Delivery(NamedTuple):
    """Tokens that arrived together, `at_s` seconds after the request was sent."""

    at_s: float
    tokens: float
    """Exact with token ids; else the share of the answer's tokens that its characters have."""


def deliveries(request: RequestRecord) -> list[Delivery]:
    """The answer's deliveries in order."""
    found: list[Delivery] = []
    for at_s, tokens in zip(request.arrivals_s, _chunk_tokens(request), strict=True):
        if found and at_s - found[-1].at_s < DELIVERY_S:
            found[-1] = Delivery(found[-1].at_s, found[-1].tokens + tokens)
        else:
            found.append(Delivery(at_s, tokens))
    return found


def _chunk_tokens(request: RequestRecord) -> Sequence[float]:
    """Tokens of each chunk. Without token ids and characters, every chunk but the last is one token."""
    if request.arrival_tokens:
        return request.arrival_tokens
    made, chunks = request.completion_tokens or 0, len(request.arrivals_s)
    num_chars = sum(request.arrival_chars)
    if len(request.arrival_chars) == chunks and num_chars:
        return [made * chars / num_chars for chars in request.arrival_chars]
    return [1.0] * (chunks - 1) + [max(made - chunks + 1, 0)] if chunks else []


def gaps_s(request: RequestRecord) -> list[float]:
    """Gaps between consecutive deliveries."""
    return [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(deliveries(request))]


def tokens_after_first(request: RequestRecord) -> float:
    """Tokens after the first delivery, which holds at least one."""
    found = deliveries(request)
    return max((request.completion_tokens or 0) - max(found[0].tokens, 1), 0) if found else 0


def decode_tok_s(request: RequestRecord) -> float | None:
    """None if the answer is too short to have a speed."""
    found = deliveries(request)
    seconds = found[-1].at_s - found[0].at_s if found else 0.0
    if len(found) <= LEAST_GAPS or seconds < LEAST_DECODE_S:
        return None
    return tokens_after_first(request) / seconds or None


def tpot_s(request: RequestRecord) -> float | None:
    speed = decode_tok_s(request)
    return 1 / speed if speed else None


def e2e_tok_s(request: RequestRecord) -> float | None:
    return (request.completion_tokens or 0) / request.total_s if request.total_s > 0 else None


def token_times(request: RequestRecord) -> list[float]:
    """Time of every token, in seconds since the request was sent: a delivery's tokens are spread over its gap.

    As llama-benchy does: the first delivery's tokens have its time; without token ids all tokens are spread evenly.
    """
    found = deliveries(request)
    if not request.arrival_tokens:
        return _even_times(found, request.completion_tokens or 0)
    times: list[float] = []
    for delivery in found:
        last, count = times[-1] if times else delivery.at_s, round(delivery.tokens)
        times += [last + (delivery.at_s - last) * (place + 1) / count for place in range(count)]
    return times


def _even_times(found: Sequence[Delivery], count: int) -> list[float]:
    if not found or not count:
        return []
    first, last = found[0].at_s, found[-1].at_s
    return [first + (last - first) * place / max(count - 1, 1) for place in range(count)]


def batches(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """Requests sent together, grouped by run."""
    found: dict[int, list[RequestRecord]] = {}
    for request in requests:
        found.setdefault(request.run, []).append(request)
    return list(found.values())


def batch_tok_s(batch: Sequence[RequestRecord]) -> float | None:
    """Tokens after each request's first delivery, divided by the time from the earliest first delivery to the last.

    None if the answers are too short to have a speed.
    """
    answered = [(request.start_s, found) for request in batch if (found := deliveries(request))]
    if not answered or max(len(found) for _, found in answered) <= LEAST_GAPS:
        return None
    begins = min(start + found[0].at_s for start, found in answered)
    ends = max(start + found[-1].at_s for start, found in answered)
    if ends - begins < LEAST_DECODE_S:
        return None
    return sum(tokens_after_first(request) for request in batch) / (ends - begins) or None
