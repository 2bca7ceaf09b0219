"""Gates are what the float32 model says, and a row's bits do not depend on its company."""

import pytest
import torch

from onebox.model import reference as model
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms, operations
from tests.kernels.company import assert_rows_stand_alone
from tests.kernels.tolerance import assert_same

SMALL, FULL = (200, (2, 3, 5)), (3072, (2, 3, 8, 17, 64))


def check_rows_are_independent(module, device, width, counts, dtype):
    chosen = forms(module)
    draw = torch.Generator().manual_seed(width)
    x, y = (4 * torch.randn(2, max(counts), width, generator=draw)).to(device, dtype)

    def outputs(rows):
        heads = (-1, 4, width // 4)
        gated = chosen.attention_gate(x[rows].view(heads), y[rows].view(heads))
        return gated, chosen.swiglu(x[rows]), chosen.add_shared(x[rows].float(), y[rows], y[rows, 3])

    assert_rows_stand_alone(outputs, counts)


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.skipif(HAS_GPU, reason="the GPU runs the full shapes")
def test_a_row_does_not_depend_on_its_company(module, dtype):
    check_rows_are_independent(module, torch.device("cpu"), *SMALL, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_the_twin_does_not_depend_on_its_company_at_full_size(dtype):
    check_rows_are_independent("reference", torch.device("cpu"), *FULL, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_its_company_on_the_gpu(device, dtype):
    check_rows_are_independent("kernel", device, *FULL, dtype)


def test_swiglu_is_the_models():
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(16, 16, generator=draw) for _ in range(3))
    found = operations()["swiglu"](torch.cat([x @ gate.T, x @ up.T], dim=-1))
    assert_same(found, model.swiglu(x, gate, up, torch.eye(16)))


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_a_gate_far_from_zero_opens_or_closes_and_nothing_overflows(module, device):
    chosen = forms(module)
    ones = torch.ones(1, 1, 2, device=device)
    logits = torch.tensor([[[200.0, -200.0]]], device=device)
    assert chosen.attention_gate(ones, logits).tolist() == [[1.0, 0.0]]
    assert chosen.swiglu(torch.tensor([[200.0, -200.0, 3.0, 3.0]], device=device)).tolist() == [[600.0, 0.0]]
