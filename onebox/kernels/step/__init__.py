"""The bookkeeping of a decode step, on the device, so that steps can follow each other without the host.

`embed` reads the rows' embeddings, with which a pass begins. `slot_mapping` finds where a step's keys and values are
written. `verify_drafts` compares the drafted tokens with the sampled ones and counts the accepted rows of each
sequence. `next_inputs` turns a step's inputs and results into the inputs of the next step, `following_rows` and
`chain_rows` into those of the MTP head, `block_anchors` and `block_rows` into those of a block drafter. All numbers
are integers or copied: kernels and twins agree exactly.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.step import reference

__all__ = [
    "block_anchors",
    "block_rows",
    "chain_rows",
    "embed",
    "following_rows",
    "next_inputs",
    "slot_mapping",
    "verify_drafts",
]

slot_mapping = Operation(reference.slot_mapping, "kernel")
verify_drafts = Operation(reference.verify_drafts, "kernel")
next_inputs = Operation(reference.next_inputs, "kernel")
following_rows = Operation(reference.following_rows, "drafts", cpu="cpu")
chain_rows = Operation(reference.chain_rows, "drafts", cpu="cpu")
embed = Operation(reference.embed, "embedding")
block_anchors = Operation(reference.block_anchors, "blocks")
block_rows = Operation(reference.block_rows, "blocks")
