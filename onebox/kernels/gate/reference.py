"""The plain twin of the gates."""

import torch
from torch import Tensor

__all__ = ["add_shared", "attention_gate", "swiglu"]


def attention_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """See `onebox.kernels.gate.attention_gate`."""
    gated = attended.to(torch.float32) * _sigmoid(gate)
    return gated.to(attended.dtype).flatten(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `onebox.kernels.gate.swiglu`."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gate * _sigmoid(gate) * up).to(gate_up.dtype)


def add_shared(routed: Tensor, shared: Tensor, shared_gate_logit: Tensor) -> Tensor:
    """See `onebox.kernels.gate.add_shared`."""
    return routed + _sigmoid(shared_gate_logit).unsqueeze(-1) * shared.to(torch.float32)


def _sigmoid(x: Tensor) -> Tensor:
    """The float32 sigmoid, by way of float64.

    On a CPU torch takes vector instructions for most elements and scalar ones for the last few, and the two round exp
    differently, so a float32 result would depend on where in the tensor an element stands.
    """
    return x.to(torch.float64).sigmoid().to(torch.float32)
