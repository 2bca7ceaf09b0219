"""Inputs of paged attention: each format, page and piece edges, draft rows, mixed and empty sequences."""

from functools import partial
from typing import Any

import torch

from onebox.formats.kv_pages import PAGE_TOKENS, allocate, write_tokens
from onebox.kernels.case import Case, generator
from onebox.spec.kv import KVFormat

__all__ = ["CASES", "make_inputs"]


def make_inputs(
    device: torch.device,
    name: str,
    heads: tuple[int, int, int],
    lengths: list[int],
    rows: list[int],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Arguments of `paged_attention`: sequence s has lengths[s] tokens in shuffled pages and rows[s] query rows.

    heads is (query heads, KV heads, head dimension). Tokens come from a generator per sequence, pages of one pool.
    """
    query_heads, kv_heads, dim = heads
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator(len(lengths)))
    pages = allocate(KVFormat.parse(name), sum(counts), PAGE_TOKENS, kv_heads, dim, torch.device("cpu"))
    table = torch.zeros(len(lengths), max(counts, default=0) or 1, dtype=torch.int32)
    for index, (count, owned) in enumerate(zip(counts, torch.split(order, counts), strict=True)):
        table[index, :count] = owned
        positions = torch.arange(lengths[index])
        slots = owned[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        draw = partial(torch.randn, lengths[index], kv_heads, dim, generator=generator(index))
        write_tokens(pages, draw().to(torch.bfloat16), draw().to(torch.bfloat16), slots)
    query = 2 * torch.randn(sum(rows), query_heads, dim, generator=generator(sum(lengths)))
    return {
        "query": query.to(dtype).to(device),
        "pages": pages.to(device),
        "page_table": table.to(device),
        "context": torch.tensor(lengths, dtype=torch.int32, device=device),
        "cu_rows": torch.tensor([0, *rows], device=device).cumsum(0).to(torch.int32),
        "scale": dim**-0.5,
    }


def _prefill_inputs(device: torch.device, starts: list[int], rows: list[int], **shape: Any) -> dict[str, Any]:
    lengths = [start + count for start, count in zip(starts, rows, strict=True)]
    arguments = make_inputs(device, lengths=lengths, rows=rows, **shape)
    del arguments["context"]
    return {**arguments, "start": torch.tensor(starts, dtype=torch.int32, device=device)}


def _rows_inputs(device: torch.device, **shape: Any) -> dict[str, Any]:
    """As `make_inputs`, with a projection in three parts: each head's query, its gate, the keys and values."""
    arguments = make_inputs(device, **shape)
    rows, (query_heads, kv_heads, dim) = len(arguments["query"]), shape["heads"]
    width = 2 * (query_heads + kv_heads) * dim
    return {**arguments, "qkv_parts": torch.randn(3, rows, width, generator=generator(rows)).to(device)}


def _rows(title: str, is_full: bool = False, **shape: Any) -> Case:
    title = f"{shape['name']}-{'x'.join(map(str, shape['heads']))}-{title}"
    return Case("paged_attention_rows", title, partial(_rows_inputs, **shape), is_full)


def _decode(title: str, is_full: bool = False, **shape: Any) -> Case:
    title = f"{shape['name']}-{'x'.join(map(str, shape['heads']))}-{title}"
    return Case("paged_attention", title, partial(make_inputs, **shape), is_full)


def _prefill(title: str, is_full: bool = False, **shape: Any) -> Case:
    title = f"{shape['name']}-{'x'.join(map(str, shape['heads']))}-{title}"
    return Case("paged_attention_prefill", title, partial(_prefill_inputs, **shape), is_full)


_FORMATS = ("bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4")
_TINY, _122B, _35B = (4, 2, 32), (32, 2, 256), (16, 2, 256)

CASES = [
    *(_decode("drafts", name=name, heads=_TINY, lengths=[131, 70], rows=[3, 1]) for name in _FORMATS),
    _decode("one-token", name="fp8", heads=_TINY, lengths=[1], rows=[1], dtype=torch.float32),
    _decode("edges", name="bf16", heads=(3, 1, 64), lengths=[128, 64, 65], rows=[2, 1, 1], dtype=torch.float32),
    _decode("nothing-seen", name="bf16", heads=_TINY, lengths=[0, 2, 40], rows=[1, 3, 9]),
    _decode("narrow", name="turboquant_k3v2", heads=_TINY, lengths=[37], rows=[2], dtype=torch.float32),
    _decode("second-length", name="turboquant_k4v4", heads=(1, 1, 32), lengths=[8300], rows=[1], dtype=torch.float32),
    *(_prefill("cached", name=name, heads=(2, 1, 32), starts=[40], rows=[50]) for name in _FORMATS),
    _rows("gated", name="bf16", heads=(2, 1, 128), lengths=[131, 70], rows=[3, 1], dtype=torch.float32),
    _rows("narrow-heads", name="bf16", heads=_TINY, lengths=[40], rows=[2], dtype=torch.float32),
    _rows("rotated", name="turboquant_k4v4", heads=(2, 1, 128), lengths=[70], rows=[2], dtype=torch.float32),
    _prefill("mixed", name="bf16", heads=_TINY, starts=[0, 64], rows=[3, 5], dtype=torch.float32),
    _prefill("narrow", name="turboquant_k2v3", heads=(2, 1, 32), starts=[0], rows=[9], dtype=torch.float32),
    *(_decode("decode", True, name=name, heads=_122B, lengths=[1300, 700], rows=[3, 3]) for name in _FORMATS),
    *(_prefill("prefill", True, name=name, heads=_122B, starts=[64], rows=[130]) for name in _FORMATS),
    *(_decode("long", True, name=name, heads=_122B, lengths=[15000], rows=[1]) for name in _FORMATS),
    # Of one token there is nothing to round in bfloat16, so that codes can be compared.
    _rows("gated", True, name="bf16", heads=_122B, lengths=[1, 1, 1], rows=[1, 1, 1]),
    _decode("decode", True, name="turboquant_k3v2", heads=_122B, lengths=[1300, 700], rows=[3, 3]),
    _decode("decode", True, name="turboquant_k4v4", heads=_35B, lengths=[1300, 700], rows=[3, 1]),
    _prefill("prefill", True, name="turboquant_k4v4", heads=_35B, starts=[64], rows=[130]),
    _decode("decode", True, name="bf16", heads=_35B, lengths=[1300], rows=[9]),
]
