"""The LM head in two planes computes an INT8 head's logits and has its bytes."""

import torch

from onebox.formats.fragments import to_fragments
from onebox.formats.head_planes import join_planes
from onebox.model.head import PlaneHead
from onebox.model.linear import DecodeActivations, IntLinear


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
