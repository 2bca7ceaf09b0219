"""What the float linears promise beyond equal twins: exact decoding, rows that do not see each other, refusals."""

import pytest
import torch

import onebox.kernels.float_linear as float_linear
from onebox.formats import Dialect, dequantize_nvfp4, pack_e2m1
from onebox.kernels.float_linear.cases import arguments
from onebox.kernels.float_linear.shapes import DECODE_ROWS
from onebox.spec.errors import MismatchError
from tests.kernels.catalogue import forms

BF16, F32 = torch.bfloat16, torch.float32
DECODE = ("fp8_block_linear", "fp8_row_block_linear", "fp8_row_linear", "nvfp4_linear", "bf16_linear")
PREFILL = ("fp8_block_matmul", "fp8_row_matmul", "nvfp4_matmul", "bf16_matmul")
# Operation, output columns, input columns, dtype of x: the published 122B shapes.
FULL_DECODE = [
    ("fp8_block_linear", 2048, 3072, BF16),
    ("fp8_block_linear", 3072, 8192, BF16),
    ("fp8_block_linear", 3072, 1024, F32),
    ("fp8_row_linear", 3072, 8192, BF16),
    ("nvfp4_linear", 1024, 3072, BF16),
    ("nvfp4_linear", 3072, 1024, F32),
    ("bf16_linear", 16384, 3072, BF16),
    ("bf16_linear", 64, 3072, BF16),
    ("bf16_linear", 256, 3072, F32),
]
FULL_PREFILL = [
    ("fp8_block_matmul", 2048, 3072, BF16),
    ("fp8_row_matmul", 3072, 1024, BF16),
    ("nvfp4_matmul", 1024, 3072, BF16),
    ("nvfp4_matmul", 3072, 1024, F32),
    ("bf16_matmul", 256, 3072, BF16),
    ("bf16_matmul", 2048, 3072, F32),
]


@pytest.fixture
def kernel():
    """The kernels' module; in a fixture because Triton must load after the interpreter was chosen."""
    return forms("kernel")


def assert_rows_stand_alone(function, inputs: dict, counts: tuple[int, ...]) -> None:
    """Rows among any number of others, at the front and at the end, have the bits they have among all."""
    x = inputs.pop("x")
    among_all = function(x=x, **inputs)
    for count in counts:
        assert torch.equal(function(x=x[:count], **inputs), among_all[:count]), f"the first {count} rows differ"
        assert torch.equal(function(x=x[-count:], **inputs), among_all[-count:]), f"the last {count} rows differ"
    others = x.clone()
    others[1:] = -7.0
    assert torch.equal(function(x=others, **inputs)[0], among_all[0]), "a row sees what the others hold"


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("op", DECODE)
def test_a_decoded_row_does_not_depend_on_the_others(kernel, device, op, dtype):
    columns = 512 if dtype == BF16 else 256  # several steps along K, most of them in two parts
    assert_rows_stand_alone(getattr(kernel, op), arguments(device, op, 20, 24, columns, dtype), (1, 3, 8, 17))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("op", PREFILL)
def test_a_prefilled_row_does_not_depend_on_the_others(kernel, device, op, dtype):
    assert_rows_stand_alone(getattr(kernel, op), arguments(device, op, 68, 24, 80, dtype), (1, 3, 65))


@pytest.mark.parametrize("op", [*DECODE, *PREFILL])
def test_the_twin_keeps_rows_apart_too(op):
    twin = getattr(float_linear, op)
    inputs = arguments(torch.device("cpu"), op, 64, 72, 256, F32)
    assert_rows_stand_alone(twin, inputs, (1, 2, 3, 8, 17))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "n", "k", "dtype"), FULL_DECODE)
def test_a_decoded_row_does_not_depend_on_the_others_at_full_size(kernel, device, op, n, k, dtype):
    assert_rows_stand_alone(getattr(kernel, op), arguments(device, op, 64, n, k, dtype), (1, 2, 3, 8, 16, 17, 33))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "n", "k", "dtype"), FULL_PREFILL)
def test_a_prefilled_row_does_not_depend_on_the_others_at_full_size(kernel, device, op, n, k, dtype):
    assert_rows_stand_alone(getattr(kernel, op), arguments(device, op, 300, n, k, dtype), (1, 2, 3, 8, 17, 64, 130))


@pytest.mark.parametrize("op", ["fp8_row_linear", "fp8_row_matmul"])
def test_every_e4m3_code_is_decoded_exactly(kernel, device, op):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes[127::128] = 0  # the two that are no number
    weight = codes.view(torch.float8_e4m3fn).reshape(16, 16)
    one = torch.ones(1, device=device)
    found = getattr(kernel, op)(torch.eye(16, dtype=BF16, device=device), weight, one, F32)
    assert torch.equal(found, weight.to(F32).T)


@pytest.mark.parametrize("op", ["nvfp4_linear", "nvfp4_matmul"])
def test_every_e2m1_code_times_every_scale_is_exact(kernel, device, op):
    scale = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).reshape(127, 1)
    packed = pack_e2m1(torch.arange(16, dtype=torch.uint8, device=device).expand(127, 16).contiguous())
    multiplier = torch.tensor(0.5, device=device)
    found = getattr(kernel, op)(torch.eye(16, dtype=BF16, device=device), packed, scale, multiplier, F32)
    assert torch.equal(found, dequantize_nvfp4(packed, scale, multiplier, Dialect.MODELOPT).T)


@pytest.mark.parametrize("op", ["bf16_linear", "bf16_matmul"])
def test_a_float32_row_keeps_all_its_bits(kernel, device, op):
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(getattr(kernel, op)(x, torch.eye(64, dtype=BF16, device=device)), x)


@pytest.mark.parametrize("op", ["fp8_block_linear", "nvfp4_matmul"])
def test_rows_may_be_columns_of_a_wider_tensor(kernel, device, op):
    inputs = arguments(device, op, 5, 40, 256, BF16)
    x = inputs.pop("x")
    wider = torch.full((5, 300), float("nan"), dtype=BF16, device=device)
    wider[:, 30:286] = x
    assert torch.equal(getattr(kernel, op)(wider[:, 30:286], **inputs), getattr(kernel, op)(x, **inputs))


def test_the_order_of_summation_is_a_constant_of_the_shape():
    from onebox.kernels.float_linear import kernel

    for _, n, k, dtype in FULL_DECODE:
        rows = [torch.empty(count, k, dtype=dtype) for count in range(1, DECODE_ROWS + 1)]
        for kind in ("block", "row", "nvfp4", "bf16"):
            assert len({kernel.decode_tile(x, n, kind)[:3] for x in rows}) == 1
            assert len({kernel.prefill_tile(x, n, kind) for x in rows}) == 1


@pytest.mark.parametrize("op", DECODE)
def test_a_decode_linear_refuses_more_rows_than_its_limit(op):
    inputs = arguments(torch.device("cpu"), op, DECODE_ROWS + 1, 16, 128, BF16)
    with pytest.raises(MismatchError, match="at most 128 rows"):
        getattr(float_linear, op)(**inputs)


@pytest.mark.parametrize("op", [*DECODE, *PREFILL])
def test_rows_of_another_width_or_dtype_are_refused(op):
    inputs = arguments(torch.device("cpu"), op, 2, 16, 128, BF16)
    x = inputs.pop("x")
    with pytest.raises(MismatchError, match="do not fit"):
        getattr(float_linear, op)(x[:, :64], **inputs)
    with pytest.raises(MismatchError, match="bfloat16 or float32"):
        getattr(float_linear, op)(x.to(torch.float16), **inputs)


def test_a_weight_of_another_dtype_or_with_scales_of_another_shape_is_refused():
    x, one = torch.zeros(1, 32), torch.ones(1)
    codes, packed = torch.zeros(4, 32, dtype=torch.float8_e4m3fn), torch.zeros(4, 16, dtype=torch.uint8)
    with pytest.raises(MismatchError, match="float8_e4m3fn"):
        float_linear.fp8_row_linear(x, torch.zeros(4, 32), torch.ones(4))
    with pytest.raises(MismatchError, match="one each"):
        float_linear.fp8_row_matmul(x, codes, torch.ones(3))
    with pytest.raises(MismatchError, match="block scales"):
        float_linear.fp8_block_linear(x, codes, torch.ones(4))
    with pytest.raises(MismatchError, match="do not go with"):
        float_linear.nvfp4_linear(x, packed, torch.ones(4, 2), one)
    with pytest.raises(MismatchError, match="one float32 multiplier"):
        float_linear.nvfp4_matmul(x, packed, torch.ones(4, 2).to(torch.float8_e4m3fn), torch.ones(4))


def test_the_result_has_the_dtype_that_is_asked_for():
    inputs = arguments(torch.device("cpu"), "bf16_linear", 2, 16, 128, BF16)
    assert float_linear.bf16_linear(**inputs).dtype == BF16
    assert float_linear.bf16_linear(**inputs, out_dtype=F32).dtype == F32
