"""Inputs of attention's operations."""

from functools import partial
from typing import Any

import torch

from onebox.formats.kv_pages import allocate, write_tokens
from onebox.kernels.attention.frequencies import rotary_frequencies
from onebox.kernels.common.case import Case, fused_rows_cases, generator
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.yarn import Yarn

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

    heads is (query heads, KV heads, head dimension). Each sequence has its own generator; all pages are in one pool.
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
    return Case("paged_attention_fused", title, partial(_rows_inputs, **shape), is_full)


def _decode(title: str, is_full: bool = False, **shape: Any) -> Case:
    title = f"{shape['name']}-{'x'.join(map(str, shape['heads']))}-{title}"
    return Case("paged_attention", title, partial(make_inputs, **shape), is_full)


def _prefill(title: str, is_full: bool = False, **shape: Any) -> Case:
    title = f"{shape['name']}-{'x'.join(map(str, shape['heads']))}-{title}"
    return Case("paged_attention_prefill", title, partial(_prefill_inputs, **shape), is_full)


_FORMATS = ("bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4")
_TINY, _122B, _35B = (4, 2, 32), (32, 2, 256), (16, 2, 256)

_PAGED_CASES = [
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
    *(_prefill("many", True, name=name, heads=_122B, starts=[64], rows=[1100]) for name in ("fp8", "turboquant_k4v4")),
    *(_decode("long", True, name=name, heads=_122B, lengths=[15000], rows=[1]) for name in _FORMATS),
    # One visible token: nothing is rounded in bfloat16, so codes can be compared.
    _rows("gated", True, name="bf16", heads=_122B, lengths=[1, 1, 1], rows=[1, 1, 1]),
    _decode("decode", True, name="turboquant_k3v2", heads=_122B, lengths=[1300, 700], rows=[3, 3]),
    _decode("decode", True, name="turboquant_k4v4", heads=_35B, lengths=[1300, 700], rows=[3, 1]),
    _prefill("prefill", True, name="turboquant_k4v4", heads=_35B, starts=[64], rows=[130]),
    _decode("decode", True, name="bf16", heads=_35B, lengths=[1300], rows=[9]),
]


_THETA = 1e7
_TRAINED_TOKENS = 262_144
_YARN = Yarn(4.0, _TRAINED_TOKENS, attention_factor=1.1386294361119891)
_YARN_TOKENS = 1_010_000


def _positions(rows: int, is_image: bool, num_tokens: int) -> torch.Tensor:
    """[3, R]: for text all axes equal, up to the longest context; for an image the axes differ."""
    if is_image:
        return torch.randint(0, num_tokens, (3, rows), generator=generator(rows))
    return torch.arange(num_tokens - rows, num_tokens).expand(3, rows)


def _table(
    device: torch.device, rows: int, rotary_dim: int, section: tuple[int, ...], is_image: bool, is_yarn: bool
) -> dict[str, Any]:
    return {
        "positions": _positions(rows, is_image, _YARN_TOKENS if is_yarn else _TRAINED_TOKENS).to(device),
        "frequencies": rotary_frequencies(_THETA, rotary_dim, _YARN if is_yarn else None).to(device),
        "mrope_section": section,
        "scale": _YARN.attention_factor if is_yarn else 1.0,
    }


def _rotation(
    device: torch.device, rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> dict[str, Any]:
    (num_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
    draw = partial(torch.randn, generator=generator(rows * num_heads * head_dim))
    sizes = [num_heads * 2 * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = (2 * draw(rows, sum(sizes))).to(dtype).to(device)
    angles = 3 * draw(rows, rotary_dim // 2)
    q_gate, k, _ = torch.split(fused, sizes, dim=-1)
    return {
        "q_gate": q_gate,
        "k": k,
        "q_weight": (0.1 * draw(head_dim)).to(torch.bfloat16).to(device),
        "k_weight": (0.1 * draw(head_dim)).to(torch.bfloat16).to(device),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "eps": 1e-6,
    }


def _rotation_case(rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_rotation, rows=rows, heads=heads, dims=dims, dtype=dtype)
    return Case("qk_norm_rope", f"{rows}x{heads[0]}x{heads[1]}x{dims[0]}-{dtype}", make, is_full)


_ROPE_CASES = [
    *(
        Case(
            "rotary_table",
            f"{rows}x{rotary_dim}-{'image' if is_image else 'text'}{'-yarn' if is_yarn else ''}",
            partial(_table, rows=rows, rotary_dim=rotary_dim, section=section, is_image=is_image, is_yarn=is_yarn),
            is_full,
        )
        for rows, rotary_dim, section, is_image, is_yarn, is_full in [
            (1, 8, (2, 1, 1), False, False, False),
            (5, 16, (4, 2, 2), True, False, False),
            (3, 64, (11, 11, 10), True, False, False),
            (3, 64, (11, 11, 10), True, True, False),
            (0, 8, (2, 1, 1), False, False, False),
            (3, 64, (11, 11, 10), False, False, True),
            (512, 64, (11, 11, 10), True, False, True),
            (512, 64, (11, 11, 10), False, True, True),
        ]
    ),
    _rotation_case(1, (4, 2), (32, 8), torch.bfloat16, False),
    _rotation_case(3, (2, 1), (64, 16), torch.float32, False),
    _rotation_case(2, (3, 1), (24, 24), torch.bfloat16, False),
    _rotation_case(0, (2, 1), (32, 8), torch.bfloat16, False),
    _rotation_case(3, (32, 2), (256, 64), torch.bfloat16, True),
    _rotation_case(512, (16, 2), (256, 64), torch.bfloat16, True),
    _rotation_case(3, (32, 2), (256, 64), torch.float32, True),
]


def _inputs(
    device: torch.device, name: str, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * head_dim + len(name)))
    num_pages = rows // PAGE_TOKENS + 2
    slots = torch.randperm(num_pages * PAGE_TOKENS, generator=generator(rows))[:rows]
    key, value = draw(rows, kv_heads, head_dim), draw(rows, kv_heads, head_dim)
    if rows > 4:
        slots[1] = -1
        key[2] *= 1e-6
        value[2] = 0
        key[3] *= 1e6
        value[3, :, 0] = 300.0  # one coordinate much larger than the others
    return {
        "pages": allocate(KVFormat.parse(name), num_pages, PAGE_TOKENS, kv_heads, head_dim, device),
        "key": key.to(dtype).to(device),
        "value": value.to(dtype).to(device),
        "slots": slots.to(device),
    }


def _case(name: str, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_inputs, name=name, rows=rows, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    return Case("kv_write", f"{name}-{rows}x{kv_heads}x{head_dim}-{dtype}", make, is_full, ("pages",))


_WRITE_FORMATS = ("bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4")

_WRITE_CASES = [
    *(_case(name, 7, 2, 32, torch.bfloat16, False) for name in (*_WRITE_FORMATS, "turboquant_k3v2")),
    _case("turboquant_k8v4", 5, 1, 64, torch.float32, False),
    _case("turboquant_k4v4", 1, 2, 256, torch.bfloat16, False),
    _case("fp8", 0, 2, 32, torch.bfloat16, False),
    *(_case(name, 3, 2, 256, torch.bfloat16, True) for name in _WRITE_FORMATS),
    *(_case(name, 300, 2, 256, torch.bfloat16, True) for name in (*_WRITE_FORMATS, "turboquant_k3v2")),
]


def _heads_inputs(
    device: torch.device, rows: int, heads: tuple[int, int], dims: tuple[int, int], parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    (num_heads, num_kv_heads), (head_dim, half) = heads, dims
    draw = partial(torch.randn, generator=generator(rows + num_heads + head_dim))
    angle = 10 * draw(rows, half)
    tensors = {
        "qkv_parts": draw(parts, rows, 2 * (num_heads + num_kv_heads) * head_dim),
        "q_weight": 0.1 * draw(head_dim),
        "k_weight": 0.1 * draw(head_dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return moved | {"eps": 1e-6, "num_kv_heads": num_kv_heads, "dtype": dtype}


def _heads_case(
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    parts: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_heads_inputs, rows=rows, heads=heads, dims=dims, parts=parts, dtype=dtype)
    return Case("qk_norm_rope_fused", f"{rows}x{heads}x{dims}-{parts}-{dtype}", make, is_full)


def _paged_inputs(device: torch.device, kv: str, **shape: Any) -> dict[str, Any]:
    """`_heads_inputs` with pages to write; the second row is skipped."""
    arguments = _heads_inputs(device, **shape)
    pages = allocate(KVFormat.parse(kv), 4, 64, arguments.pop("num_kv_heads"), shape["dims"][0], device)
    slots = torch.randperm(4 * 64, generator=generator(shape["rows"]))[: shape["rows"]]
    slots[1:2] = -1
    return {**arguments, "pages": pages, "slots": slots.to(device)}


def _paged_case(
    kv: str,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_paged_inputs, kv=kv, rows=rows, heads=heads, dims=dims, parts=3, dtype=dtype)
    return Case("kv_write_fused", f"{kv}-{rows}x{heads}x{dims}-{dtype}", make, is_full, mutates=("pages",))


_HEADS_CASES = [
    _heads_case(1, (2, 1), (64, 16), 1),
    _heads_case(3, (4, 2), (96, 32), 3, torch.float32),
    _heads_case(0, (2, 1), (64, 16), 2),
    _heads_case(1, (32, 2), (256, 32), 3, is_full=True),
    _heads_case(12, (16, 2), (256, 32), 3, is_full=True),
    _paged_case("bf16", 3, (4, 2), (64, 16)),
    _paged_case("bf16", 2, (2, 1), (128, 32), torch.float32),
    _paged_case("fp8", 2, (4, 2), (64, 16), torch.float32),
    _paged_case("bf16", 1, (32, 2), (256, 32), is_full=True),
    _paged_case("bf16", 12, (32, 2), (256, 32), is_full=True),
]


def _gated_inputs(device: torch.device, shape: tuple[int, int, int], parts: int, dtype: torch.dtype) -> dict[str, Any]:
    rows, heads, head_dim = shape
    draw = partial(torch.randn, generator=generator(rows + heads + parts))
    qkv = 3 * draw(parts, rows, 2 * heads * head_dim + 4 * head_dim)
    return {"attended": draw(rows, heads, head_dim).to(dtype).to(device), "qkv_parts": qkv.to(device)}


_ROWS_CASES = fused_rows_cases(
    "attention_gate_fused", _gated_inputs, [(2, 64, 1), (2, 256, 2), (2, 64, 2)], [(32, 256, 3), (16, 256, 3)]
)

_GATE_HEADS = 4


def _gate_inputs(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * width))
    heads = (rows, _GATE_HEADS, width // _GATE_HEADS)
    # Logits large enough that some sigmoids are almost 0 or 1.
    gate = 12 * draw(*heads)
    return {"attended": draw(*heads).to(dtype).to(device), "gate": gate.to(dtype).to(device)}


def _gate_case(rows: int, width: int, dtype: torch.dtype, is_full: bool = False) -> Case:
    make = partial(_gate_inputs, rows=rows, width=width, dtype=dtype)
    return Case("attention_gate", f"{rows}x{width}-{dtype}", make, is_full)


_GATE_CASES = [
    _gate_case(1, 64, torch.bfloat16),
    _gate_case(3, 200, torch.float32),
    _gate_case(2, 1100, torch.bfloat16),
    _gate_case(0, 64, torch.bfloat16),
    _gate_case(3, 32 * 256, torch.bfloat16, is_full=True),
    _gate_case(512, 16 * 256, torch.bfloat16, is_full=True),
]

CASES = [*_PAGED_CASES, *_ROPE_CASES, *_WRITE_CASES, *_HEADS_CASES, *_ROWS_CASES, *_GATE_CASES]
