"""What the integer linears promise beyond agreeing with their twins."""

import pytest
import torch

from onebox.formats import GroupInt, dequantize
from onebox.formats.fragments import from_fragments, to_fragments
from onebox.kernels.common.rows import LARGEST
from onebox.kernels.int_linear import reference
from onebox.kernels.int_linear.cases import activations, matrix
from onebox.spec.errors import MismatchError
from tests.kernels.catalogue import forms
from tests.kernels.tolerance import assert_same

ROWS = 128
ROW_COUNTS = (1, 5, 16, 17, 64, 96)  # every width of the kernel for few rows, and 1 to 4 chunks of the one for many


@pytest.fixture
def kernel():
    return forms("kernel")


def linear_inputs(shape: tuple[int, int], bits: int, device: torch.device) -> list[torch.Tensor]:
    """The planes and scale of 128 rows, tiles and weight scales."""
    planes, scale = reference.fixed_point(activations(ROWS, shape[1], torch.float32))
    return [tensor.to(device) for tensor in (planes, scale, *matrix(*shape, bits))]


def check_rows_alone_and_together(linear, shape, bits, device):
    planes, scale, weight, weight_scale = linear_inputs(shape, bits, device)
    together = linear(planes, scale, weight, weight_scale)
    for count in ROW_COUNTS:
        first = ROWS - count
        assert torch.equal(linear(planes[first:], scale[first:], weight, weight_scale), together[first:]), count
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(linear(planes[order], scale[order], weight, weight_scale), together[order])
    scale[1:] = float("nan")
    assert torch.equal(linear(planes, scale, weight, weight_scale)[0], together[0])


def check_tokens_alone_and_together(matmul, shape, bits, device):
    x = activations(130, shape[1], torch.bfloat16).to(device)
    weight, weight_scale = (tensor.to(device) for tensor in matrix(*shape, bits))
    together = matmul(x, weight, weight_scale)
    for count in (1, 63, 64, 65):
        assert torch.equal(matmul(x[:count], weight, weight_scale), together[:count]), count
    for first in (64, 128):
        assert torch.equal(matmul(x[first:], weight, weight_scale), together[first:]), first
    for token in (5, 77, 129):
        assert torch.equal(matmul(x[token : token + 1], weight, weight_scale)[0], together[token]), token
    x[1:] = float("nan")
    assert torch.equal(matmul(x, weight, weight_scale)[0], together[0])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_rows_bits_depend_on_that_row_alone(bits, kernel, device, poison):
    check_rows_alone_and_together(getattr(kernel, f"int{bits}_linear"), (40, 384), bits, device)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tokens_bits_do_not_depend_on_how_many_there_are_or_where_it_stands(bits, kernel, device, poison):
    check_tokens_alone_and_together(getattr(kernel, f"int{bits}_matmul"), (40, 256), bits, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "shape"),
    [
        (4, (20480, 3072)),
        (4, (3072, 8192)),
        (4, (2048, 4096)),
        (6, (20480, 3072)),
        (8, (2048, 3072)),
        (8, (3072, 1024)),
    ],
)
def test_a_rows_bits_depend_on_that_row_alone_at_full_shape(bits, shape, kernel, device, poison):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    check_rows_alone_and_together(getattr(kernel, f"int{bits}_linear"), shape, bits, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "shape"), [(4, (12288, 3072)), (4, (3072, 8192)), (8, (2048, 3072))])
def test_a_tokens_bits_do_not_depend_on_the_others_at_full_shape(bits, shape, kernel, device, poison):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    check_tokens_alone_and_together(getattr(kernel, f"int{bits}_matmul"), shape, bits, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_planes_are_the_row_to_half_a_step(dtype, kernel, device, poison):
    x = activations(3, 384, dtype)
    planes, scale = (tensor.cpu() for tensor in kernel.fixed_point(x.to(device)))
    steps = 256 * planes[:, 0].to(torch.int64) + planes[:, 1]
    wide = scale.double().repeat_interleave(128, 1)
    assert ((steps * wide - x.double()).abs() <= wide * 0.501).all()
    assert int(steps.abs().max()) == LARGEST
    assert not steps[1, -128:].any()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 2.0**-100, 1e-20, 1e38])
def test_the_smallest_and_largest_groups_have_a_finite_scale_and_the_twins_planes(size, kernel, device, poison):
    x = torch.linspace(-1, 1, 256).reshape(1, 256) * size
    planes, scale = kernel.fixed_point(x.to(device))
    expected = reference.fixed_point(x)
    assert torch.equal(planes.cpu(), expected[0])
    assert torch.equal(scale.cpu(), expected[1])
    assert bool((scale > 0).all() and scale.isfinite().all())


def test_halves_are_rounded_to_even(kernel, device, poison):
    x = torch.zeros(1, 128)
    x[0, :5] = torch.tensor([LARGEST, 0.5, 1.5, -0.5, -2.5])  # the scale is 1
    planes, scale = kernel.fixed_point(x.to(device))
    assert scale.item() == 1.0
    assert planes[0, 1, 1:5].tolist() == [0, 2, 0, -2]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_twins_multiply_what_the_formats_unpack(bits):
    weight, weight_scale = matrix(48, 256, bits)
    size = 128 if bits == 4 else 256
    scales = weight_scale.T.contiguous() if bits == 4 else weight_scale.reshape(-1, 1)
    codes = from_fragments(weight, bits)
    unpacked = dequantize(
        GroupInt(codes=codes, scales=scales, zeros=None, group_index=None, group_size=size, bits=bits)
    )
    x = activations(5, 256, torch.float32)
    assert_same(getattr(reference, f"int{bits}_matmul")(x, weight, weight_scale), x @ unpacked.T)
    planes, scale = reference.fixed_point(x)
    error = getattr(reference, f"int{bits}_linear")(planes, scale, weight, weight_scale) - x @ unpacked.T
    half_a_step = 0.5 * scale.repeat_interleave(128, 1)
    assert (error.abs() <= half_a_step @ unpacked.abs().T + 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_with_one_column_reads_that_columns_codes(bits, dtype, kernel, device, poison):
    """Whatever order the kernel takes columns in, each meets its own codes, every value of them."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.arange(40 * 256).mul(7).remainder(high - low).add(low).reshape(40, 256).to(torch.int8)
    padded = torch.cat([codes, torch.zeros(8, 256, dtype=torch.int8)])
    scale = torch.ones((2, 40) if bits == 4 else (40,), dtype=torch.float16, device=device)
    x = torch.eye(256, dtype=dtype, device=device)
    found = getattr(kernel, f"int{bits}_matmul")(x, to_fragments(padded, bits).to(device), scale)
    assert torch.equal(found.cpu(), codes.T.to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_and_planes_do_not_overflow(bits, kernel, device, poison):
    lowest = -(2 ** (bits - 1))
    weight = to_fragments(torch.full((16, 256), lowest, dtype=torch.int8), bits).to(device)
    planes = torch.full((1, 2, 256), -128, dtype=torch.int8, device=device)
    scale = torch.ones(1, 2, device=device)
    weight_scale = torch.ones((2, 16) if bits == 4 else (16,), dtype=torch.float16, device=device)
    result = getattr(kernel, f"int{bits}_linear")(planes, scale, weight, weight_scale)
    assert result.tolist() == [[256.0 * lowest * (-128 * 257)] * 16]


def test_more_rows_than_a_decode_step_has_are_refused(kernel, device):
    planes, scale, weight, weight_scale = linear_inputs((16, 128), 4, device)
    with pytest.raises(MismatchError, match="at most 128 rows, not 256"):
        kernel.int4_linear(planes.repeat(2, 1, 1), scale.repeat(2, 1), weight, weight_scale)
