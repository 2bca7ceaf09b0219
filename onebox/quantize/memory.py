"""The memory and disk that a calibration takes, computed before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onebox.quantize.blocks import Block, is_tuned
from onebox.quantize.branches import CHUNK_ROWS
from onebox.quantize.row_errors import HEAD_ROWS
from onebox.quantize.settings import CalibrationSettings
from onebox.spec.errors import DoesNotFitError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["CalibrationMemory", "calibration_memory"]

_STREAMS = 3
"""Streams in host memory at a time: the source's, the build's, and a residual or what the experts read."""
_TUNED_BYTES = 40
"""For each weight that is tuned: itself, rounded, its offset, the offset's gradient (float32 each), and what autograd
keeps between forward and backward pass: divided by its scale, rounded, clamped, multiplied, and their gradients."""
_BASE_BYTES = 1 << 30
"""Python, torch, the auto-round library and its imports."""
_SWIGLU_TENSORS = 8
"""Tensors of an expert's inner size that autograd keeps for a row: gate, its SiLU, up, product, and their gradients."""
_HIDDEN_TENSORS = 6
_LOGIT_TENSORS = 7
"""Of both heads' logits: themselves, their logarithms, the source's probabilities, products and gradients."""
_DELTA_TENSORS = 40
"""Tensors of DeltaNet's inner size for a token: the projections, convolution, chunks and their gradients."""


@dataclass(frozen=True)
class CalibrationMemory:
    """Planned bytes in host memory and on the device, which is the host's too without a GPU, by part; bytes on disk."""

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    def require(self, host_available: int, device_available: int | None) -> None:
        """Raises `DoesNotFitError` if this is more than is free; without a GPU (None) all parts are the host's."""
        host = self.host_bytes + (self.device_bytes if device_available is None else 0)
        for what, needed, free in (
            ("host memory", host, host_available),
            ("memory of the GPU", self.device_bytes, device_available),
        ):
            if free is not None and needed > free:
                raise DoesNotFitError(
                    f"The calibration takes {needed / 1e9:.1f} GB of {what} and {free / 1e9:.1f} GB are free: give "
                    "smaller --experts-at-once, --num-sequences, --sequence-tokens or --batch-tokens."
                )


def calibration_memory(
    spec: ModelSpec, blocks: Sequence[Block], num_sequences: int, settings: CalibrationSettings
) -> CalibrationMemory:
    """What the largest block takes."""
    rows = num_sequences * settings.sequence_tokens
    stream = 4 * rows * spec.hidden_size
    routing = 3 * 12 * rows * (spec.num_experts_per_tok + 1)
    ends = {block.in_mtp: block.name for block in blocks}.values()
    device = max(
        (_block_bytes(spec, block, settings, is_last=block.name in ends) for block in blocks),
        key=lambda parts: sum(parts.values()),
    )
    host = {
        "streams": _STREAMS * stream,
        "routing": routing,
        "embedding": 2 * spec.vocab_size * spec.hidden_size,
        "programs": _BASE_BYTES,
    }
    return CalibrationMemory(host, device, disk_bytes=4 * stream + _codes_bytes(blocks))


def _block_bytes(spec: ModelSpec, block: Block, settings: CalibrationSettings, *, is_last: bool) -> dict[str, int]:
    """`is_last`: its errors are those of the predictions behind it."""
    experts = (ModuleClass.EXPERTS, ModuleClass.MTP_EXPERTS)
    dense = [choice.module for choice in block.choices.values() if choice.module.module_class not in experts]
    parts = {"dense weights, source and build": 8 * sum(module.numel for module in dense)}
    mixer = sum(choice.module.numel for choice in block.mixer_tuned)
    tokens, inner = settings.sequence_tokens, max(spec.moe_intermediate_size, spec.shared_expert_intermediate_size)
    attention = 16 * spec.num_attention_heads * tokens * tokens
    delta = 4 * _DELTA_TENSORS * tokens * (spec.conv_dim + spec.value_dim)
    tuned_mixer = _TUNED_BYTES * mixer + max(attention, delta)
    branches = min(settings.experts_at_once, len(block.branches_tuned))
    group = _TUNED_BYTES * 3 * spec.hidden_size * inner * max(1, branches)
    batch = min(settings.batch_tokens, CHUNK_ROWS) if not branches else settings.batch_tokens
    per_row = _SWIGLU_TENSORS * inner * min(branches + 1, spec.num_experts_per_tok + 1)
    group += 4 * batch * (per_row + _HIDDEN_TENSORS * spec.hidden_size)
    if is_last:
        parts["LM head, source and build"] = 8 * spec.vocab_size * spec.hidden_size
        parts["logits"] = 4 * _LOGIT_TENSORS * min(HEAD_ROWS, settings.batch_tokens) * spec.vocab_size
    parts["the mixer" if tuned_mixer > group else f"{branches} experts that are tuned"] = max(tuned_mixer, group)
    return parts


def _codes_bytes(blocks: Sequence[Block]) -> int:
    """At most: a byte for each tuned weight, with scales."""
    choices = (choice for block in blocks for choice in block.choices.values() if is_tuned(choice))
    return sum(choice.module.numel for choice in choices) * 9 // 8
