import torch
from hypothesis import given, settings

from onebox.formats import decode_fp8, encode_fp8, quantize_fp8_rows
from tests.formats.strategies import make_weight, weights


@settings(deadline=None, max_examples=40)
@given(x=weights())
def test_vectors_come_back_within_their_rounding(x):
    stored = encode_fp8(x)
    back = decode_fp8(**stored)
    assert stored["scale"].dtype == torch.float16
    assert (stored["scale"] >= 2**-14).all()
    assert (back[x == 0] == 0).all()
    # float16 rounds the scale by up to 2**-11, and with it the largest value may saturate
    bound = x.abs() * (2**-4 + 2**-10) + stored["scale"].float()[:, None] * 2**-10
    assert ((back - x).abs() <= bound).all()


def test_ordinary_vectors_are_fp8_rows_with_a_half_scale():
    x = make_weight(5, 256, "normal", seed=1)[1:]
    stored = encode_fp8(x)
    codes, scale = quantize_fp8_rows(x, torch.float16)
    assert torch.equal(stored["codes"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(stored["scale"], scale[:, 0])


def test_vectors_beyond_reach_saturate():
    x = torch.tensor([[3e38, -3e38, 1.0, 0.0], [torch.inf, 1.0, 0.0, -torch.inf]])
    back = decode_fp8(**encode_fp8(x))
    assert back.isfinite().all()
    assert back[:, 0].tolist() == [448.0 * 65504] * 2
    assert (back[x == 0] == 0).all()
