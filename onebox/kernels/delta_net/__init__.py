"""Gated DeltaNet: a decode step that commits late, the chunked prefill, and the gated norm that follows both."""

from torch import Tensor

from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.kernels.dispatch import implementation

__all__ = ["delta_net_prefill", "delta_net_step", "gated_norm"]


def delta_net_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    pool: DeltaPool,
    cu_rows: Tensor,
    slots: Tensor,
    keep: Tensor,
) -> Tensor:
    """Outputs [R, heads, Dv], in the dtype of qkv, of a decode or verify step; the pool is written in place.

    qkv [R, conv_dim] before the convolution, a and b [R, heads] before their activations; rows may be strided. Sequence
    s has the rows cu_rows[s]..cu_rows[s + 1] (int32 [S + 1]), at most M of them and possibly none, and owns the slot
    slots[s] (int32 [S], all different). Of the slot's pending tokens the first keep[s] (int32 [S], at most as many as
    its last step had; 0 after a prefill) are folded into the state, which is read once and written once; the rest are
    forgotten, and this step's tokens become the pending ones. A sequence with no rows that keeps nothing leaves its
    slot alone, so it may name any (padding); one with no rows that keeps some only brings the slot up to date.

    A token's bits depend on its sequence's kept tokens alone: not on how they were grouped into steps, on
    tokens that were forgotten, or on other sequences.
    """
    result: Tensor = implementation(__name__, qkv).delta_net_step(qkv, a, b, weights, pool, cu_rows, slots, keep)
    return result


def delta_net_prefill(
    qkv: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, pool: DeltaPool, cu_rows: Tensor, slots: Tensor
) -> Tensor:
    """Outputs [T, heads, Dv], in the dtype of qkv, of whole stretches of tokens, folded into the pool at once.

    Arguments as for `delta_net_step`, with any number of rows a sequence; pending tokens are neither read nor
    written. Tokens go through in chunks of 64 from each sequence's first row on: a prompt that is split at
    multiples of 64 gives the bits of the whole one.
    """
    result: Tensor = implementation(__name__, qkv).delta_net_prefill(qkv, a, b, weights, pool, cu_rows, slots)
    return result


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed o times weight times silu(z), the norm over each head's Dv: [R, heads * Dv] in the dtype of z.

    o [R, heads, Dv] any float dtype; z [R, heads * Dv], rows may be strided; weight [Dv], not an offset from one.
    """
    result: Tensor = implementation(__name__, z).gated_norm(o, z, weight, eps)
    return result
