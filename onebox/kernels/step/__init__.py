"""The bookkeeping of a decode step, on the device, so that steps can follow each other without the host.

`slot_mapping` finds where a step's keys and values are written. `verify_drafts` compares the drafted tokens with the
sampled ones and counts the accepted rows of each sequence. `next_inputs` turns a step's inputs and results into the
inputs of the next step. All numbers are integers: kernels and twins agree exactly.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.step import reference

__all__ = ["next_inputs", "slot_mapping", "verify_drafts"]

slot_mapping = Operation(reference.slot_mapping, "kernel")
verify_drafts = Operation(reference.verify_drafts, "kernel")
next_inputs = Operation(reference.next_inputs, "kernel")
