"""A block drafter's attention: keys and values of the context in rings and pages, and a block of rows that reads them.

The drafter's sliding layers keep a ring of the last positions per slot, its full layers pages of the sequence's page
table. `write_context` writes the keys and values of committed tokens, `block_attention` reads them for a block of rows
whose own keys and values are kept nowhere.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.draft import reference

__all__ = ["block_attention", "block_attention_fused", "block_heads", "swiglu_fused", "write_context"]

write_context = Operation(reference.write_context, "heads")
block_heads = Operation(reference.block_heads, "heads")
block_attention = Operation(reference.block_attention, "attention")
block_attention_fused = Operation(reference.block_attention_fused, "attention")
swiglu_fused = Operation(reference.swiglu_fused, "swiglu")
