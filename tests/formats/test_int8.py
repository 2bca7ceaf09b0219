import pytest
import torch
from hypothesis import given, settings

from onebox.formats import (
    dequantize,
    dequantize_int8_rows,
    group_int_to_int8_rows,
    int8_rows_to_group_int,
    quantize,
    quantize_int8_rows,
)
from onebox.spec.errors import MismatchError, UnsupportedError
from tests.formats.strategies import weights


@settings(deadline=None, max_examples=30)
@given(weight=weights())
def test_rows_come_back_within_half_a_step(weight):
    codes, scale = quantize_int8_rows(weight)
    assert codes.dtype == torch.int8
    assert scale.shape == (weight.shape[0],)
    error = (dequantize_int8_rows(codes, scale) - weight).abs()
    assert (error <= scale[:, None] * 0.5001).all()
    assert torch.equal(dequantize_int8_rows(codes, scale), dequantize_int8_rows(codes, scale[:, None]))


def test_rows_and_group_int_are_the_same_matrix():
    matrix = quantize(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), 8, None, torch.float16)
    codes, scale = group_int_to_int8_rows(matrix)
    assert scale.dtype == torch.float16
    assert torch.equal(codes.float() * scale.float()[:, None], dequantize(matrix))
    assert torch.equal(dequantize(int8_rows_to_group_int(codes, scale)), dequantize(matrix))


def test_what_is_not_one_scale_a_row_is_refused():
    with pytest.raises(UnsupportedError, match="one scale a row"):
        group_int_to_int8_rows(quantize(torch.ones(2, 8), 8, 4))
    with pytest.raises(MismatchError, match="one scale each"):
        int8_rows_to_group_int(torch.zeros(2, 3, dtype=torch.int8), torch.ones(3))
