"""Fragment order: every code comes back, and each lies where the drawing says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats.fragments import from_fragments, to_fragments
from onebox.spec.errors import MismatchError


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_codes_come_back(row_tiles, groups, bits, group_major):
    middle = 2 ** (bits - 1)
    codes = torch.randint(-middle, middle, (row_tiles * 16, groups * 128), dtype=torch.int8)
    tiles = to_fragments(codes, bits, group_major=group_major)
    assert tiles.shape == (*((groups, row_tiles) if group_major else (row_tiles, groups)), 256 * bits)
    assert torch.equal(from_fragments(tiles, bits, group_major=group_major), codes)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (5, 3), (13, 20), (8, 64), (15, 127), (2, 90)])
def test_a_code_lies_where_the_drawing_says(row, column):
    codes = torch.zeros(16, 128, dtype=torch.int8)
    codes[row, column] = -3
    r8, g = divmod(row, 8)
    j, inner = divmod(column, 64)
    t, rest = divmod(inner, 16)
    kt, rest = divmod(rest, 8)
    k16, k4 = divmod(rest, 4)
    index = ((((kt * 8 + g) * 4 + t) * 2 + k16) * 2 + r8) * 4 + k4
    four = to_fragments(codes, 4)[0, 0]
    assert int(four[index]) == (13 << 4 if j else 13)
    assert int(four.count_nonzero()) == 1
    eight = to_fragments(codes, 8)[0, 0]
    assert int(eight.view(torch.int8)[1024 * j + index]) == -3


@pytest.mark.parametrize(("row", "column"), [(0, 0), (5, 7), (13, 40), (8, 64), (15, 91), (10, 14), (2, 127)])
def test_three_bits_lie_where_the_drawing_says(row, column):
    codes = torch.zeros(16, 128, dtype=torch.int8)
    codes[row, column] = -3  # 0b101
    r8, g = divmod(row, 8)
    j, inner = divmod(column, 64)
    t, rest = divmod(inner, 16)
    kt, rest = divmod(rest, 8)
    k16, k4 = divmod(rest, 4)
    lane = g * 4 + t
    places = [lane * 16 + 8 * w + 4 * r8 + k4 for w in (0, 1)] + [512 + lane * 8 + 4 * r8 + k4]
    first, second, third = (int(to_fragments(codes, 3)[0, 0][place]) for place in places)
    expected = [
        (0xA0, 0, 0),
        (0x14, 0, 0),
        (0, 0xA0, 0),
        (0, 0x14, 0),
        (0, 0, 0xA0),
        (0, 0, 0x14),
        (2, 2, 0),
        (0, 1, 2),
    ]
    assert (first, second, third) == expected[4 * j + 2 * kt + k16]


def test_masking_a_byte_gives_sixteen_times_the_code():
    codes = torch.randint(-8, 8, (16, 128), dtype=torch.int8)
    tile = to_fragments(codes, 4)[0, 0]
    high = (tile & 0xF0).view(torch.int8)
    low = ((tile << 4) & 0xF0).view(torch.int8)
    both = torch.cat([low, high]).view(torch.uint8)
    assert torch.equal(both, (16 * to_fragments(codes, 8)[0, 0].view(torch.int8)).view(torch.uint8))


def test_half_a_tile_is_refused():
    with pytest.raises(MismatchError, match="whole tiles"):
        to_fragments(torch.zeros(8, 128, dtype=torch.int8), 4)


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(MismatchError, match="2, 3, 4 or 8 bits"):
        to_fragments(torch.zeros(16, 128, dtype=torch.int8), 5)
    with pytest.raises(MismatchError, match="Tiles must be"):
        from_fragments(torch.zeros(1, 1, 768, dtype=torch.uint8), 4)
