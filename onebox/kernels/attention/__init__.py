"""Gated attention over a paged KV cache: heads normed and rotated, keys and values written, attention, output gate.

Pages are read in the format they are stored in. The rotation's table is made once a step, the rest runs in every
attention layer; `frequencies.rotary_frequencies` gives the rotation's constants.
"""

from onebox.kernels.attention import reference
from onebox.kernels.common.dispatch import Operation

__all__ = [
    "attention_gate",
    "attention_rows",
    "kv_write",
    "paged_attention",
    "paged_attention_prefill",
    "paged_attention_rows",
    "qk_norm_rope",
    "rotary_table",
    "split_heads",
    "write_heads",
]

rotary_table = Operation(reference.rotary_table, "rope", cpu="cpu")
qk_norm_rope = Operation(reference.qk_norm_rope, "rope", cpu="cpu")
split_heads = Operation(reference.split_heads, "heads")
write_heads = Operation(reference.write_heads, "heads")
kv_write = Operation(reference.kv_write, "write")
paged_attention = Operation(reference.paged_attention, "decode")
paged_attention_rows = Operation(reference.paged_attention_rows, "decode")
paged_attention_prefill = Operation(reference.paged_attention_prefill, "decode")
attention_gate = Operation(reference.attention_gate, "gate", cpu="cpu")
attention_rows = Operation(reference.attention_rows, "gate")
