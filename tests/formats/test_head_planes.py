"""An INT8 matrix in two planes is the same matrix, and its bound holds."""

import pytest
import torch

from onebox.formats.head_planes import LOW_CENTRE, high_codes, join_planes, low_codes, split_planes
from onebox.spec.errors import MismatchError


def codes(num_rows: int, width: int) -> torch.Tensor:
    return torch.randint(-128, 128, (num_rows, width), generator=torch.Generator().manual_seed(width), dtype=torch.int8)


@pytest.mark.parametrize("shape", [(16, 128), (48, 384)])
def test_planes_join_to_the_codes_and_take_as_many_bytes(shape):
    given = codes(*shape)
    high, low, _ = split_planes(given)
    assert torch.equal(join_planes(high, low), given)
    assert high.nbytes == 3 * low.nbytes == given.nbytes * 3 // 4


def test_every_code_is_split_into_six_and_two_bits():
    given = torch.arange(-128, 128).to(torch.int8).repeat(16, 1)
    high, low, _ = split_planes(given)
    assert torch.equal(high_codes(high), given >> 2)
    assert torch.equal(low_codes(low), given & 3)


def test_a_row_of_the_low_plane_is_one_range_of_bytes():
    given = codes(32, 256)
    _, low, radius = split_planes(given)
    _, alone, alone_radius = split_planes(given[16:])
    assert torch.equal(low[16:], alone)
    assert torch.equal(radius[16:], alone_radius)


def test_no_row_moves_a_product_further_than_its_radius():
    given = codes(64, 128)
    high, low, radius = split_planes(given)
    rest = low_codes(low).to(torch.float64) - LOW_CENTRE
    x = torch.cat([torch.randn(8, 128, dtype=torch.float64), rest])  # the rest itself is the worst direction
    whole = x @ given.to(torch.float64).T
    started = x @ (4 * high_codes(high).to(torch.float64)).T + LOW_CENTRE * x.sum(1, keepdim=True)
    furthest = x.norm(dim=1, keepdim=True) * radius.to(torch.float64)
    assert ((whole - started).abs() <= furthest * (1 + 1e-6)).all()
    assert ((whole - started)[8:].diagonal() >= furthest[8:].diagonal() * (1 - 1e-6)).all()


@pytest.mark.parametrize(
    "wrong", [codes(8, 128), codes(16, 64), codes(16, 128).to(torch.int16)], ids=["rows", "columns", "dtype"]
)
def test_what_is_no_whole_tile_of_bytes_is_refused(wrong):
    with pytest.raises(MismatchError, match="whole tiles"):
        split_planes(wrong)
