"""Products with a sigmoid: attention's output gate, SwiGLU, and the shared expert's gate."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["add_shared", "attention_gate", "swiglu"]


def attention_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Gated heads side by side: attended * sigmoid(gate), [R, Q*D] from two [R, Q, D], in the dtype of attended."""
    result: Tensor = implementation(__name__, attended).attention_gate(attended, gate)
    return result


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [R, I] from gate_up [R, 2I], whose first I columns are the gate; in its dtype."""
    result: Tensor = implementation(__name__, gate_up).swiglu(gate_up)
    return result


def add_shared(routed: Tensor, shared: Tensor, shared_gate_logit: Tensor) -> Tensor:
    """An expert layer's whole output, float32 [R, H]: routed + sigmoid(shared_gate_logit) * shared.

    routed [R, H] float32, shared [R, H] any float dtype, shared_gate_logit [R] any float dtype and any stride, so that
    it may be a column of the router's output.
    """
    result: Tensor = implementation(__name__, routed).add_shared(routed, shared, shared_gate_logit)
    return result
