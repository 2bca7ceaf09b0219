import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats import GroupInt, dequantize, pack_quantized, quantize, unpack_quantized
from onebox.spec.errors import MismatchError
from tests.formats.strategies import weights


def scheme_for(bits: int, group_size: int, symmetric: bool) -> QuantizationScheme:
    args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=group_size, symmetric=symmetric)
    return QuantizationScheme(targets=["Linear"], weights=args)


def compress(weight, scheme):
    """The tensors compressed-tensors would write, with scales (and zero points) of its own choice."""
    groups = weight.unflatten(1, (-1, scheme.weights.group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    return PackedQuantizationCompressor.compress(state, scheme)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (9, 24), (13, 40), (64, 128)])
def test_reads_and_rewrites_what_compressed_tensors_wrote(bits, symmetric, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.2
    scheme = scheme_for(bits, 8, symmetric)
    stored = compress(weight, scheme)
    matrix = unpack_quantized(**stored, bits=bits, group_size=8)
    assert (matrix.zeros is None) == symmetric
    truth = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    assert torch.equal(dequantize(matrix), truth)
    again = pack_quantized(matrix)
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(again[name], tensor), name
        assert again[name].dtype == tensor.dtype, name


@settings(deadline=None, max_examples=40)
@given(weight=weights(), bits=st.sampled_from([2, 3, 4, 8]), size=st.sampled_from([-1, 1, 5, 32]))
def test_round_trip_keeps_every_code_of_ragged_shapes(weight, bits, size):
    matrix = quantize(weight, bits, size, torch.float32)
    back = unpack_quantized(**pack_quantized(matrix), bits=bits, group_size=matrix.group_size)
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scales, matrix.scales)
    assert back.group_size == matrix.group_size


def test_few_rows_pack_their_zero_points_into_one_word():
    # by hand: the oracle of compressed-tensors 0.20 cannot decompress 2 to 8 asymmetric 4-bit rows in several groups
    zeros = torch.tensor([[1, -8], [2, 7], [-1, 0]], dtype=torch.int8)
    matrix = GroupInt(torch.zeros(3, 16, dtype=torch.int8), torch.ones(3, 2), zeros, None, 8, 4)
    stored = pack_quantized(matrix)
    assert stored["weight_zero_point"].tolist() == [[0x7A9, 0x8F0]]
    assert torch.equal(stored["weight_zero_point"], pack_to_int32(zeros, 4, packed_dim=0))
    back = unpack_quantized(**stored)
    assert back.zeros is not None
    assert torch.equal(back.zeros, zeros)


def test_our_packed_int4_decompresses_to_our_numbers():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    matrix = quantize(weight, 4, 16, torch.float32)
    truth = PackedQuantizationCompressor.decompress(pack_quantized(matrix), scheme_for(4, 16, True))["weight"]
    assert torch.equal(dequantize(matrix), truth)


def test_group_index_travels_along():
    index = torch.tensor([1, 0] * 8, dtype=torch.int32)
    matrix = GroupInt(torch.zeros(2, 16, dtype=torch.int8), torch.ones(2, 2), None, index, 8, 4)
    assert torch.equal(unpack_quantized(**pack_quantized(matrix)).group_index, index)


def test_shapes_that_disagree_are_refused():
    stored = pack_quantized(quantize(torch.ones(2, 16), 4, 8))
    with pytest.raises(MismatchError, match="weight_shape"):
        unpack_quantized(**{**stored, "weight_shape": torch.tensor([3, 16])})
    with pytest.raises(MismatchError, match="words a row"):
        unpack_quantized(**{**stored, "weight_shape": torch.tensor([2, 32])})
    with pytest.raises(MismatchError, match="uneven"):
        unpack_quantized(**{**stored, "weight_scale": torch.ones(2, 3)})
