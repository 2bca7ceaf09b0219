"""The optimizer: Muon for the matrices inside layers, AdamW for embeddings, LM head, gates and norms."""

from collections.abc import Mapping

import torch
from torch import Tensor

from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass, fused_experts, modules
from recipes.pocket.training.vision import vision_sides

__all__ = ["Optimizer", "matrix_sides", "orthogonalised"]

MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0
ADAM_SHARE = 0.5
"""AdamW's learning rate as a share of Muon's."""
_UPDATE_RMS = 0.2
"""Muon's updates are scaled to the RMS that AdamW's have, so that one learning rate fits both."""
_PLAIN_CLASSES = (ModuleClass.EMBEDDING, ModuleClass.LM_HEAD, ModuleClass.DELTA_GATES)


class Optimizer:
    """Owns the moments of all weights. A step updates the weights and clears their gradients."""

    def __init__(self, sides: Mapping[str, tuple[int, int]], weights: Mapping[str, Tensor]) -> None:
        """`sides` are the rows and columns of each matrix in a tensor that Muon updates, by the tensor's name."""
        self._weights = list(weights.values())
        self._groups: dict[tuple[int, int], list[Tensor]] = {}
        for name, weight in weights.items():
            if name in sides:
                self._groups.setdefault(sides[name], []).append(weight)
        self._moments: dict[tuple[int, int], Tensor] = {}
        others = [weight for name, weight in weights.items() if name not in sides]
        is_fused = self._weights[0].device.type == "cuda"
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_fused)

    @property
    def has_gradients(self) -> bool:
        return self._weights[0].grad is not None

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Updates all weights and returns the norm of the gradients before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._weights, MAX_GRADIENT_NORM, foreach=True)
        for side, weights in self._groups.items():
            self._step_matrices(side, weights, learning_rate)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * ADAM_SHARE
        self._adam.step()
        for weight in self._weights:
            weight.grad = None
        return norm

    def reset(self) -> None:
        """Clears all moments, for weights that were restored."""
        self._moments.clear()
        self._adam.state.clear()

    def _step_matrices(self, side: tuple[int, int], weights: list[Tensor], learning_rate: float) -> None:
        gradients = torch.cat([weight.grad.view(-1, *side) for weight in weights if weight.grad is not None])
        moment = self._moments.setdefault(side, torch.zeros_like(gradients))
        moment.lerp_(gradients, 1 - MOMENTUM)
        ahead = gradients.lerp_(moment, MOMENTUM)
        update = orthogonalised(ahead).mul_(_UPDATE_RMS * max(side) ** 0.5)
        parts = update.split([weight.numel() // (side[0] * side[1]) for weight in weights])  # type: ignore[no-untyped-call]
        torch._foreach_mul_(weights, 1 - learning_rate * WEIGHT_DECAY)
        torch._foreach_add_(weights, [p.view_as(w) for p, w in zip(parts, weights, strict=True)], alpha=-learning_rate)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest matrices with all singular values near 1; [count, rows, columns], five Newton-Schulz iterations."""
    dtype = torch.bfloat16 if matrices.device.type == "cuda" else torch.float32
    x = matrices.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        # A quintic a x + b x^3 + c x^5 whose coefficients bring every singular value into 0.7 to 1.2 fastest.
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    nearest: Tensor = x.mT if is_tall else x
    return nearest.to(matrices.dtype)


def matrix_sides(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """By tensor name, rows and columns of each matrix in the tensor. Tensors that AdamW updates are not in it."""
    sides = {
        module.plain_tensor: (module.shape[0], module.shape[1])
        for module in modules(spec)
        if module.is_matrix and module.module_class not in _PLAIN_CLASSES
    }
    for group in fused_experts(spec):
        _, rows, columns = group.shape
        sides[group.tensor] = (rows // len(group.parts), columns)
    return sides | (vision_sides(spec.vision) if spec.vision else {})
