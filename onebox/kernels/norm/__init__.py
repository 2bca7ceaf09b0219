"""RMSNorm, zero-centred (the weight is an offset from one): after a residual's sum, alone, two side by side, fused."""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.norm import reference

__all__ = ["add_norm", "add_rms_norm", "concat_rms_norm", "rms_norm"]

add_rms_norm = Operation(reference.add_rms_norm, "kernel", cpu="cpu")
rms_norm = Operation(reference.rms_norm, "kernel", cpu="cpu")
concat_rms_norm = Operation(reference.concat_rms_norm, "kernel", cpu="cpu")
add_norm = Operation(reference.add_norm, "fused")
