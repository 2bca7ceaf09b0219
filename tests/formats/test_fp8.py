from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from onebox.formats import (
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dequantize_fp8_tensor,
    quantize_fp8_block,
    quantize_fp8_rows,
    quantize_fp8_tensor,
)
from onebox.spec.errors import MismatchError, UnsupportedError
from tests.formats.strategies import KINDS, make_weight, weights

E4M3 = torch.float8_e4m3fn


def bits_of(codes):
    return codes.view(torch.uint8)


def padded_blocks(weight, block):
    rows, columns = (-size % block for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 48), (33, 50), (1, 1), (5, 64)])
def test_blocks_are_what_compressed_tensors_computes(kind, shape):
    weight = make_weight(*shape, kind, seed=1)
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 16], symmetric=True)
    blocks = padded_blocks(weight, 16)
    scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    codes, ours = quantize_fp8_block(weight, block=16)
    assert torch.equal(ours, scale)
    assert torch.equal(bits_of(codes), bits_of(ct_quantize(weight, scale, None, args, dtype=E4M3)))
    assert torch.equal(dequantize_fp8_block(codes, ours, block=16), ct_dequantize(codes, scale, None, args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transformers_reads_our_blocks_as_we_do(dtype):
    weight = make_weight(256, 384, "wide", seed=2)
    codes, scale = quantize_fp8_block(weight, scale_dtype=dtype)
    assert scale.dtype == dtype
    assert scale.shape == (2, 3)
    truth = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(dequantize_fp8_block(codes, scale), truth)


def test_we_read_what_transformers_quantised():
    weight = make_weight(256, 128, "normal", seed=3)
    config = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None))
    stored = Fp8Quantize(config)._quantize_one("x.weight", weight)
    back = dequantize_fp8_block(stored["x.weight"], stored["x.weight_scale_inv"])
    assert torch.allclose(back, weight, rtol=2**-4, atol=float(weight.abs().max()) / 448 * 2**-9)


@settings(deadline=None, max_examples=40)
@given(weight=weights(), block=st.sampled_from([1, 7, 16, 128]), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_values_come_back_within_their_rounding(weight, block, dtype):
    codes, scale = quantize_fp8_block(weight, block, dtype)
    back = dequantize_fp8_block(codes, scale, block)
    assert (scale > 0).all()
    assert back.isfinite().all()
    assert (back[weight == 0] == 0).all()
    step = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    # half a mantissa step relative, half a subnormal step absolute; a denormal scale is off by itself
    bound = torch.where(step < 1e-36, 448 * step + weight.abs(), weight.abs() * 2**-4 + step * 2**-10)
    assert ((back - weight).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_tensor_are_blocks_of_that_size(kind):
    weight = make_weight(6, 20, kind, seed=4)
    codes, scale = quantize_fp8_rows(weight)
    assert scale.shape == (6, 1)
    for row in range(6):
        block_codes, block_scale = quantize_fp8_block(weight[row : row + 1])
        assert torch.equal(bits_of(codes[row : row + 1]), bits_of(block_codes))
        assert torch.equal(scale[row : row + 1], block_scale)
    assert torch.equal(dequantize_fp8_rows(codes, scale), codes.float() * scale)
    codes, scale = quantize_fp8_tensor(weight)
    block_codes, block_scale = quantize_fp8_block(weight)
    assert torch.equal(bits_of(codes), bits_of(block_codes))
    assert scale.shape == ()
    assert torch.equal(scale, block_scale[0, 0])
    assert torch.equal(dequantize_fp8_tensor(codes, scale.reshape(1)), dequantize_fp8_block(codes, block_scale))


def test_the_largest_weight_never_becomes_nan():
    weight = torch.linspace(0.1, 700, 4096).reshape(4096, 1)  # bfloat16 scales round below and above absmax / 448
    codes, scale = quantize_fp8_rows(weight, torch.bfloat16)
    assert dequantize_fp8_rows(codes, scale).isfinite().all()
    assert (weight / scale.float() > 448).any()


def test_what_cannot_be_is_refused():
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        quantize_fp8_block(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(UnsupportedError, match="not as"):
        quantize_fp8_tensor(torch.ones(2, 2), E4M3)
    with pytest.raises(MismatchError, match="has scales"):
        dequantize_fp8_block(torch.zeros(129, 128, dtype=E4M3), torch.ones(1, 1))
    with pytest.raises(MismatchError, match="float8_e4m3fn matrix"):
        dequantize_fp8_block(torch.zeros(2, 2), torch.ones(1, 1))
    with pytest.raises(MismatchError, match="one scale each"):
        dequantize_fp8_rows(torch.zeros(3, 2, dtype=E4M3), torch.ones(2))
    with pytest.raises(MismatchError, match="has one scale"):
        dequantize_fp8_tensor(torch.zeros(3, 2, dtype=E4M3), torch.ones(3))
