"""The parts that paged attention is made of: the cuts between pieces, and codes looked up in registers."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from onebox.formats.bits import pack_bits
from onebox.formats.kv_pages import turboquant_tables
from onebox.formats.kv_turboquant import turboquant_levels
from onebox.kernels.attention.pieces import count_pieces, piece_bounds
from onebox.kernels.attention.planes import (
    E4M3_TO_BFLOAT16,
    LOOKUP_3,
    LOOKUP_4,
    are_words,
    load_keys,
    load_tables,
    load_values,
    lookup_table,
    num_planes,
    store_decoded,
)
from onebox.spec.kv import PAGE_TOKENS
from onebox.spec.pieces import piece_count

CPU = torch.device("cpu")


@triton.jit
def pieces_kernel(tokens_ptr, out_ptr, DOUBLINGS: tl.constexpr):  # noqa: N803
    index = tl.program_id(0)
    start, end = piece_bounds(index, DOUBLINGS)
    tl.store(out_ptr + 3 * index, start)
    tl.store(out_ptr + 3 * index + 1, end)
    tl.store(out_ptr + 3 * index + 2, count_pieces(tl.load(tokens_ptr + index), DOUBLINGS))


@pytest.mark.parametrize("doublings", [2, 3])
def test_each_token_is_in_one_piece_and_the_counts_agree(doublings, device):
    number = 300
    tokens = torch.randint(0, 200_000, (number,), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(number, 3, dtype=torch.int32, device=device)
    pieces_kernel[(number,)](tokens.to(torch.int32).to(device), out, DOUBLINGS=doublings)
    starts, ends, counts = out.T.tolist()
    assert starts[0] == 0
    assert starts[1:] == ends[:-1]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    assert all(shorter <= longer and shorter % PAGE_TOKENS == 0 for shorter, longer in pairwise(lengths))
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert piece_count(start, doublings) == index
        assert {piece_count(seen, doublings) for seen in (start + 1, (start + end) // 2, end)} == {index + 1}
    assert counts == [piece_count(seen, doublings) for seen in tokens.tolist()]


@triton.jit
def planes_kernel(
    codes_ptr,
    levels_ptr,
    table_ptr,
    key_ptr,
    value_ptr,
    dim: tl.constexpr,
    bits: tl.constexpr,
    tile: tl.constexpr,
):
    """Decodes codes as keys and as values, and stores their planes."""
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    value_dtype: tl.constexpr = value_ptr.dtype.element_ty
    key_table, value_table = load_tables(table_ptr, table_ptr, bits, bits)
    token = tl.arange(0, tile)
    store_decoded(
        key_ptr, token, load_keys((codes_ptr, None, levels_ptr, key_table), token, dim, bits, dtype, False), dim
    )
    stored = (codes_ptr, None, levels_ptr, value_table)
    store_decoded(value_ptr, token, load_values(stored, token, None, dim, bits, value_dtype, 0), dim)


def planes_of(x, bits):
    """Vectors [tokens, dim] as the planes of `planes.py`, one after the other."""
    tokens, dim = x.shape
    count = num_planes(dim, bits)
    return x.view(tokens, dim // count, count).transpose(1, 2).reshape(tokens, dim) if bits in (4, 8) else x


@pytest.mark.parametrize(("dim", "bits"), [(256, 2), (256, 3), (256, 4), (32, 4)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_planes_are_the_codecs_levels_exactly(dim, bits, dtype, device):
    """On a GPU the float16 ones come from the assembly, in the interpreter from plain operations: the same bits."""
    tokens = 32
    indices = torch.randint(0, 1 << bits, (tokens, dim), generator=torch.Generator().manual_seed(bits))
    codes = pack_bits(indices.to(torch.uint8), bits).to(device)
    found = [torch.zeros(tokens, dim, dtype=dtype, device=device) for _ in range(2)]
    levels, table = turboquant_tables(dim, bits, device).levels, lookup_table(dim, bits, device)
    read = codes.view(torch.int16) if are_words(dim, bits) else codes
    planes_kernel[(1,)](read, levels, table, *found, dim=dim, bits=bits, tile=tokens)
    expected = planes_of(turboquant_levels(dim, bits).to(dtype)[indices], bits)
    for planes in found:
        assert torch.equal(planes.cpu(), expected)


@pytest.mark.parametrize("is_float32", [False, True])
def test_planes_of_fp8_are_the_codes_exactly(is_float32, device):
    """All codes but the two NaN, which come with a scale that is NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[:, 0x7F] = codes[:, 0xFF] = 0
    dtypes = [torch.float32] * 2 if is_float32 else [torch.float16, torch.bfloat16]
    found = [torch.zeros(codes.shape, dtype=dtype, device=device) for dtype in dtypes]
    planes_kernel[(1,)](codes.view(torch.int16).to(device), None, None, *found, dim=256, bits=8, tile=16)
    expected = planes_of(codes.view(torch.float8_e4m3fn).to(torch.float32), 8)
    assert torch.equal(found[0].cpu().to(torch.float32), expected)
    assert torch.equal(found[1].cpu().to(torch.float64), expected.to(torch.float64) * 2.0**-120)


def prmt(a, b, selector):
    """Four of eight bytes; a selector's nibble with its top bit set asks for the byte's sign in all bits."""
    stored = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [(selector >> (4 * place)) & 15 for place in range(4)]
    picked = [stored[nibble & 7] if nibble < 8 else 255 * (stored[nibble & 7] >> 7) for nibble in nibbles]
    return int.from_bytes(picked, "little")


def lop3(a, b, c, table):
    """Any function of three bits, by its table."""
    bits = range(32)
    places = [((a >> bit & 1) << 2) | ((b >> bit & 1) << 1) | (c >> bit & 1) for bit in bits]
    return sum((table >> place & 1) << bit for bit, place in zip(bits, places, strict=True))


INSTRUCTIONS = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
}


def executed(text, registers):
    """The registers after PTX that uses INSTRUCTIONS alone."""
    lines = [line.strip(" ;") for line in text.strip("{} \n").splitlines()]
    for line in lines[1:]:  # the first one declares
        name, _, operands = line.partition(" ")
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
    return registers


def words_of(dim, bits):
    return [word & 0xFFFFFFFF for word in lookup_table(dim, bits, CPU).tolist()]


def halves_of(words):
    return torch.tensor([word >> shift & 0xFFFF for word in words for shift in (0, 16)], dtype=torch.uint16)


def test_the_assembly_of_4_bits_gives_the_levels_exactly():
    """Each result has one code of either word."""
    levels = turboquant_levels(256, 4).half().view(torch.uint16)
    assert torch.equal(turboquant_levels(256, 4), -turboquant_levels(256, 4).flip(0))
    table = {f"${5 + 2 * index}": word for index, word in enumerate(words_of(256, 4))}
    for first in range(256):
        stored = [first, (first * 7 + 3) % 256, (first * 11 + 5) % 256, 255 - first]
        found = executed(LOOKUP_4.value, {**table, "$4": int.from_bytes(stored, "little")})
        codes = torch.tensor(stored).view(2, 2)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(2, 4)
        for plane in range(4):
            assert torch.equal(halves_of([found[f"${plane}"]]).int(), levels.int()[nibbles[:, plane]])


def test_the_assembly_of_fp8_moves_bits_to_those_of_bfloat16():
    for first in range(256):
        stored = [first, (first * 7 + 3) % 256, (first * 11 + 5) % 256, 255 - first]
        found = executed(E4M3_TO_BFLOAT16.value, {"$2": int.from_bytes(stored, "little")})
        for plane, codes in enumerate((stored[::2], stored[1::2])):
            bits = [(code & 0x80) << 8 | (code & 0x7F) << 4 for code in codes]
            assert halves_of([found[f"${plane}"]]).tolist() == bits


@pytest.mark.parametrize("bits", [2, 3])
def test_the_assembly_of_fewer_bits_gives_the_levels_exactly(bits):
    levels = turboquant_levels(256, bits).half().view(torch.uint16)
    table = {f"${3 + 2 * index}": word for index, word in enumerate(words_of(256, bits)[:4])}
    codes = torch.cartesian_prod(torch.arange(1 << bits), torch.arange(1 << bits))
    for pair in codes.tolist():
        found = executed(LOOKUP_3.value, {**table, "$1": pair[0], "$2": pair[1]})
        assert halves_of([found["$0"]]).tolist() == levels.int()[pair].tolist()
