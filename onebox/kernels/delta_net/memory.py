"""The small weights and the state of a DeltaNet layer, as arguments of the operations."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["DeltaPool", "DeltaWeights"]


class DeltaWeights(NamedTuple):
    """A layer's small weights, any float dtype."""

    conv: Tensor
    """[conv_dim, taps]; the last tap multiplies the current token."""
    a_log: Tensor
    """[heads]."""
    dt_bias: Tensor
    """[heads]."""


class DeltaPool(NamedTuple):
    """One layer's state of all sequences, one slot per sequence.

    `matrices` and `conv_rows` of a slot include all accepted tokens up to the slot's position. After it come up to M
    pending tokens of the last step; the next step folds in the accepted ones. A pending token is stored as its inputs
    (its row before the convolution, its a and b): key, value and gates are recomputed from these by the same operations
    in the same order, so they are not stored. A rollback is a smaller number of accepted tokens.

    Arithmetic on matrices is float32. In a pool of 16 bits they are rounded to its dtype, to nearest even, after every
    token of a step and after every chunk of a prefill, whether they are stored there or stay in registers: so what
    follows does not tell how tokens were grouped into calls. Outputs are computed before the rounding.

    conv_dim is key heads x DK (queries), key heads x DK (keys), heads x DV (values).
    """

    matrices: Tensor
    """float32, bfloat16 or float16 [slots, heads, DK, DV]: a head's matrix maps keys to values."""
    conv_rows: Tensor
    """[slots, taps - 1, conv_dim], the dtype of qkv or float32: the rows before the slot's position, oldest first."""
    pending_rows: Tensor
    """[slots, M, conv_dim], the dtype of qkv or float32."""
    pending_gates: Tensor
    """float32 [slots, M, 2, heads]: a, then b."""

    @property
    def num_key_heads(self) -> int:
        _, heads, key_dim, value_dim = self.matrices.shape
        return (self.conv_rows.shape[-1] - heads * value_dim) // (2 * key_dim)
