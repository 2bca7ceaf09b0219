"""Expert tiles: every code and scale comes back, and a gate lies in one tile with its up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats.expert_tiles import pack_down, pack_gate_up, unpack_down, unpack_gate_up
from onebox.formats.fragments import from_fragments
from onebox.spec.errors import MismatchError


def draw(experts, rows, groups, dtype=torch.float16, bits=4):
    middle = 2 ** (bits - 1)
    codes = torch.randint(-middle, middle, (experts, rows, groups * 128), dtype=torch.int8)
    return codes, torch.rand(experts, rows, groups).to(dtype)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([2, 3, 4]),
)
def test_codes_and_scales_come_back(experts, row_tiles, groups, dtype, bits):
    codes, scales = draw(experts, 16 * row_tiles, groups, dtype, bits)
    for pack, unpack in ((pack_down, unpack_down), (pack_gate_up, unpack_gate_up)):
        tiles, by_tile = pack(codes, scales, bits)
        assert tiles.shape == (experts, row_tiles, groups, 256 * bits)
        assert by_tile.shape == (experts, row_tiles, groups, 16)
        assert by_tile.dtype == dtype
        found = unpack(tiles, by_tile)
        assert torch.equal(found[0], codes)
        assert torch.equal(found[1], scales)


def test_a_tile_holds_eight_gate_rows_and_the_up_rows_of_the_same_inner_values():
    codes, scales = draw(2, 64, 1)
    tiles, by_tile = pack_gate_up(codes, scales)
    rows = from_fragments(tiles[1, 2:3], 4, group_major=False)
    assert torch.equal(rows[:8], codes[1, 16:24])
    assert torch.equal(rows[8:], codes[1, 32 + 16 : 32 + 24])
    assert torch.equal(by_tile[1, 2, 0, 8:], scales[1, 48:56, 0])


@pytest.mark.parametrize(("rows", "groups"), [(24, 1), (8, 1), (16, 2)])
def test_what_does_not_fit_tiles_is_refused(rows, groups):
    codes, _ = draw(1, rows, 1)
    _, scales = draw(1, rows, groups)
    for pack in (pack_down, pack_gate_up):
        with pytest.raises(MismatchError):
            pack(codes, scales)


def test_tiles_of_eight_bits_are_no_experts():
    with pytest.raises(MismatchError, match="512, 768 or 1,024 bytes"):
        unpack_down(torch.zeros(1, 1, 1, 2048, dtype=torch.uint8), torch.ones(1, 1, 1, 16))
