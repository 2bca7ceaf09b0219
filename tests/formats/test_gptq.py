import dataclasses

import pytest
import torch
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats import GroupInt, dequantize, gptq_to_packed, pack_gptq, pack_quantized, unpack_gptq
from onebox.spec.errors import MismatchError, UnsupportedError

IN, OUT, GROUP = 128, 64, 32


def random_matrix(seed, *, bits=4, rows=OUT, columns=IN, group_size=GROUP, symmetric=True) -> GroupInt:
    """Codes over the whole range; zero points from 1, the least that GPTQ v1 can store."""
    generator = torch.Generator().manual_seed(seed)
    middle, groups = 2 ** (bits - 1), -(-columns // group_size)
    zeros = torch.randint(1 - middle, middle, (rows, groups), generator=generator, dtype=torch.int8)
    zeros[0, 0] = 1  # never all zero
    return GroupInt(
        codes=torch.randint(-middle, middle, (rows, columns), generator=generator, dtype=torch.int8),
        scales=(torch.rand(rows, groups, generator=generator) + 0.1).half(),
        zeros=None if symmetric else zeros,
        group_index=None,
        group_size=group_size,
        bits=bits,
    )


def auto_round_pack(matrix: GroupInt, *, g_idx: bool = False) -> QuantLinear:
    """AutoRound's module after packing the very numbers of `matrix`."""
    out_features, in_features = matrix.codes.shape
    layer = QuantLinear(matrix.bits, matrix.group_size, in_features, out_features, False, g_idx=g_idx)
    linear = torch.nn.Linear(in_features, out_features, bias=False)
    linear.weight.data = dequantize(matrix)
    middle = 2 ** (matrix.bits - 1)
    zeros = middle if matrix.zeros is None else matrix.zeros.float() + middle
    layer.pack(linear, matrix.scales.float(), zeros, device="cpu")
    return layer


def assert_same(left: GroupInt, right: GroupInt) -> None:
    for field in ("codes", "scales", "zeros", "group_index"):
        a, b = getattr(left, field), getattr(right, field)
        assert (a is None) == (b is None), field
        assert a is None or (torch.equal(a, b) and a.dtype == b.dtype), field
    assert (left.group_size, left.bits) == (right.group_size, right.bits)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # AutoRound's, at 3 bits
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_unpacks_what_auto_round_packed(symmetric, bits):
    matrix = random_matrix(1, bits=bits, symmetric=symmetric)
    layer = auto_round_pack(matrix)
    assert_same(unpack_gptq(layer.qweight, layer.qzeros, layer.scales, bits=bits), matrix)
    ours = pack_gptq(matrix)
    assert ours.keys() == {"qweight", "qzeros", "scales"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, getattr(layer, name)), name
    if symmetric and bits == 4:
        assert (ours["qzeros"] == 0x77777777).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
def test_weights_are_those_auto_round_multiplies_with(symmetric, permuted):
    matrix = random_matrix(2, symmetric=symmetric)
    layer = auto_round_pack(matrix, g_idx=True)
    if permuted:
        layer.g_idx = layer.g_idx[torch.randperm(IN, generator=torch.Generator().manual_seed(5))]
    read = unpack_gptq(layer.qweight, layer.qzeros, layer.scales, layer.g_idx)
    assert (read.group_index is not None) == permuted
    assert read.group_size == GROUP
    # AutoRound multiplies in float16: one rounding of our exact product
    assert torch.equal(dequantize(read).half().float().t(), layer(torch.eye(IN)))


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 9),
    group_size=st.sampled_from([1, 3, 8, 16, 100]),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    zeros_offset=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**31),
)
def test_packing_and_unpacking_change_nothing(rows, columns, group_size, bits, symmetric, zeros_offset, seed):
    unit = 32 if bits == 3 else 32 // bits  # the fewest codes that fill whole words
    shape = {"rows": unit * rows, "columns": unit * columns, "group_size": group_size}
    matrix = random_matrix(seed, bits=bits, symmetric=symmetric, **shape)
    tensors = pack_gptq(matrix, zeros_offset)
    back = unpack_gptq(**tensors, zeros_offset=zeros_offset, bits=bits, group_size=group_size)
    assert_same(back, matrix)


def test_version_two_stores_zero_points_as_they_are():
    tensors = pack_gptq(random_matrix(6), zeros_offset=0)
    assert (tensors["qzeros"].view(torch.uint8) == 0x88).all()
    assert unpack_gptq(**tensors, zeros_offset=0).zeros is None
    shifted = unpack_gptq(**tensors, zeros_offset=1).zeros
    assert shifted is not None
    assert (shifted == 1).all()


def test_permuting_index_survives_and_a_ragged_plain_one_is_recognised():
    matrix = random_matrix(7, group_size=48)  # 48 + 48 + 32 columns
    plain = torch.arange(IN, dtype=torch.int32) // 48
    read = unpack_gptq(**pack_gptq(matrix), g_idx=plain)
    assert_same(read, matrix)
    permuted = dataclasses.replace(matrix, group_index=plain.flip(0))
    read = unpack_gptq(**pack_gptq(permuted), group_size=48)
    assert_same(read, permuted)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_repacking_for_compressed_tensors_is_a_transpose(bits):
    matrix = random_matrix(8, bits=bits, symmetric=False)
    gptq = pack_gptq(matrix, zeros_offset=0)
    packed = pack_quantized(matrix)
    assert torch.equal(gptq_to_packed(gptq["qweight"]), packed["weight_packed"])
    assert torch.equal(gptq_to_packed(gptq["qweight"]), pack_to_int32(matrix.codes, bits))
    assert torch.equal(gptq_to_packed(packed["weight_packed"]), gptq["qweight"])
    assert torch.equal(gptq_to_packed(gptq["qzeros"]), packed["weight_zero_point"])


def test_a_stack_of_experts_is_repacked_at_once():
    layers = [pack_gptq(random_matrix(seed))["qweight"] for seed in range(3)]
    stacked = gptq_to_packed(torch.stack(layers))
    assert stacked.is_contiguous()
    assert torch.equal(stacked, torch.stack([gptq_to_packed(words) for words in layers]))


def test_the_highest_stored_zero_means_sixteen_in_version_one():
    tensors = pack_gptq(random_matrix(9))
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    matrix = unpack_gptq(**tensors)
    assert (matrix.zeros == 8).all()
    assert torch.equal(pack_gptq(matrix)["qzeros"], tensors["qzeros"])


def test_what_does_not_fit_is_refused():
    matrix = random_matrix(10)
    tensors = pack_gptq(matrix)
    with pytest.raises(UnsupportedError, match="no 4-bit form"):
        pack_gptq(dataclasses.replace(matrix, zeros=torch.full_like(matrix.scales, -8, dtype=torch.int8)))
    with pytest.raises(UnsupportedError, match="whole words"):
        pack_gptq(random_matrix(11, rows=12))
    with pytest.raises(UnsupportedError, match="minus 2"):
        unpack_gptq(**tensors, zeros_offset=2)
    with pytest.raises(MismatchError, match="disagree"):
        unpack_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"][:2])
    with pytest.raises(MismatchError, match="128 entries"):
        unpack_gptq(**tensors, g_idx=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(MismatchError, match="uneven"):
        unpack_gptq(tensors["qweight"], tensors["qzeros"][:3], tensors["scales"][:3])
    with pytest.raises(MismatchError, match="int32 matrix"):
        gptq_to_packed(torch.zeros(4, 4))
    wide = pack_gptq(random_matrix(12, bits=8))
    with pytest.raises(UnsupportedError, match="256"):
        unpack_gptq(wide["qweight"], torch.full_like(wide["qzeros"], -1), wide["scales"], bits=8)
