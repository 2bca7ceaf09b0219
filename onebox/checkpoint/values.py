"""Checks a checkpoint's values, not only its headers: finite, not constant, scales positive, group indices in range.

Headers do not show a corrupt MTP head or a scale of zero. Tensors are read in chunks to bound memory.
"""

from collections.abc import Callable, Iterator

import torch

from onebox.checkpoint.bind import Binding, Bound, Problem, ProblemKind
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import read_chunks
from onebox.checkpoint.tensors import tensor_of
from onebox.spec.weights import Layout

__all__ = ["check_values"]

_CHUNK_BYTES = 16 << 20
_SCALES = {"scales", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2"}
_WEIGHTS = {"weight", "weight_packed", "qweight"}
_GROUP_INDICES = {"g_idx", "weight_g_idx"}
# AutoRound's scales are negative where the largest weight of a group is positive: its code is then -8, never 7.
_SIGNED_SCALES = {Layout.GPTQ, Layout.PACKED}
# NVFP4 tools store a zero scale for a group of zeros; everywhere else a scale of zero is corruption.
_ZERO_SCALES = {Layout.NVFP4_DIVIDES: {"weight_scale"}, Layout.NVFP4_MULTIPLIES: {"weight_scale"}}
_INT_OF = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.uint8,
    "BF16": torch.int16,
    "F16": torch.int16,
    "F32": torch.int32,
    "I32": torch.int32,
}


def check_values(binding: Binding, on_bytes: Callable[[int], None] = lambda _: None) -> Iterator[Problem]:
    """The problems in the values of all bound tensors; calls `on_bytes` with the bytes read."""
    for bound in binding.modules.values():
        for suffix, entry in bound.tensors.items():
            complaint = _complaint(bound, suffix, entry)
            on_bytes(entry.nbytes)
            if complaint:
                fix = "download this file again, or take the module from another checkpoint"
                yield Problem(ProblemKind.VALUE, entry.name, f"{entry.name} {complaint}: {fix}.")


def _complaint(bound: Bound, suffix: str, entry: TensorEntry) -> str | None:
    """The problem of one tensor, or None. Reads it once, chunk by chunk."""
    varies = not (bound.module.is_matrix and suffix in _WEIGHTS and entry.nbytes > 1)
    first: torch.Tensor | None = None
    for chunk in read_chunks(entry, _CHUNK_BYTES):
        complaint = _chunk_complaint(bound, suffix, tensor_of(chunk, entry.dtype))
        if complaint:
            return complaint
        if not varies:
            raw = tensor_of(chunk, entry.dtype).view(_INT_OF[entry.dtype])
            first = raw[0] if first is None else first
            varies = bool((raw != first).any())
    return None if varies else "is constant: every value in it is the same"


def _chunk_complaint(bound: Bound, suffix: str, values: torch.Tensor) -> str | None:
    if values.is_floating_point() and not _is_finite(values):
        return "holds values that are not finite"
    if suffix in _SCALES and bound.stored.layout in _SIGNED_SCALES:
        return None if bool((values != 0).all()) else "holds scales of zero"
    if suffix in _SCALES and not _are_good_scales(
        values, may_be_zero=suffix in _ZERO_SCALES.get(bound.stored.layout, ())
    ):
        return "holds scales that are not positive"
    if suffix in _GROUP_INDICES and not _is_group_index(values, bound.module.shape[1], bound.stored.group_size):
        return "holds group numbers outside its groups"
    return None


def _is_finite(values: torch.Tensor) -> bool:
    if values.dtype == torch.float8_e4m3fn:
        # E4M3FN has no infinity; its only NaN has all bits below the sign set.
        return bool(((values.view(torch.uint8) & 0x7F) != 0x7F).all())
    return bool(torch.isfinite(values).all())


def _are_good_scales(values: torch.Tensor, *, may_be_zero: bool) -> bool:
    numbers = values.to(torch.float32)
    return bool((numbers >= 0).all() if may_be_zero else (numbers > 0).all())


def _is_group_index(values: torch.Tensor, columns: int, group_size: int) -> bool:
    groups = -(-columns // (group_size or columns))
    return bool(((values >= 0) & (values < groups)).all())
