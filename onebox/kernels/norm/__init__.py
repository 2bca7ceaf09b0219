"""RMSNorm, zero-centred (the weight is an offset from one), alone and with the residual sum before it.

`rms_norm` norms rows, `add_rms_norm` adds what a layer gave to the float32 residual first, and `concat_rms_norm` puts
two norms side by side for the MTP head. `add_rms_norm_fused` adds the residual, the parts of the last linear and the
shared expert's share, and gives fixed-point rows without the norm's division, which each linear applies to its result
(`FixedRows.squares`). So no program has to wait until a whole row has been added up.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.norm import reference

__all__ = ["add_rms_norm", "add_rms_norm_fused", "concat_rms_norm", "rms_norm"]

add_rms_norm = Operation(reference.add_rms_norm, "kernel", cpu="cpu")
rms_norm = Operation(reference.rms_norm, "kernel", cpu="cpu")
concat_rms_norm = Operation(reference.concat_rms_norm, "kernel", cpu="cpu")
add_rms_norm_fused = Operation(reference.add_rms_norm_fused, "kernel")
