import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings

from onebox.formats import (
    Dialect,
    dequantize_nvfp4,
    nvfp4_global_scale,
    pack_e2m1,
    quantize_nvfp4,
    unpack_e2m1,
)
from onebox.formats.nvfp4 import E2M1_VALUES, round_e2m1
from onebox.spec.errors import MismatchError, UnsupportedError
from tests.formats.strategies import KINDS, make_weight, weights

ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, scale_dtype=torch.float8_e4m3fn
)
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGS)
BOTH = pytest.mark.parametrize("dialect", list(Dialect))


def compress(weight):
    """The tensors compressed-tensors would write for a float32 weight."""
    global_scale = generate_gparam(weight.amin(), weight.amax())
    groups = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGS, global_scale)
    return NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}, SCHEME
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (16, 256)])
def test_llm_compressor_dialect_is_compressed_tensors_bit_for_bit(kind, shape):
    weight = make_weight(*shape, kind, seed=1)
    truth, ours = compress(weight), quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR)
    assert torch.equal(ours.global_scale, truth["weight_global_scale"])
    assert torch.equal(ours.scale.view(torch.uint8), truth["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.packed, truth["weight_packed"])
    back = dequantize_nvfp4(*ours, Dialect.LLM_COMPRESSOR)
    values = unpack_fp4_from_uint8(ours.packed, *weight.shape, dtype=torch.float32)
    exact = ct_dequantize(values, ours.scale.float(), None, ARGS, global_scale=ours.global_scale)
    assert torch.equal(back, exact)
    assert torch.equal(back.bfloat16(), NVFP4PackedCompressor.decompress(truth, SCHEME)["weight"])


def test_rounding_is_the_oracles_on_every_tie_and_beside_it():
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30])
    around = torch.cat([ties, torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(0.0))])
    values = torch.cat([around, -around]).reshape(1, -1)
    codes = round_e2m1(values)
    truth = FP4_E2M1_DATA.cast_to_fp4(values.clamp(-6, 6).clone())
    assert torch.equal(torch.tensor(E2M1_VALUES)[codes.int()], truth)
    assert torch.equal(pack_e2m1(codes), pack_fp4_to_uint8(truth))


def test_low_nibble_is_the_even_column():
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    codes = unpack_e2m1(packed)
    assert codes[0, :6].tolist() == [0, 0, 1, 0, 2, 0]
    values = torch.tensor(E2M1_VALUES)[codes.int()]
    assert torch.equal(values, unpack_fp4_from_uint8(packed, 1, 512, dtype=torch.float32))
    assert torch.equal(pack_e2m1(codes), packed)


@BOTH
@settings(deadline=None, max_examples=40)
@given(weight=weights(max_columns=64, multiple=16))
def test_values_come_back_within_their_rounding(dialect, weight):
    packed, scale, global_scale = quantize_nvfp4(weight, dialect)
    back = dequantize_nvfp4(packed, scale, global_scale, dialect)
    assert back.isfinite().all()
    assert (scale.float() > 0).all()
    assert (back[weight == 0] == 0).all()
    # The FP8 scale is off by at most 1/16 of itself; the widest gap between codes is 2 of 6.
    largest = weight.unflatten(1, (-1, 16)).abs().amax(-1).repeat_interleave(16, 1)
    small = float(weight.abs().max()) / 448 * 2**-3  # scales this small are FP8's subnormals, or replaced
    assert ((back - weight).abs() <= largest * (1 / 6 + 1 / 16) + small + 1e-37).all()


@BOTH
@pytest.mark.parametrize("kind", ["normal", "levels", "constant"])
def test_the_dialects_agree_about_ordinary_weights(dialect, kind):
    weight = make_weight(8, 64, kind, seed=3)
    back = dequantize_nvfp4(*quantize_nvfp4(weight, dialect), dialect)
    other = dequantize_nvfp4(*quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR), Dialect.LLM_COMPRESSOR)
    assert (back - other).abs().max() <= weight.abs().max() * 0.1
    assert torch.isclose(back, other, rtol=1e-5).float().mean() > 0.95  # all but ties of the FP8 scale


def test_one_global_scale_divides_and_the_other_multiplies():
    weight = torch.zeros(2, 16)
    weight[1, 3] = -448.0 * 6
    packed, scale, divisor = quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR)
    assert divisor.tolist() == [1.0]
    assert scale.float().tolist() == [[0.125], [448.0]]
    assert dequantize_nvfp4(packed, scale, torch.tensor([2.0]), Dialect.LLM_COMPRESSOR)[1, 3] == -1344.0
    packed, scale, multiplier = quantize_nvfp4(weight, Dialect.MODELOPT)
    assert multiplier.shape == ()
    assert multiplier == 1.0
    assert scale.float().tolist() == [[1.0], [448.0]]
    assert dequantize_nvfp4(packed, scale, torch.tensor(2.0), Dialect.MODELOPT)[1, 3] == -5376.0


@BOTH
def test_fused_matrices_can_share_a_global_scale(dialect):
    gate, up = make_weight(4, 32, "normal", 5), make_weight(4, 32, "normal", 6)
    shared = nvfp4_global_scale(torch.cat([gate, up]), dialect)
    whole = quantize_nvfp4(torch.cat([gate, up]), dialect)
    for part, half in ((gate, slice(0, 4)), (up, slice(4, 8))):
        packed, scale, _ = quantize_nvfp4(part, dialect, shared)
        assert torch.equal(packed, whole.packed[half])
        assert torch.equal(scale.float(), whole.scale[half].float())


def test_what_cannot_be_is_refused():
    with pytest.raises(MismatchError, match="multiple of 16"):
        quantize_nvfp4(torch.ones(2, 24), Dialect.MODELOPT)
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        quantize_nvfp4(torch.full((1, 16), torch.inf), Dialect.MODELOPT)
    packed, scale, shared = quantize_nvfp4(torch.ones(2, 32), Dialect.MODELOPT)
    with pytest.raises(MismatchError, match="need float8_e4m3fn scales"):
        dequantize_nvfp4(packed, scale.float(), shared, Dialect.MODELOPT)
    with pytest.raises(MismatchError, match="one global scale"):
        dequantize_nvfp4(packed, scale, torch.ones(2), Dialect.MODELOPT)
    with pytest.raises(ValueError, match="awq"):
        quantize_nvfp4(torch.ones(2, 32), "awq")
