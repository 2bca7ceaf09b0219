"""The LM head in two planes computes an INT8 head's logits and has its bytes."""

import pytest
import torch

from onebox.formats.fragments import to_fragments
from onebox.formats.head_planes import join_planes
from onebox.model.head import PlaneHead
from onebox.model.linear import DecodeActivations, IntLinear
from onebox.spec.errors import MismatchError


def int8_head(num_tokens: int, width: int) -> tuple[torch.Tensor, IntLinear]:
    draw = torch.Generator().manual_seed(num_tokens)
    padded = -(-num_tokens // 16) * 16
    codes = torch.randint(-127, 128, (padded, width), generator=draw, dtype=torch.int8)
    return codes, IntLinear(8, to_fragments(codes, 8), 0.01 + torch.rand(num_tokens, generator=draw))


def test_its_codes_are_the_linears_in_blocks_of_any_number(monkeypatch):
    codes, linear = int8_head(75, 256)
    monkeypatch.setattr("onebox.model.head._TILES_AT_ONCE", 2)
    head = PlaneHead.of(linear)
    assert torch.equal(join_planes(head.high, head.plane.low), codes)
    extra = head.plane.radius.nbytes
    assert head.high.nbytes + head.plane.low.nbytes == linear.tiles.nbytes
    assert extra < 0.02 * linear.tiles.nbytes


def test_its_logits_are_the_linears():
    _, linear = int8_head(50, 128)
    head = PlaneHead.of(linear)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    found, expected = head.decode(DecodeActivations(x)), linear.decode(DecodeActivations(x))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(head.prefill(x.repeat(60, 1))[:3], found)


def test_rows_for_drafts_are_those_of_its_high_plane():
    _, linear = int8_head(50, 256)
    head = PlaneHead.of(linear)
    x = DecodeActivations(torch.randn(2, 256, generator=torch.Generator().manual_seed(0)))
    tokens = torch.tensor([49, 3, 17, 8, 0, 31])
    some = head.blank(20)
    some.copy_rows(head, tokens[:4], torch.tensor([19, 0, 5, 16]))
    some.copy_rows(head, tokens[4:], torch.tensor([7, 1]))
    started = head.start(x)
    assert torch.equal(some.decode(x)[:, [19, 0, 5, 16, 7, 1]], started[:, tokens])
    again = some.blank(2)
    again.copy_rows(some, torch.tensor([5, 19]), torch.tensor([1, 0]))
    assert torch.equal(again.decode(x), started[:, [49, 17]])


def test_rows_of_another_kind_of_head_are_refused():
    _, linear = int8_head(20, 128)
    some, none = PlaneHead.of(linear).blank(4), torch.tensor([0])
    with pytest.raises(MismatchError, match="IntLinear"):
        some.copy_rows(linear, none, none)


def test_a_row_of_another_head_is_copied_whole():
    head, other = (PlaneHead.of(int8_head(count, 128)[1]) for count in (40, 33))
    x = DecodeActivations(torch.randn(1, 128, generator=torch.Generator().manual_seed(0)))
    head.copy_rows(other, torch.tensor([32, 2]), torch.tensor([1, 39]))
    assert torch.equal(head.decode(x)[:, [1, 39]], other.decode(x)[:, [32, 2]])
