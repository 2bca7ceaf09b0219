"""Inputs of Gated DeltaNet."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.kernels.common.case import Case, fused_rows_cases, generator
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights

__all__ = ["CASES", "QWEN_122B", "TINY", "DeltaShape", "delta_inputs"]


@dataclass(frozen=True)
class DeltaShape:
    """The sizes of a DeltaNet layer, M (the most tokens of a step) and the convolution's taps."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    max_step_tokens: int
    taps: int = 4

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


_CHUNK = 64

TINY = DeltaShape(1, 2, 16, 16, 5)
_ODD = DeltaShape(2, 4, 12, 20, 3)
_MATCHED = DeltaShape(2, 2, 32, 64, 9)
QWEN_122B = DeltaShape(16, 64, 128, 128, 9)
_QWEN_35B = DeltaShape(16, 32, 128, 128, 9)


def delta_inputs(
    device: torch.device,
    shape: DeltaShape,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    num_accepted: tuple[int, ...] | None = None,
    is_strided: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments of a step, or of a prefill without `num_accepted`: lengths[s] rows each, slots in reverse order.

    A prefill saves states in slots of their own: after each sequence's last whole chunk, and the first one's first.
    """
    rows, heads = sum(lengths), shape.num_heads
    draw = partial(torch.randn, generator=generator(shape.conv_dim + rows))
    # Columns of one projection: qkv, a and b. Decays range from almost none to almost all.
    projected = draw(rows, shape.conv_dim + 2 * heads).to(dtype).to(device)
    parts = projected.tensor_split([shape.conv_dim, shape.conv_dim + heads], dim=1)
    qkv, a, b = parts if is_strided else [part.contiguous() for part in parts]
    cu_rows = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "qkv": qkv,
        "a": a,
        "b": b,
        "weights": DeltaWeights(
            (0.5 * draw(shape.conv_dim, shape.taps)).to(torch.bfloat16).to(device),
            torch.linspace(-4, 1.5, heads).to(device),
            draw(heads).to(torch.bfloat16).to(device),
        ),
        "pool": _pool(shape, 2 * len(lengths) + 2, (dtype, state_dtype), draw(1 << 16), device),
        "cu_rows": cu_rows.to(device),
        "slots": torch.arange(len(lengths), 0, -1, dtype=torch.int32, device=device),
    }
    if num_accepted is not None:
        arguments["num_accepted"] = torch.tensor(num_accepted, dtype=torch.int32, device=device)
    else:
        arguments["saves"] = _saves(lengths).to(device)
    return arguments


def _saves(lengths: tuple[int, ...]) -> Tensor:
    saves, first = torch.full((sum(lengths),), -1, dtype=torch.int32), 0
    for sequence, length in enumerate(lengths):
        if length >= _CHUNK:
            saves[first + length // _CHUNK * _CHUNK - 1] = len(lengths) + 1 + sequence
        first += length
    if lengths[0] >= 2 * _CHUNK:
        saves[_CHUNK - 1] = 2 * len(lengths) + 1
    return saves


def _pool(
    shape: DeltaShape, slots: int, dtypes: tuple[torch.dtype, torch.dtype], noise: Tensor, device: torch.device
) -> DeltaPool:
    """A pool of so many slots; `dtypes` are those of rows and of matrices."""
    dtype, state_dtype = dtypes

    def filled(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return noise.repeat(count // noise.numel() + 1)[:count].view(shape).to(device)

    return DeltaPool(
        (0.1 * filled(slots, shape.num_heads, shape.key_dim, shape.value_dim)).to(state_dtype),
        filled(slots, shape.taps - 1, shape.conv_dim).to(dtype),
        filled(slots, shape.max_step_tokens, shape.conv_dim).to(dtype),
        filled(slots, shape.max_step_tokens, 2, shape.num_heads),
    )


def _norm_inputs(device: torch.device, rows: int, heads: int, value_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + heads))
    return {
        "o": (0.1 * draw(rows, heads, value_dim)).to(dtype).to(device),
        "z": draw(rows, heads * value_dim + 8).to(dtype).to(device)[:, : heads * value_dim],
        "weight": (1 + 0.1 * draw(value_dim)).to(device),
        "eps": 1e-6,
    }


def _case(name: str, shape: DeltaShape, is_full: bool = False, **inputs: Any) -> Case:
    op = "delta_net_step" if "num_accepted" in inputs else "delta_net_prefill"
    return Case(op, name, partial(delta_inputs, shape=shape, **inputs), is_full, mutates=("pool",))


def _norm_case(rows: int, heads: int, value_dim: int, dtype: torch.dtype, is_full: bool = False) -> Case:
    make = partial(_norm_inputs, rows=rows, heads=heads, value_dim=value_dim, dtype=dtype)
    return Case("gated_norm", f"{rows}x{heads}x{value_dim}-{dtype}", make, is_full)


_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16

_NET_CASES = [
    _case("one-token", TINY, lengths=(1,), num_accepted=(0,), dtype=_BF16),
    _case("one-token-after-five", TINY, lengths=(1,), num_accepted=(5,), dtype=_F32),
    _case("mixed-odd-heads", _ODD, lengths=(1, 3, 0, 0, 2), num_accepted=(2, 0, 3, 0, 1), dtype=_F32, is_strided=True),
    _case("two-tiles-of-tokens", _MATCHED, lengths=(9, 2), num_accepted=(9, 7), dtype=_BF16),
    _case("no-rows", TINY, lengths=(0, 0), num_accepted=(2, 0), dtype=_F32),
    _case("three-taps", replace(TINY, taps=3), lengths=(2, 1), num_accepted=(1, 3), dtype=_F32),
    _case("six-taps", replace(TINY, taps=6), lengths=(3, 1), num_accepted=(4, 0), dtype=_BF16),
    _case("one-token", TINY, lengths=(1,), dtype=_F32),
    _case("mixed-odd-heads", _ODD, lengths=(65, 0, 2), dtype=_F32, is_strided=True),
    _case("two-chunks-and-a-bit", _MATCHED, lengths=(130,), dtype=_F32),
    _case("whole-chunk", TINY, lengths=(64, 3), dtype=_BF16),
    # Where kernel and twin round a state to either side of a tie, results in float32 would show it.
    _case("bf16-state", TINY, lengths=(2, 1), num_accepted=(1, 3), dtype=_BF16, state_dtype=_BF16),
    _case("fp16-state-odd-heads", _ODD, lengths=(1, 3), num_accepted=(2, 0), dtype=_BF16, state_dtype=_F16),
    _case("bf16-state", replace(TINY, num_heads=1), lengths=(65,), dtype=_BF16, state_dtype=_BF16),
    _case("fp16-state", replace(TINY, num_heads=1), lengths=(66,), dtype=_BF16, state_dtype=_F16),
    _norm_case(1, 2, 16, _BF16),
    _norm_case(3, 5, 20, _F32),
    _case("122b-2x3-rows", QWEN_122B, is_full=True, lengths=(3, 3), num_accepted=(3, 1), dtype=_BF16, is_strided=True),
    _case("122b-float32", QWEN_122B, is_full=True, lengths=(1, 9), num_accepted=(9, 0), dtype=_F32),
    _case("35b-2x3-rows", _QWEN_35B, is_full=True, lengths=(3, 3), num_accepted=(2, 0), dtype=_BF16, is_strided=True),
    _case("122b-192-tokens", QWEN_122B, is_full=True, lengths=(192,), dtype=_BF16, is_strided=True),
    _case("122b-float32", QWEN_122B, is_full=True, lengths=(100, 29), dtype=_F32),
    _case("122b-bf16-state", QWEN_122B, is_full=True, lengths=(100, 29), dtype=_BF16, state_dtype=_BF16),
    _case("35b-192-tokens", _QWEN_35B, is_full=True, lengths=(192,), dtype=_BF16, is_strided=True),
    _norm_case(3, 64, 128, _BF16, is_full=True),
    _norm_case(192, 32, 128, _BF16, is_full=True),
]


def _inputs(
    device: torch.device,
    shape: DeltaShape,
    lengths: tuple[int, ...],
    num_accepted: tuple[int, ...],
    parts: tuple[int, int],
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    arguments = delta_inputs(device, shape, lengths, dtype, num_accepted, state_dtype=state_dtype)
    qkv, a, b = (arguments.pop(name).to(torch.float32) for name in ("qkv", "a", "b"))
    heads = shape.num_heads
    if parts[0] == parts[1]:  # one projection for all of them
        joined = _cut(torch.cat([qkv, b, a], dim=1), parts[0])
        cut_qkv, cut_b, cut_a = joined.tensor_split([shape.conv_dim, shape.conv_dim + heads], dim=2)
    else:
        cut_qkv = _cut(qkv, parts[0])
        cut_b, cut_a = _cut(torch.cat([b, a], dim=1), parts[1]).tensor_split([heads], dim=2)
    return {"qkv_parts": cut_qkv, "a_parts": cut_a, "b_parts": cut_b, **arguments}


def _cut(whole: Tensor, count: int) -> Tensor:
    """Parts [count, R, N] with a sum of approximately `whole` [R, N]."""
    noise = torch.randn(count, *whole.shape, generator=generator(count)).to(whole.device)
    return whole / count + noise - noise.mean(0)


def _step_case(
    name: str,
    shape: DeltaShape,
    lengths: tuple[int, ...],
    num_accepted: tuple[int, ...],
    parts: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    state_dtype: torch.dtype = torch.float32,
    is_full: bool = False,
) -> Case:
    make = partial(
        _inputs,
        shape=shape,
        lengths=lengths,
        num_accepted=num_accepted,
        parts=parts,
        dtype=dtype,
        state_dtype=state_dtype,
    )
    return Case("delta_net_step_fused", f"{name}-{parts}-{dtype}", make, is_full, mutates=("pool",))


_STEP_CASES = [
    _step_case("one-token", TINY, (1,), (0,), (1, 1)),
    _step_case("one-token-after-five", TINY, (1,), (5,), (3, 3), torch.float32),
    _step_case("mixed", TINY, (1, 3, 0, 2), (2, 0, 3, 1), (2, 4)),
    # A float32 result shows on which side of a tie a state was rounded: one sequence has it, the other its state.
    _step_case("bf16-state", TINY, (2, 0), (0, 3), (2, 2), state_dtype=_BF16),
    _step_case("fp16-state", TINY, (2, 0), (0, 3), (1, 1), state_dtype=_F16),
    _step_case("122b-one-row", QWEN_122B, (1,), (1,), (3, 3), is_full=True),
    _step_case("122b-4x3-rows", QWEN_122B, (3, 3, 3, 3), (3, 1, 2, 0), (3, 3), is_full=True),
    _step_case("122b-own-gates", QWEN_122B, (2,), (1,), (3, 12), torch.float32, is_full=True),
    _step_case("122b-bf16-state", QWEN_122B, (1, 0), (0, 1), (3, 3), state_dtype=_BF16, is_full=True),
    _step_case("122b-fp16-state", QWEN_122B, (1, 0), (0, 1), (3, 3), state_dtype=_F16, is_full=True),
]


def _gated_norm_inputs(
    device: torch.device, shape: tuple[int, int, int], parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    rows, heads, value_dim = shape
    draw = partial(torch.randn, generator=generator(rows + heads + parts))
    width = heads * value_dim
    # z is the middle of a wider projection.
    joined = draw(parts, rows, width + 48).to(device)
    return {
        "mixed": draw(rows, heads, value_dim).to(device),
        "z_parts": joined[:, :, 32 : 32 + width],
        "weight": (1 + 0.1 * draw(value_dim)).to(device),
        "eps": 1e-6,
        "dtype": dtype,
    }


_ROWS_CASES = fused_rows_cases(
    "gated_norm_fused", _gated_norm_inputs, [(2, 128, 1), (4, 64, 3), (2, 128, 2)], [(64, 128, 3), (32, 128, 2)]
)


CASES = [*_NET_CASES, *_STEP_CASES, *_ROWS_CASES]
