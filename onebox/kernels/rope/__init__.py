"""Query and key heads: norm, then partial rotation (mRoPE, its three axes interleaved), with the output gate set apart.

The table is made once a step, `qk_norm_rope` runs in every attention layer; `frequencies.rotary_frequencies` gives the
constants.
"""

from collections.abc import Sequence

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["qk_norm_rope", "rotary_table"]


def rotary_table(positions: Tensor, frequencies: Tensor, mrope_section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [R, F] each, of positions [3, R]: time, height, width.

    Positions are integers below 2^24, any stride apart; frequencies [F] float32 come from `rotary_frequencies`. Pair j
    turns by height if j % 3 == 1 and j < 3 * mrope_section[1], by width if j % 3 == 2 and j < 3 * mrope_section[2], by
    time else. An angle is one float32 product, as in the model's own code; its cosine and sine are exact to float32,
    and the same bits on every device.
    """
    result: tuple[Tensor, Tensor] = implementation(__name__, positions).rotary_table(
        positions, frequencies, mrope_section
    )
    return result


def qk_norm_rope(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(query [R, Q, D], gate [R, Q, D], key [R, V, D]), in the dtypes of q_gate and k.

    q_gate [R, Q*2*D]: head after head, D columns of query, then D of its gate. k [R, V*D]. Rows of both may lie any
    stride apart, so that they may be cut from one fused projection. q_weight and k_weight [D]: zero-centred RMSNorm of
    each head. cos and sin [R, F] from `rotary_table`: the first 2F elements of a head turn, i together with i + F; the
    rest, and the gate, stay.
    """
    chosen = implementation(__name__, q_gate)
    result: tuple[Tensor, Tensor, Tensor] = chosen.qk_norm_rope(q_gate, k, q_weight, k_weight, cos, sin, eps)
    return result
