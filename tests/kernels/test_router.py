"""The router: ties, order, agreement with the plain formula, and rows that do not see each other."""

from functools import partial

import pytest
import torch

from onebox.kernels.router import reference
from onebox.spec.errors import MismatchError
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms
from tests.kernels.company import assert_rows_stand_alone

ROWS = (2, 3, 8, 17, 64)


def kernel():
    return forms("kernel")


def draw(rows, experts, seed=0):
    return 3 * torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def test_the_twin_is_a_softmax_over_all_experts_then_the_top_made_to_sum_one():
    logits = draw(50, 256)
    shares, chosen = logits.softmax(dim=-1).topk(8, dim=-1)
    ids, weights = reference.route(logits, 8)
    assert torch.equal(ids, chosen.to(torch.int32))
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True))


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_ties_go_to_the_lower_id_and_zero_has_no_sign(module, device):
    if module == "reference":
        device = torch.device("cpu")
    route = forms(module).route
    logits = torch.tensor([[-0.0, 1.0, 0.0, -2.0, 1.0, -0.0, 0.0]], device=device)
    ids, weights = route(logits, 5)
    assert ids.tolist() == [[1, 4, 0, 2, 5]]
    assert float(weights.sum()) == pytest.approx(1.0)


def test_a_nan_is_seen_in_the_weights(device):
    logits = torch.tensor([[0.0, 1.0, -float("nan"), 2.0]], device=device)
    ids, weights = kernel().route(logits, 2)
    assert ids.tolist() == [[2, 3]]
    assert bool(weights.isnan().all())


def test_more_experts_than_there_are_is_an_error():
    with pytest.raises(MismatchError, match="4 experts"):
        kernel().route(torch.zeros(1, 4), 5)


def check_rows_alone(route, logits):
    for count in (rows for rows in ROWS if rows <= len(logits)):
        ids, weights = route(logits[:count])
        for row in range(count):
            alone = route(logits[row : row + 1])
            assert torch.equal(alone[0][0], ids[row])
            assert torch.equal(alone[1][0], weights[row])


def test_a_row_does_not_depend_on_the_others(device):
    check_rows_alone(partial(kernel().route, k=3), draw(17, 20).to(device))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others_at_full_size(device):
    check_rows_alone(partial(kernel().route, k=8), draw(64, 256).to(device))


def check_norm_company(device: torch.device, counts: tuple[int, ...], hidden: int, outputs: int) -> None:
    """One launch for few rows, two for many."""
    draw = torch.Generator().manual_seed(hidden)
    count = max(counts)
    residual, weight = (torch.randn(*shape, generator=draw).to(device) for shape in ((count, hidden), (hidden,)))
    parts = torch.randn(3, count, hidden, generator=draw).to(device)
    router = torch.randn(outputs, hidden, generator=draw).to(device, torch.bfloat16)

    def results(chosen: slice) -> list[torch.Tensor]:
        given = residual[chosen], parts[:, chosen], 0.1 * weight, 1e-6, torch.bfloat16, router
        rows, total, products = forms("kernel").add_rms_norm_router(*given)
        return [rows.x, rows.planes, rows.scale, rows.squares, total, products.transpose(0, 1)]

    assert_rows_stand_alone(results, counts)


@pytest.mark.skipif(HAS_GPU, reason="there the same runs on the GPU")
def test_a_row_of_the_norm_with_the_router_does_not_depend_on_its_company():
    check_norm_company(torch.device("cpu"), (5, 17), 256, 9)


@pytest.mark.gpu
def test_a_row_of_the_norm_with_the_router_does_not_depend_on_its_company_on_the_gpu(device):
    check_norm_company(device, (2, 4, 5, 16, 17, 64), 3072, 257)
