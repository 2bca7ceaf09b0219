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

    A slot stands at some token. `matrices` and `conv_rows` hold all accepted tokens up to it. After it come up to M
    pending tokens of the last step, of which the next step folds in the accepted ones. A pending token is stored as its
    inputs (its row before the convolution, its a and b): its key, value and gates follow from these by the same
    operations in the same order, so they are not stored. A rollback is nothing but a smaller number of accepted tokens.

    conv_dim is two runs of key heads x DK (queries, keys) and one of heads x DV (values).
    """

    matrices: Tensor
    """float32 [slots, heads, DK, DV]: a head's matrix maps keys to values."""
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
