"""The plain twin of the rotation."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["qk_norm_rope", "rotary_table"]


def rotary_table(positions: Tensor, frequencies: Tensor, mrope_section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.rope.rotary_table`."""
    axis = torch.zeros(frequencies.shape[0], dtype=torch.long)
    for index in (1, 2):
        axis[index : 3 * mrope_section[index] : 3] = index
    angles = positions.to(torch.float32)[axis].T * frequencies
    # Through float64: a float32 cosine's last bit depends on the device, and on a CPU on the place in the tensor.
    wide = angles.to(torch.float64)
    return wide.cos().to(torch.float32), wide.sin().to(torch.float32)


def qk_norm_rope(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `onebox.kernels.rope.qk_norm_rope`."""
    head_dim = q_weight.shape[0]
    query, gate = q_gate.reshape(q_gate.shape[0], q_gate.shape[1] // (2 * head_dim), 2, head_dim).unbind(-2)
    key = k.reshape(k.shape[0], k.shape[1] // head_dim, head_dim)
    rotated = _norm_and_rotate(query, q_weight, cos, sin, eps), _norm_and_rotate(key, k_weight, cos, sin, eps)
    return rotated[0], gate.contiguous(), rotated[1]


def _norm_and_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Heads [R, heads, D] normed by weight [D] and turned by cos and sin [R, rotary_dim / 2]."""
    # Contiguous, so that the sum over a head runs in one order whatever it was cut from.
    x = heads.to(torch.float32).contiguous()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(torch.float32))
    half = cos.shape[-1]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(heads.dtype)
