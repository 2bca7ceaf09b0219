"""The gates of a few rows on a CPU."""

from torch import Tensor

from onebox.kernels.arrays import array, quietly, sigmoid, silu, tensor

__all__ = ["add_shared", "attention_gate", "swiglu"]


@quietly
def attention_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """See `onebox.kernels.gate.attention_gate`."""
    gated = sigmoid(array(gate))
    gated *= array(attended)
    return tensor(gated.reshape(len(gated), gated.shape[1] * gated.shape[2]), attended.dtype)


@quietly
def swiglu(gate_up: Tensor) -> Tensor:
    """See `onebox.kernels.gate.swiglu`."""
    both, half = array(gate_up), gate_up.shape[-1] // 2
    inner = silu(both[..., :half])
    inner *= both[..., half:]
    return tensor(inner, gate_up.dtype)


@quietly
def add_shared(routed: Tensor, shared: Tensor, shared_gate_logit: Tensor) -> Tensor:
    """See `onebox.kernels.gate.add_shared`."""
    share = array(shared) * sigmoid(array(shared_gate_logit))[:, None]
    share += array(routed)
    return tensor(share, routed.dtype)
