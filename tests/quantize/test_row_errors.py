"""How wrong a block's output is, against torch's own divergence and plain formulas."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses

from onebox.quantize import row_errors
from onebox.quantize.row_errors import PredictionErrors, RelativeSquares


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def predictions():
    """In float64."""
    head = drawn(300, 64, seed=1)
    return PredictionErrors(0.1 * drawn(64, seed=2), 1e-6, head, head + 0.01 * drawn(300, 64, seed=3))


def test_relative_squares_do_not_depend_on_the_streams_size():
    missing, wanted = drawn(5, 64), drawn(5, 64, seed=1)
    found = RelativeSquares().of(missing, wanted)
    assert torch.allclose(found, missing.square().sum(-1) / wanted.square().sum(-1), rtol=1e-5)
    assert torch.allclose(RelativeSquares().of(8 * missing, 8 * wanted), found, rtol=1e-5)


def test_predictions_are_compared_by_their_divergence_in_any_number_of_rows(predictions, monkeypatch):
    monkeypatch.setattr(row_errors, "HEAD_ROWS", 4)
    missing, wanted = 0.1 * drawn(11, 64), drawn(11, 64, seed=4)
    source, built = (
        F.linear(F.rms_norm(rows, (64,), 1 + predictions.norm, 1e-6), head)
        for rows, head in ((wanted, predictions.source_head), (wanted - missing, predictions.built_head))
    )
    expected = F.kl_div(built.log_softmax(-1), source.softmax(-1), reduction="none").sum(-1)
    found = predictions.of(missing, wanted)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_what_is_missing_gets_the_gradients_of_the_divergence(predictions):
    missing, wanted = 0.1 * drawn(3, 64), drawn(3, 64, seed=4)
    (found,) = torch.autograd.grad(predictions.of(missing.requires_grad_(), wanted).sum(), missing)
    step = 1e-3 * drawn(3, 64, seed=5)
    with torch.no_grad():
        there, back = (predictions.of(missing + by * step, wanted) for by in (1, -1))
    assert torch.allclose((found * step).sum(-1), (there - back) / 2, rtol=1e-2)


def test_the_builds_head_counts_though_nothing_is_missing(predictions):
    assert predictions.of(torch.zeros(2, 64), drawn(2, 64)).min() > 0
    same = PredictionErrors(predictions.norm, 1e-6, predictions.source_head, predictions.source_head)
    assert same.of(torch.zeros(2, 64), drawn(2, 64)).abs().max() < 1e-6
