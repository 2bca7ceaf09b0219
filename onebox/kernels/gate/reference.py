"""The plain twin of the gates."""

import torch
from torch import Tensor

from onebox.kernels.invariant import sigmoid, silu

__all__ = ["add_shared", "attention_gate", "swiglu"]


def attention_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """See `onebox.kernels.gate.attention_gate`."""
    gated = attended.to(torch.float32) * sigmoid(gate)
    return gated.to(attended.dtype).flatten(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `onebox.kernels.gate.swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def add_shared(routed: Tensor, shared: Tensor, shared_gate_logit: Tensor) -> Tensor:
    """See `onebox.kernels.gate.add_shared`."""
    return routed + sigmoid(shared_gate_logit).unsqueeze(-1) * shared.to(torch.float32)
