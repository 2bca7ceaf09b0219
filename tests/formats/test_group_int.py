import dataclasses

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats import GroupInt, dequantize, quantize
from onebox.spec.errors import MismatchError, UnsupportedError
from tests.formats.strategies import KINDS, make_weight, weights

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def args_for(bits: int, group_size: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=group_size, symmetric=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])
def test_few_bits_are_what_compressed_tensors_computes(dtype, bits, kind):
    weight = make_weight(7, 64, kind, seed=1).to(dtype)
    args = args_for(bits, 16)
    groups = weight.unflatten(1, (-1, 16))
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    ours = quantize(weight, bits, 16, dtype)
    assert ours.scales.dtype == dtype
    assert torch.equal(ours.scales, scales)
    # float32 on purpose: the oracle divides in the weight's own dtype, and a bfloat16 quotient is already rounded
    codes = ct_quantize(weight.float(), scales.float(), zeros, args, dtype=torch.int8)
    assert torch.equal(ours.codes, codes)
    assert torch.equal(dequantize(ours), ct_dequantize(codes, scales.float(), zeros, args))


@settings(deadline=None, max_examples=60)
@given(weight=weights(), bits=st.sampled_from([2, 3, 4, 8]), size=st.sampled_from([None, -1, 1, 3, 16, 200]))
def test_every_weight_comes_back_within_half_a_step(weight, bits, size):
    matrix = quantize(weight, bits, size, torch.float32)
    back, step = dequantize(matrix), matrix.scales.repeat_interleave(matrix.group_size, 1)[:, : weight.shape[1]]
    assert (matrix.scales > 0).all()
    if bits < 8:
        # absmax / 7.5 puts the largest positive weight half a step above level 7, and so at fewer bits
        assert matrix.codes.min() >= -(2 ** (bits - 1))
        assert matrix.codes.max() < 2 ** (bits - 1)
    else:
        assert matrix.codes.abs().max() <= 127
    # a denormal scale may itself be a third too small, and then the largest weights saturate
    slack = torch.where(step < 1e-37, 5.0, 0.5 + 1e-4)
    assert ((back - weight).abs() <= step * slack).all()
    assert (back[weight == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_positive_and_finite_in_every_dtype(dtype, bits, kind):
    matrix = quantize(make_weight(5, 40, kind, seed=2), bits, 8, dtype)
    assert (matrix.scales > 0).all()
    assert dequantize(matrix).isfinite().all()


def test_int8_rows_follow_the_language_model_head_rule():
    weight = torch.tensor([[127.0, -254.0, 2.9, 1.0], [0.0, 0.0, 0.0, 0.0]])
    matrix = quantize(weight, 8, None, torch.float32)
    assert matrix.scales.flatten().tolist() == [2.0, torch.tensor(1e-12).item()]
    assert matrix.codes.tolist() == [[64, -127, 1, 0], [0, 0, 0, 0]]  # 63.5 and 0.5 go to the even code


def test_eight_bit_codes_never_reach_minus_128():
    # the float16 scale of this row is a subnormal, rounded down by a quarter
    matrix = quantize(torch.tensor([[-1e-5, 1e-5, 0.0]]), 8, None, torch.float16)
    assert matrix.codes.tolist() == [[-127, 127, 0]]


def test_group_index_and_zeros_are_used():
    matrix = GroupInt(
        codes=torch.tensor([[1, 2, 3, -8]], dtype=torch.int8),
        scales=torch.tensor([[0.5, 10.0]], dtype=torch.float16),
        zeros=torch.tensor([[1, -2]], dtype=torch.int8),
        group_index=torch.tensor([1, 0, 1, 0], dtype=torch.int32),
        group_size=2,
        bits=4,
    )
    assert dequantize(matrix).tolist() == [[30.0, 0.5, 50.0, -4.5]]


def test_eight_bit_differences_do_not_wrap():
    matrix = GroupInt(
        codes=torch.tensor([[127, -128]], dtype=torch.int8),
        scales=torch.ones(1, 2),
        zeros=torch.tensor([[-128, 127]], dtype=torch.int8),
        group_index=None,
        group_size=1,
        bits=8,
    )
    assert dequantize(matrix).tolist() == [[255.0, -255.0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_weights_are_refused(bad):
    weight = torch.ones(2, 8)
    weight[1, 3] = bad
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        quantize(weight, 4, 4)


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(UnsupportedError, match="does not fit"):
        quantize(torch.full((1, 4), 1e9), 4, 4, torch.float16)
    with pytest.raises(UnsupportedError, match="not as"):
        quantize(torch.ones(1, 4), 4, 4, torch.int8)
    with pytest.raises(UnsupportedError, match="4 or 8 bits"):
        quantize(torch.ones(1, 4), 5, 4)
    with pytest.raises(MismatchError, match="matrix"):
        quantize(torch.ones(4), 4, 4)
    with pytest.raises(MismatchError, match="at least one column"):
        quantize(torch.ones(1, 4), 4, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.zeros(2, 8)},
        {"scales": torch.ones(2, 3)},
        {"scales": torch.ones(2, 2, dtype=torch.int32)},
        {"zeros": torch.zeros(2, 1, dtype=torch.int8)},
        {"group_index": torch.zeros(7, dtype=torch.int32)},
        {"group_index": torch.full((8,), 2, dtype=torch.int32)},
        {"group_size": 3},
    ],
)
def test_parts_that_disagree_are_refused(change):
    with pytest.raises(MismatchError):
        dataclasses.replace(quantize(torch.ones(2, 8), 4, 4), **change)
