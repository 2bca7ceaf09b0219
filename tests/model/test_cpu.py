"""Linears and experts on a CPU: the numbers of a plain product, and bits that are a row's own."""

import pytest
import torch

from onebox.model import packed
from onebox.model.cpu import CpuExperts, CpuLinear, JoinedExperts, cpu_experts
from onebox.model.linear import Phase, Rows
from onebox.model.packed import Packed
from tests.kernels.company import assert_rows_stand_alone

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
# Small and large, K within a block and beyond it, sizes that are no multiple of anything.
SHAPES = [(9, 32), (17, 256), (300, 200), (1536, 256), (256, 1024), (130, 2100)]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def is_packed(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(packed, "_keeps_the_order", lambda _: False)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_is_the_product_with_its_transpose(shape, dtype, is_packed):
    weight, x = drawn(*shape, dtype=dtype), drawn(7, shape[1], dtype=dtype)
    found = CpuLinear.of(weight, dtype)(Rows(x, Phase.DECODE))
    expected = x.double() @ weight.double().T
    assert found.dtype is dtype
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(shape, dtype, is_packed):
    matrix, x = Packed.of(drawn(*shape, dtype=dtype)), drawn(64, shape[1], dtype=dtype)
    assert_rows_stand_alone(lambda rows: [matrix(x[rows])], (2, 3, 4, 5, 8, 9, 17, 33, 64))


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return 0.1 * drawn(16, 96, 2 * 40, dtype=dtype), 0.1 * drawn(16, 40, 96, dtype=dtype)


def choices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """24 rows, and which 2 of 16 experts they chose: some all different, some the same for many rows."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(16, generator=draw)[:2] for _ in range(24)])
    ids[10:20] = torch.tensor([3, 5])
    return drawn(24, 96, dtype=dtype), ids.to(torch.int32), torch.rand(24, 2, generator=draw)


KINDS = [(CpuExperts, torch.float32), (CpuExperts, torch.bfloat16), (JoinedExperts.of, torch.bfloat16)]
NAMES = ["float32", "bfloat16", "joined"]


@pytest.mark.parametrize(("make", "dtype"), KINDS, ids=NAMES)
def test_experts_are_the_weighted_sum_over_the_chosen_ones(make, dtype):
    (gate_up, down), (x, ids, weights) = matrices(dtype), choices(dtype)
    expected = torch.zeros(24, 96, dtype=torch.float64)
    for row in range(24):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (x[row].double() @ gate_up[expert].double()).chunk(2)
            expected[row] += weight * (torch.nn.functional.silu(gate) * up) @ down[expert].double()
    found = make(gate_up, down)(Rows(x, Phase.DECODE), ids, weights)
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("make", "dtype"), KINDS, ids=NAMES)
def test_a_row_through_its_experts_has_the_same_bits_among_any_number_of_rows(make, dtype):
    made, (x, ids, weights) = make(*matrices(dtype)), choices(dtype)
    assert_rows_stand_alone(
        lambda rows: [made(Rows(x[rows], Phase.DECODE), ids[rows], weights[rows])], (2, 3, 4, 5, 8, 11, 17, 24)
    )


def test_float32_experts_taken_together_and_one_by_one_give_the_same_bits():
    made, (x, ids, _) = CpuExperts(*matrices(torch.float32)), choices(torch.float32)
    together, alone = made._chosen(x, ids), made._through_each(x, ids)
    few = [made._through_few(x[row : row + 4], ids[row : row + 4]) for row in range(0, 24, 4)]
    assert (together == alone).all()
    assert all((part == alone[4 * i : 4 * i + 4]).all() for i, part in enumerate(few))


def test_only_small_bfloat16_experts_are_joined():
    assert isinstance(cpu_experts(*matrices(torch.bfloat16)), JoinedExperts)
    assert isinstance(cpu_experts(*matrices(torch.float32)), CpuExperts)
    large = torch.empty(64, 512, 256, dtype=torch.bfloat16), torch.empty(64, 128, 512, dtype=torch.bfloat16)
    assert isinstance(cpu_experts(*large), CpuExperts)
