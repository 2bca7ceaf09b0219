"""A decode step's bookkeeping on the device: slot mapping, draft verification, and the next step's inputs."""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.step import reference

__all__ = ["next_inputs", "slot_mapping", "verify_drafts"]

slot_mapping = Operation(reference.slot_mapping, "kernel")
verify_drafts = Operation(reference.verify_drafts, "kernel")
next_inputs = Operation(reference.next_inputs, "kernel")
