"""The gates of a few rows on a CPU."""

from onebox.kernels.common.arrays import array, quietly, sigmoid, silu, tensor

__all__ = ["add_shared", "swiglu"]


@quietly
def swiglu(gate_up):
    both, half = array(gate_up), gate_up.shape[-1] // 2
    inner = silu(both[..., :half])
    inner *= both[..., half:]
    return tensor(inner, gate_up.dtype)


@quietly
def add_shared(routed, shared, shared_gate_logit):
    share = array(shared) * sigmoid(array(shared_gate_logit))[:, None]
    share += array(routed)
    return tensor(share, routed.dtype)
