"""How long prompts take on a box until their first token, projected from bytes and arithmetic; nothing is measured.

A prompt is computed in steps of up to `max_batched_tokens`. A step reads each weight once, the experts that its tokens
select (nearly all of them) and the KV cache so far, and computes:

    seconds = bytes / usable bandwidth + FLOPs / (FLOPS_SHARE x BF16 peak)

Both are added: what a step overlaps of them is in the measured share. The first token comes with the last step; the
time to sample it is not counted.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onebox.spec.hardware import Box
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.traffic import Routing, TrafficStep, class_parameters, step_traffic

__all__ = [
    "FLOPS_SHARE",
    "NEW_TOKENS",
    "PROMPT_LENGTHS",
    "PromptTimes",
    "prompt_flops",
    "prompt_seconds",
    "prompt_times",
]

FLOPS_SHARE = 0.43
"""Of the BF16 peak, in this engine's prompts.

Measured with the whole engine on an H200, 122B shape, 2026-11-15: 8,000 tokens in 0.403 s, which this share explains;
128,000 tokens took 12.7 s, 5% less than projected. That other boxes reach the same share is an assumption.
"""
PROMPT_LENGTHS = (2_048, 8_192, 32_768, 100_000)
NEW_TOKENS = 512
"""Of a prompt behind a cached prefix: a question after a document, a turn after a conversation."""


class PromptTimes(NamedTuple):
    """One length of prompt."""

    num_tokens: int
    cold_seconds: float
    cached_seconds: float
    """With all but the last NEW_TOKENS cached in memory."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.cold_seconds


def prompt_flops(spec: ModelSpec, num_tokens: int, start: int) -> float:
    """FLOPs of `num_tokens` of a prompt after its first `start`, two per multiply-add, without the LM head."""
    parameters, kind = class_parameters(spec), ModuleClass
    dense = (kind.ATTENTION, kind.DELTA, kind.DELTA_GATES, kind.ROUTER, kind.SHARED)
    active = spec.num_experts_per_tok / spec.num_experts
    token = sum(parameters.get(part, 0) for part in dense) + active * parameters[kind.EXPERTS]
    seen = start + (num_tokens + 1) / 2
    scores = len(spec.full_layers) * 2 * spec.num_attention_heads * spec.head_dim * seen
    return 2.0 * num_tokens * (token + scores)


def prompt_seconds(
    spec: ModelSpec,
    stored: Mapping[ModuleClass, int],
    box: Box,
    kv: KVFormat,
    tokens: range,
    max_batched_tokens: int,
) -> float | None:
    """Seconds of the prompt's `tokens`, those before them being cached; None where the box's speeds are not known."""
    if box.usable is None or box.peak_bf16_flops is None:
        return None
    seconds = 0.0
    for start in range(tokens.start, tokens.stop, max_batched_tokens):
        count = min(max_batched_tokens, tokens.stop - start)
        step = TrafficStep(drafts=count - 1, context_tokens=start, drafter_is_mtp=False)
        read = step_traffic(spec, stored, step, kv, Routing.EXPECTED).total_bytes
        seconds += read / box.usable.bytes_per_second
        seconds += prompt_flops(spec, count, start) / (FLOPS_SHARE * box.peak_bf16_flops)
    return seconds


def prompt_times(
    spec: ModelSpec,
    stored: Mapping[ModuleClass, int],
    box: Box,
    kv: KVFormat,
    max_batched_tokens: int,
    lengths: Sequence[int],
) -> tuple[PromptTimes, ...]:
    """The times of prompts of each length; none where the box's speeds are not known."""
    times = []
    for length in lengths:
        cold, cached = (
            prompt_seconds(spec, stored, box, kv, range(start, length), max_batched_tokens)
            for start in (0, max(0, length - NEW_TOKENS))
        )
        if cold is not None and cached is not None:
            times.append(PromptTimes(length, cold, cached))
    return tuple(times)
