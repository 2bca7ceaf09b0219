"""RMSNorm, zero-centred (the weight is an offset from one), alone and with the residual sum before it.

`rms_norm` norms rows, `add_rms_norm` first adds a layer's output to the float32 residual, and `concat_rms_norm`
concatenates two norms for the MTP head. `add_rms_norm_fused` adds the residual, the parts (partial sums) of the last
linear and the weighted shared expert, and returns fixed-point rows without the norm's division; each linear divides its
result instead (`FixedRows.squares`). So no program waits for the sum over a whole row.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.norm import reference

__all__ = ["add_rms_norm", "add_rms_norm_fused", "concat_rms_norm", "rms_norm"]

add_rms_norm = Operation(reference.add_rms_norm, "kernel", cpu="cpu")
rms_norm = Operation(reference.rms_norm, "kernel", cpu="cpu")
concat_rms_norm = Operation(reference.concat_rms_norm, "kernel", cpu="cpu")
add_rms_norm_fused = Operation(reference.add_rms_norm_fused, "kernel")
