"""What a DeltaNet layer is made of and what it remembers, as the operations take them."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["DeltaPool", "DeltaWeights"]


class DeltaWeights(NamedTuple):
    """A layer's small weights, any float dtype."""

    conv: Tensor
    """[conv_dim, taps]; the last tap meets the current token."""
    a_log: Tensor
    """[heads]."""
    dt_bias: Tensor
    """[heads]."""


class DeltaPool(NamedTuple):
    """One layer's memory of all sequences, a slot each.

    A slot stands at some token. Behind it, folded into `matrices` and `conv_rows`, is all that is certain; after it
    come up to M pending tokens of the last step, of which the next step keeps as many as it is told. A pending token is
    held as what it brought along (its row before the convolution, its a and b): its key, value and gates follow from
    these by the same operations in the same order, so they need no place. To keep fewer is the whole of a rollback.

    conv_dim is two runs of key heads x Dk (queries, keys) and one of heads x Dv (values).
    """

    matrices: Tensor
    """float32 [slots, heads, Dk, Dv]: a head's matrix maps keys to values."""
    conv_rows: Tensor
    """[slots, taps - 1, conv_dim], the dtype of qkv or float32: the rows before the slot's token, oldest first."""
    pending_rows: Tensor
    """[slots, M, conv_dim], the dtype of qkv or float32."""
    pending_gates: Tensor
    """float32 [slots, M, 2, heads]: a, then b."""

    @property
    def num_key_heads(self) -> int:
        _, heads, key_dim, value_dim = self.matrices.shape
        return (self.conv_rows.shape[-1] - heads * value_dim) // (2 * key_dim)
