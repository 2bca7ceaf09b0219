"""Muon's orthogonalisation, and moments that can be cleared."""

import torch

from onebox.spec.model import spec_from_config
from recipes.pocket.config import TOY
from recipes.pocket.training.network import draw_weights
from recipes.pocket.training.optimizer import Optimizer, matrix_sides, orthogonalised

SPEC = spec_from_config(TOY)


def test_orthogonalised_matrices_have_singular_values_about_one():
    matrices = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_cleared_moments_do_not_move_weights():
    weights = {name: weight.requires_grad_() for name, weight in draw_weights(SPEC).items()}
    optimizer = Optimizer(matrix_sides(SPEC), weights)
    for scale in (1.0, 0.0):
        for weight in weights.values():
            weight.grad = torch.full_like(weight, scale)
        if scale == 0.0:
            optimizer.reset()
            before = {name: weight.detach().clone() for name, weight in weights.items()}
        optimizer.step(1e-3)
    norm = "model.language_model.norm.weight"
    assert torch.equal(weights[norm], before[norm])
