"""Gated attention over a paged KV cache: norm and rotary embedding of heads, cache write, attention, output gate.

Pages are read in the format they are stored in. `rotary_table` runs once per step, the other operations in every
attention layer; `frequencies.rotary_frequencies` computes the constants of the rotary embedding.
"""

from onebox.kernels.attention import reference
from onebox.kernels.common.dispatch import Operation

__all__ = [
    "attention_gate",
    "attention_gate_fused",
    "kv_write",
    "kv_write_fused",
    "paged_attention",
    "paged_attention_fused",
    "paged_attention_prefill",
    "qk_norm_rope",
    "qk_norm_rope_fused",
    "rotary_table",
]

rotary_table = Operation(reference.rotary_table, "rope", cpu="cpu")
qk_norm_rope = Operation(reference.qk_norm_rope, "rope", cpu="cpu")
qk_norm_rope_fused = Operation(reference.qk_norm_rope_fused, "rope")
kv_write_fused = Operation(reference.kv_write_fused, "write")
kv_write = Operation(reference.kv_write, "write")
paged_attention = Operation(reference.paged_attention, "decode")
paged_attention_fused = Operation(reference.paged_attention_fused, "decode")
paged_attention_prefill = Operation(reference.paged_attention_prefill, "prefill")
attention_gate = Operation(reference.attention_gate, "gate", cpu="cpu")
attention_gate_fused = Operation(reference.attention_gate_fused, "gate")
