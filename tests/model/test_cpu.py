"""Linears and experts on a CPU, compiled and plain: the numbers of a plain product, and bits that are a row's own."""

from dataclasses import replace

import pytest
import torch

from onebox.model import compiled
from onebox.model.compiled.blocks import to_blocks
from onebox.model.compiled.linear import CompiledExperts, CompiledLinear
from onebox.model.cpu import CpuExperts, CpuLinear, cpu_experts, cpu_layer, cpu_linear
from onebox.model.layers.compiled import CompiledLayer
from onebox.model.linear import DecodeActivations
from onebox.model.load import load_model
from tests.kernels.company import assert_rows_stand_alone

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
# Small and large, fewer columns than a block and more, K within what a library sums at once and beyond it, sizes that
# are no multiple of anything.
SHAPES = [(9, 32), (17, 256), (300, 200), (1536, 256), (256, 1024), (130, 2100)]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def is_compiled(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(compiled, "is_available", lambda: False)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_is_the_product_with_its_transpose(shape, dtype, is_compiled):
    weight, x = drawn(*shape, dtype=dtype), drawn(7, shape[1], dtype=dtype)
    linear = cpu_linear(weight, dtype)
    found = linear.decode(DecodeActivations(x))
    expected = x.double() @ weight.double().T
    assert isinstance(linear, CompiledLinear if is_compiled else CpuLinear)
    assert found.dtype is dtype
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(shape, dtype, is_compiled):
    linear, x = cpu_linear(drawn(*shape, dtype=dtype), dtype), drawn(64, shape[1], dtype=dtype)
    counts = (2, 3, 4, 5, 8, 9, 15, 17, 33, 64)
    assert_rows_stand_alone(lambda rows: [linear.prefill(x[rows])], counts)


def test_float32_results_of_bfloat16_rows_are_not_rounded(is_compiled):
    weight, x = drawn(300, 200, dtype=torch.float32), drawn(5, 200, dtype=torch.bfloat16)
    found = cpu_linear(weight, torch.float32).decode(DecodeActivations(x), torch.float32)
    expected = x.double() @ weight.double().T
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE[torch.float32]


def test_numbers_that_bfloat16_holds_give_the_same_bits_in_half_the_bytes():
    weight, x = drawn(300, 200, dtype=torch.bfloat16), drawn(5, 200, dtype=torch.bfloat16)
    narrow, wide = (
        cpu_linear(weight.to(dtype), dtype).decode(DecodeActivations(x), torch.float32)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16-fused", torch.bfloat16), ("modelopt-mixed", torch.float32)])
def test_a_head_is_held_in_float32_unless_it_is_stored_in_bfloat16(checkpoints, kind, dtype):
    model = load_model(checkpoints / kind, torch.device("cpu"), torch.bfloat16)
    assert model.lm_head.numbers.dtype is dtype
    assert {layer.plain.mixture.router.numbers.dtype for layer in model.stack.layers} == {dtype}


def test_blocks_hold_every_number_once_and_32_columns_each():
    matrix = torch.arange(3 * 70, dtype=torch.float32).view(3, 70)
    blocks = to_blocks(matrix)
    assert blocks[: 3 * 32].view(3, 32).equal(matrix[:, :32])
    assert blocks[3 * 32 : 3 * 64].view(3, 32).equal(matrix[:, 32:64])
    assert blocks[3 * 64 :].view(6, 3).equal(matrix[:, 64:].T)


def test_blocks_of_bfloat16_numbers_hold_them_in_pairs():
    matrix = torch.arange(2 * 40).view(2, 40).to(torch.bfloat16)
    pairs = to_blocks(matrix)[: 2 * 32].view(2, 16, 2)
    assert pairs[..., 0].equal(matrix[:, :16])
    assert pairs[..., 1].equal(matrix[:, 16:32])


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return 0.1 * drawn(16, 96, 2 * 40, dtype=dtype), 0.1 * drawn(16, 40, 96, dtype=dtype)


def choices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """24 rows, and which 2 of 16 experts they chose: some all different, some the same for many rows."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(16, generator=draw)[:2] for _ in range(24)])
    ids[10:20] = torch.tensor([3, 5])
    return drawn(24, 96, dtype=dtype), ids.to(torch.int32), torch.rand(24, 2, generator=draw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_the_weighted_sum_over_the_chosen_ones(dtype, is_compiled):
    (gate_up, down), (x, ids, weights) = matrices(dtype), choices(dtype)
    expected = torch.zeros(24, 96, dtype=torch.float64)
    for row in range(24):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (x[row].double() @ gate_up[expert].double()).chunk(2)
            expected[row] += weight * (torch.nn.functional.silu(gate) * up) @ down[expert].double()
    made = cpu_experts([(gate_up[:5], down[:5]), (gate_up[5:], down[5:])], 16)
    found = made.decode(DecodeActivations(x), ids, weights)
    assert isinstance(made, CompiledExperts if is_compiled else CpuExperts)
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_through_its_experts_has_the_same_bits_among_any_number_of_rows(dtype, is_compiled):
    made, (x, ids, weights) = cpu_experts([matrices(dtype)], 16), choices(dtype)
    assert_rows_stand_alone(
        lambda rows: [made.decode(DecodeActivations(x[rows]), ids[rows], weights[rows])], (2, 3, 4, 5, 8, 11, 17, 24)
    )


def test_float32_experts_taken_together_and_one_by_one_give_the_same_bits():
    made, (x, ids, _) = CpuExperts(*matrices(torch.float32)), choices(torch.float32)
    together, alone = made._chosen(x, ids), made._through_each(x, ids)
    few = [made._through_few(x[row : row + 4], ids[row : row + 4]) for row in range(0, 24, 4)]
    assert (together == alone).all()
    assert all((part == alone[4 * i : 4 * i + 4]).all() for i, part in enumerate(few))


def test_a_layer_with_a_matrix_that_compiled_code_cannot_read_stays_as_it_is(checkpoints):
    layer = load_model(checkpoints / "bf16-fused", torch.device("cpu"), torch.float32).stack.layers[0]
    other = replace(layer.plain.mixture, experts=CpuExperts(*matrices(torch.float32)))
    mixed = replace(layer.plain, mixture=other)
    assert isinstance(layer, CompiledLayer)
    assert cpu_layer(mixed) is mixed
