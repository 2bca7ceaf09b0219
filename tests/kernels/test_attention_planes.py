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
from onebox.kernels.attention.planes import LOOKUP_3, LOOKUP_4, load_planes, load_tables, lookup_table
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
    scale_ptr,
    levels_ptr,
    table_ptr,
    low_ptr,
    high_ptr,
    factor_ptr,
    end,
    dim: tl.constexpr,
    bits: tl.constexpr,
    tile: tl.constexpr,
):
    dtype: tl.constexpr = low_ptr.dtype.element_ty
    tables = load_tables(table_ptr, table_ptr, bits, bits, dtype)
    token = tl.arange(0, tile)
    stored = (codes_ptr, scale_ptr, levels_ptr, tables[0])
    low, high, factor = load_planes(stored, token, token < end, dim, bits, dtype)
    at = token[:, None] * (dim // 2) + tl.arange(0, dim // 2)[None, :]
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)
    tl.store(factor_ptr + token, factor)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_planes_are_the_codecs_levels_exactly(bits, dtype, device):
    """On a GPU the float16 ones come from the assembly, in the interpreter from plain operations: the same bits."""
    tokens, dim, end = 32, 256, 29
    indices = torch.randint(0, 1 << bits, (tokens, dim), generator=torch.Generator().manual_seed(bits))
    codes, scale = pack_bits(indices.to(torch.uint8), bits).to(device), torch.rand(tokens).half().to(device)
    low, high = (torch.zeros(tokens, dim // 2, dtype=dtype, device=device) for _ in range(2))
    factor = torch.zeros(tokens, device=device)
    levels, table = turboquant_tables(dim, bits, device).levels, lookup_table(dim, bits, device)
    planes_kernel[(1,)](codes, scale, levels, table, low, high, factor, end, dim=dim, bits=bits, tile=tokens)
    expected = turboquant_levels(dim, bits).to(dtype)[indices]
    halves = (expected[:, ::2], expected[:, 1::2]) if bits == 4 else expected.split(dim // 2, dim=1)
    for found, wanted in zip((low, high), halves, strict=True):
        assert torch.equal(found.cpu()[:end], wanted[:end])
    assert torch.equal(factor[:end], scale[:end].float())


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
    levels = turboquant_levels(256, 4).half().view(torch.uint16)
    assert torch.equal(turboquant_levels(256, 4), -turboquant_levels(256, 4).flip(0))
    table = {f"${5 + 4 * index}": word for index, word in enumerate(words_of(256, 4))}
    for first in range(256):
        stored = [first, (first * 7 + 3) % 256, (first * 11 + 5) % 256, 255 - first]
        found = executed(LOOKUP_4.value, {**table, "$4": int.from_bytes(stored, "little")})
        low, high = (halves_of([found[name] for name in names]) for names in (("$0", "$1"), ("$2", "$3")))
        codes = torch.tensor(stored)
        assert torch.equal(low.int(), levels.int()[codes & 15])
        assert torch.equal(high.int(), levels.int()[codes >> 4])


@pytest.mark.parametrize("bits", [2, 3])
def test_the_assembly_of_fewer_bits_gives_the_levels_exactly(bits):
    levels = turboquant_levels(256, bits).half().view(torch.uint16)
    table = {f"${3 + 2 * index}": word for index, word in enumerate(words_of(256, bits)[:4])}
    codes = torch.cartesian_prod(torch.arange(1 << bits), torch.arange(1 << bits))
    for pair in codes.tolist():
        found = executed(LOOKUP_3.value, {**table, "$1": pair[0], "$2": pair[1]})
        assert halves_of([found["$0"]]).tolist() == levels.int()[pair].tolist()
