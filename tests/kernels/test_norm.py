"""A normed row is the same bits alone and in company, and the pair of norms is two norms."""

import pytest
import torch

from onebox.kernels.norm import cases
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms
from tests.kernels.company import assert_rows_stand_alone

EPS = 1e-6
SMALL, FULL = (200, (2, 3, 5)), (3072, (2, 3, 8, 17, 64))


def check_rows_are_independent(module, device, hidden, counts, dtype):
    chosen = forms(module)
    draw = torch.Generator().manual_seed(hidden)
    x, other = torch.randn(2, max(counts), hidden, generator=draw).to(device, dtype)
    weight = (0.1 * torch.randn(hidden, generator=draw)).to(device, torch.bfloat16)

    def outputs(rows):
        normed, total = chosen.add_rms_norm(x[rows], other[rows].float(), weight, EPS)
        pair = chosen.concat_rms_norm(other[rows], x[rows], weight, weight, EPS)
        return normed, total, chosen.rms_norm(x[rows], weight, EPS), pair

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


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_the_pair_of_norms_is_the_two_norms_side_by_side(module, device):
    chosen = forms(module)
    case = next(case for case in cases.CASES if case.op == "concat_rms_norm")
    pair = case.make(device)
    first = chosen.rms_norm(pair["embedding"], pair["embedding_weight"], EPS)
    second = chosen.rms_norm(pair["hidden"], pair["hidden_weight"], EPS)
    assert torch.equal(chosen.concat_rms_norm(**pair), torch.cat([first, second], dim=-1))
