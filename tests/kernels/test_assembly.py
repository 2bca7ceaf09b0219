"""Inline assembly gives the bits of plain Triton, for every byte that a weight can hold. Only a GPU has both."""

import pytest
import torch
import triton
import triton.language as tl

from onebox.kernels.common.few_bits import (
    int2_bytes_by_assembly,
    int2_bytes_plainly,
    int2_values_by_assembly,
    int2_values_plainly,
    int3_bytes_by_assembly,
    int3_bytes_plainly,
    int3_pair_by_assembly,
    int3_pair_plainly,
    int3_spare_by_assembly,
    int3_spare_plainly,
)
from onebox.kernels.common.float_codes import (
    e2m1_by_assembly,
    e2m1_plainly,
    e2m1_quads_by_assembly,
    e2m1_quads_plainly,
    e4m3_by_assembly,
    e4m3_plainly,
)
from onebox.kernels.common.int_planes import (
    int4_halves_by_assembly,
    int4_halves_plainly,
    int6_quarters_by_assembly,
    int6_quarters_plainly,
)

BYTES = 256


@triton.jit
def decode_kernel(bytes_ptr, scale_ptr, out_ptr, WAY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the two results of a decoding, or its one twice."""
    at = tl.arange(0, BLOCK)
    codes = tl.load(bytes_ptr + at)
    if WAY == "e4m3-assembly":
        first = e4m3_by_assembly(codes)
        second = first
    elif WAY == "e4m3-plain":
        first = e4m3_plainly(codes)
        second = first
    elif WAY == "e2m1-assembly":
        first, second = e2m1_by_assembly(codes, tl.load(scale_ptr + at))
    elif WAY == "e2m1-plain":
        first, second = e2m1_plainly(codes, tl.load(scale_ptr + at))
    elif WAY == "quads-assembly" or WAY == "quads-plain":
        rows = tl.reshape(codes, (BLOCK // 16, 16))
        scale = tl.reshape(tl.load(scale_ptr + at // 4 * 4), (BLOCK // 16, 16))
        if WAY == "quads-assembly":
            first, second = e2m1_quads_by_assembly(rows, scale)
        else:
            first, second = e2m1_quads_plainly(rows, scale)
        first = tl.reshape(first, (BLOCK,))
        second = tl.reshape(second, (BLOCK,))
    elif WAY == "int4-assembly":
        first, second = int4_halves_by_assembly(codes)
    else:
        first, second = int4_halves_plainly(codes)
    tl.store(out_ptr + at, first)
    tl.store(out_ptr + BLOCK + at, second)


@pytest.mark.gpu
@pytest.mark.parametrize("code", ["e4m3", "e2m1", "quads", "int4"])
def test_assembly_and_plain_decoding_give_the_same_bits_for_every_byte(code, device):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    codes = torch.arange(BYTES, device=device).to(torch.uint8)
    dtype = torch.int8 if code == "int4" else torch.bfloat16
    # One warp: a thread then has eight bytes, and quads need the four of one.
    for exponent in range(-6, 9):  # the magnitudes of E4M3 group scales
        scale = torch.linspace(1, 1.875, 8, device=device).repeat(BYTES // 8) * 2.0 ** (118 + exponent)
        out = torch.empty(2, 2, BYTES, dtype=dtype, device=device)
        for way, result in zip(("assembly", "plain"), out, strict=True):
            decode_kernel[(1,)](codes, scale.to(torch.bfloat16), result, WAY=f"{code}-{way}", BLOCK=BYTES, num_warps=1)
        assert torch.equal(out[0].view(torch.uint8), out[1].view(torch.uint8))


@triton.jit
def few_bits_kernel(words_ptr, out_ptr, WAY: tl.constexpr, BY_ASSEMBLY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the results of a decoding of INT3 or INT2 codes: of three words, or of the first alone."""
    at = tl.arange(0, BLOCK)
    first, second, third = (
        tl.load(words_ptr + at),
        tl.load(words_ptr + BLOCK + at),
        tl.load(words_ptr + 2 * BLOCK + at),
    )
    if WAY == "int3-bytes":
        found = (int3_bytes_by_assembly if BY_ASSEMBLY else int3_bytes_plainly)(first, second, third)
    elif WAY == "int2-bytes":
        found = (int2_bytes_by_assembly if BY_ASSEMBLY else int2_bytes_plainly)(first)
    elif WAY == "int3-pair":
        found = (int3_pair_by_assembly if BY_ASSEMBLY else int3_pair_plainly)(first)
    elif WAY == "int3-spare":
        found = (int3_spare_by_assembly if BY_ASSEMBLY else int3_spare_plainly)(first, second, third)
    else:
        found = (int2_values_by_assembly if BY_ASSEMBLY else int2_values_plainly)(first, WAY == "int2-upper")
    for i in tl.static_range(len(found)):
        tl.store(out_ptr + i * BLOCK + at, found[i])


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["int3-bytes", "int2-bytes", "int3-pair", "int3-spare", "int2-upper", "int2-lower"])
def test_assembly_and_plain_decoding_give_the_same_bits_for_words_of_few_bits(way, device):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    in_bytes = way.endswith("bytes")
    words = torch.randint(-(2**31), 2**31, (3, 256), device=device).to(torch.int32)
    given = words.view(torch.uint8) if in_bytes else words
    out = torch.zeros(2, 8, given.shape[1], dtype=torch.int8 if in_bytes else torch.bfloat16, device=device)
    for by_assembly, result in zip((True, False), out, strict=True):
        few_bits_kernel[(1,)](given, result, WAY=way, BY_ASSEMBLY=by_assembly, BLOCK=given.shape[1])
    assert torch.equal(out[0].view(torch.uint8), out[1].view(torch.uint8))
    assert bool(out[0].count_nonzero())


@triton.jit
def quarters_kernel(upper_ptr, pairs_ptr, out_ptr, BY_ASSEMBLY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the four results of a decoding; kt 1 has the upper bits of kt 0 in the opposite order."""
    at = tl.arange(0, BLOCK)
    first = tl.load(upper_ptr + at)
    second = tl.load(upper_ptr + BLOCK - 1 - at)
    pairs = tl.load(pairs_ptr + at)
    a, b, c, d = (
        int6_quarters_by_assembly(first, second, pairs) if BY_ASSEMBLY else int6_quarters_plainly(first, second, pairs)
    )
    tl.store(out_ptr + at, a)
    tl.store(out_ptr + BLOCK + at, b)
    tl.store(out_ptr + 2 * BLOCK + at, c)
    tl.store(out_ptr + 3 * BLOCK + at, d)


@pytest.mark.gpu
def test_assembly_and_plain_decoding_give_the_same_codes_of_six_bits(device):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    upper = torch.arange(BYTES, device=device).to(torch.uint8)
    for rolled in range(0, BYTES, 5):
        out = torch.empty(2, 4, BYTES, dtype=torch.int8, device=device)
        for by_assembly, result in zip((True, False), out, strict=True):
            quarters_kernel[(1,)](upper, upper.roll(rolled), result, BY_ASSEMBLY=by_assembly, BLOCK=BYTES)
        assert torch.equal(out[0], out[1])
