"""Inputs of a block drafter's operations."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.common.case import Case, generator
from onebox.kernels.draft.tensors import BlockContext, BlockMask, ContextRows
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["CASES", "attention_inputs", "context_inputs"]

_TINY, _122B = (4, 2, 32), (32, 8, 128)
"""(query heads, KV heads, head dimension)."""


def _rotation(device: torch.device, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 6 * torch.rand(rows, dim // 2, generator=generator(rows))
    return angles.cos().to(device), angles.sin().to(device)


def context_inputs(
    device: torch.device,
    heads: tuple[int, int, int],
    layers: list[int],
    rows: list[int],
    seen: list[int],
    ring: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    num_parts: int = 1,
) -> dict[str, Any]:
    """Arguments of `write_context`: sequence s has rows[s] rows, the last of them token seen[s] - 1.

    `layers` are layer_places. The last row of all has no slot in the pages, and so is not written.
    """
    _, kv_heads, dim = heads
    count, num_sequences = sum(rows), len(rows)
    draw = partial(torch.randn, generator=generator(count))
    tables = [-(-length // PAGE_TOKENS) for length in seen]
    mapping = []
    for place, (number, length) in enumerate(zip(rows, seen, strict=True)):
        first = sum(tables[:place]) * PAGE_TOKENS
        mapping += [first + token for token in range(length - number, length)]
    if mapping:
        mapping[-1] = -1
    num_sliding, num_full = sum(place >= 0 for place in layers), sum(place < 0 for place in layers)
    kv = draw(num_parts, count, len(layers) * 2 * kv_heads * dim)
    edges = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    slots = torch.arange(num_sequences, dtype=torch.int32).flip(0)
    numbers = edges, slots, torch.tensor(seen, dtype=torch.int32), torch.tensor(mapping, dtype=torch.int64)
    return {
        "kv_parts": (kv if num_parts > 1 else kv.to(dtype)).to(device),
        "weights": (0.1 * draw(len(layers), dim)).to(device),
        "rotation": _rotation(device, count, dim),
        "rings": torch.zeros(num_sequences, num_sliding, 2, kv_heads, ring, dim, dtype=dtype, device=device),
        "pages": torch.zeros(sum(tables), num_full, 2, kv_heads, PAGE_TOKENS, dim, dtype=dtype, device=device),
        "layer_places": torch.tensor(layers, dtype=torch.int32, device=device),
        "rows": ContextRows(*(part.to(device) for part in numbers)),
        "eps": 1e-6,
    }


def _context(title: str, is_full: bool = False, **shape: Any) -> Case:
    return Case("write_context", title, partial(context_inputs, **shape), is_full, ("rings", "pages"))


_CONTEXT_CASES = [
    _context("mixed", heads=_TINY, layers=[0, -1, 1], rows=[3, 1], seen=[131, 70]),
    _context("parts", heads=_TINY, layers=[0, -1], rows=[2, 0, 2], seen=[64, 3, 66], dtype=torch.float32, num_parts=3),
    _context("longer-than-the-ring", heads=_TINY, layers=[0], rows=[70], seen=[80], ring=64, dtype=torch.float32),
    _context("nothing", heads=_TINY, layers=[0, -1], rows=[0], seen=[0]),
    _context("122B", True, heads=_122B, layers=[0, 1, 2, 3, 4, -1], rows=[13], seen=[700], ring=4160, num_parts=4),
    _context("122B-prefill", True, heads=_122B, layers=[0, 1, 2, 3, 4, -1], rows=[130], seen=[700], ring=4160),
]


def _heads_inputs(
    device: torch.device, heads: tuple[int, int, int], rows: int, num_parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    query_heads, kv_heads, dim = heads
    draw = partial(torch.randn, generator=generator(rows))
    q_weight, k_weight = (0.1 * draw(2, dim)).to(device)
    return {
        "qkv_parts": draw(num_parts, rows, (query_heads + 2 * kv_heads) * dim).to(device),
        "q_weight": q_weight,
        "k_weight": k_weight,
        "rotation": _rotation(device, rows, dim),
        "eps": 1e-6,
        "num_kv_heads": kv_heads,
        "dtype": dtype,
    }


def _heads(heads: tuple[int, int, int], rows: int, num_parts: int, dtype: torch.dtype, is_full: bool = False) -> Case:
    make = partial(_heads_inputs, heads=heads, rows=rows, num_parts=num_parts, dtype=dtype)
    return Case("block_heads", f"{rows}x{heads[0]}x{heads[2]}-{num_parts}-{dtype}", make, is_full)


_HEADS_CASES = [
    _heads(_TINY, 3, 1, torch.bfloat16),
    _heads((3, 1, 64), 2, 3, torch.float32),
    _heads(_TINY, 0, 1, torch.bfloat16),
    _heads(_122B, 8, 4, torch.bfloat16, is_full=True),
]


def attention_inputs(
    device: torch.device,
    heads: tuple[int, int, int],
    lengths: list[int],
    size: int,
    mask: BlockMask,
    dtype: torch.dtype = torch.bfloat16,
    ring: int = 192,
) -> dict[str, Any]:
    """Arguments of `block_attention`: blocks of `size` rows behind contexts of these lengths, in shuffled pages.

    What no row may see, in rings and pages, is NaN.
    """
    query_heads, kv_heads, dim = heads
    count = len(lengths)
    draw = partial(torch.randn, generator=generator(sum(lengths)))
    query, key, value = (draw(count * size, number, dim).to(dtype) for number in (query_heads, kv_heads, kv_heads))
    numbers = [-(-length // PAGE_TOKENS) for length in lengths]
    order = torch.randperm(sum(numbers), generator=generator(count)).to(torch.int32)
    table = torch.zeros(count, max(*numbers, 1), dtype=torch.int32)
    shape = (count, 2, kv_heads, ring, dim) if mask.window else (max(sum(numbers), 1), 2, kv_heads, PAGE_TOKENS, dim)
    cached = torch.full(shape, float("nan"), dtype=dtype)
    for place, (length, own) in enumerate(zip(lengths, torch.split(order, numbers), strict=True)):
        table[count - 1 - place, : len(own)] = own
        start = max(0, length - mask.window + 1) if mask.window else 0
        for token in range(start, length):
            at = (place, token % ring) if mask.window else (int(own[token // PAGE_TOKENS]), token % PAGE_TOKENS)
            cached[at[0], :, :, at[1]] = draw(2, kv_heads, dim).to(dtype)
    slots, sequences = torch.arange(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32).flip(0)
    parts = torch.tensor(lengths, dtype=torch.int32), slots, sequences, table
    return {
        "query": (2 * query).to(device),
        "key": key.to(device),
        "value": value.to(device),
        "cached": cached.to(device),
        "context": BlockContext(*(part.to(device) for part in parts)),
        "mask": mask,
        "scale": dim**-0.5,
    }


def _attention(op: str, title: str, is_full: bool = False, **shape: Any) -> Case:
    mask = shape["mask"]
    kind = f"{'causal' if mask.is_causal else 'both-ways'}-{mask.window or 'full'}"
    return Case(op, f"{title}-{kind}", partial(attention_inputs, **shape), is_full)


_FULL, _SLIDING = BlockMask(False, None), BlockMask(True, 100)
_ATTENTION_CASES = [
    _attention("block_attention", "two", heads=_TINY, lengths=[131, 70], size=3, mask=_FULL),
    _attention("block_attention", "two", heads=_TINY, lengths=[131, 70], size=3, mask=_SLIDING),
    _attention("block_attention", "wrapped", heads=_TINY, lengths=[700], size=16, mask=_SLIDING, dtype=torch.float32),
    _attention(
        "block_attention", "short", heads=(3, 1, 64), lengths=[0, 5], size=2, mask=_SLIDING, dtype=torch.float32
    ),
    _attention("block_attention", "edges", heads=_TINY, lengths=[64, 0], size=4, mask=BlockMask(True, None)),
    _attention("block_attention", "narrow", heads=_TINY, lengths=[30], size=8, mask=BlockMask(False, 3)),
    _attention("block_attention", "122B", True, heads=_122B, lengths=[1300], size=8, mask=_FULL),
    _attention(
        "block_attention", "122B", True, heads=_122B, lengths=[4500], size=16, mask=BlockMask(True, 4096), ring=4160
    ),
    _attention("block_attention_fused", "rows", heads=_TINY, lengths=[70], size=2, mask=_SLIDING, dtype=torch.float32),
    _attention("block_attention_fused", "122B", True, heads=_122B, lengths=[1300, 700], size=13, mask=_FULL),
    _attention(
        "block_attention_fused",
        "122B",
        True,
        heads=_122B,
        lengths=[4500],
        size=13,
        mask=BlockMask(True, 4096),
        ring=4160,
    ),
]


def _swiglu_inputs(device: torch.device, rows: int, inner: int, num_parts: int, dtype: torch.dtype) -> dict[str, Any]:
    parts = torch.randn(num_parts, rows, 2 * inner, generator=generator(rows))
    return {"gate_up_parts": parts.to(device), "dtype": dtype}


def _swiglu(rows: int, inner: int, num_parts: int, dtype: torch.dtype, is_full: bool = False) -> Case:
    make = partial(_swiglu_inputs, rows=rows, inner=inner, num_parts=num_parts, dtype=dtype)
    return Case("swiglu_fused", f"{rows}x{inner}-{num_parts}-{dtype}", make, is_full)


_SWIGLU_CASES = [
    _swiglu(1, 128, 1, torch.bfloat16),
    _swiglu(3, 256, 3, torch.float32),
    _swiglu(0, 128, 1, torch.bfloat16),
    _swiglu(8, 9216, 4, torch.bfloat16, is_full=True),
]

CASES = [*_CONTEXT_CASES, *_HEADS_CASES, *_ATTENTION_CASES, *_SWIGLU_CASES]
