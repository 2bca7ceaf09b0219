"""The routed experts (SwiGLU through each row's k experts, weighted and summed) and the shared expert's operations.

`routed_...` takes a decode step's few rows, `prefill_...` any number of tokens grouped by expert; `expert_slots` is
the decode form for INT4 weights that leaves its sums to the next operation. INT4 weights are tiles
(`formats.expert_tiles`). Other weights stay as a checkpoint stores them, stacked over experts: the E matrices gate_up
[2I, H], the gate's rows before those of up, and down [H, I]. Activations are never quantised. All formats give the
sums that bfloat16 weights with the same numbers give.

    FP8     gate_up float8_e4m3fn [E, 2I, H], down [E, H, I], and scales bfloat16 or float32, either one for each
            128x128 block, gate and up apart: [E, 2 * ceil(I/128), ceil(H/128)] and [E, ceil(H/128), ceil(I/128)],
            or one for each row: [E, 2I] and [E, H]
    NVFP4   gate_up uint8 [E, 2I, H/2] with scales float8_e4m3fn [E, 2I, H/16], down [E, H, I/2] with [E, H, I/16], and
            multipliers float32 [E, 3] of gate, up and down
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.experts import reference
from onebox.kernels.experts.shapes import check_fp8, check_nvfp4, check_prefill, check_routed

__all__ = [
    "add_shared",
    "expert_slots",
    "prefill_experts",
    "prefill_experts_bf16",
    "prefill_experts_fp8",
    "prefill_experts_nvfp4",
    "routed_experts",
    "routed_experts_bf16",
    "routed_experts_fp8",
    "routed_experts_nvfp4",
    "swiglu",
]

routed_experts = Operation(reference.routed_experts, "kernel")
routed_experts_bf16 = Operation(reference.routed_experts_bf16, "plain")
routed_experts_fp8 = Operation(reference.routed_experts_fp8, "float_kernel", checks=(check_routed, check_fp8))
routed_experts_nvfp4 = Operation(reference.routed_experts_nvfp4, "float_kernel", checks=(check_routed, check_nvfp4))
expert_slots = Operation(reference.expert_slots, "kernel")
prefill_experts = Operation(reference.prefill_experts, "prefill")
prefill_experts_bf16 = Operation(reference.prefill_experts_bf16, "prefill")
prefill_experts_fp8 = Operation(reference.prefill_experts_fp8, "float_kernel", checks=(check_prefill, check_fp8))
prefill_experts_nvfp4 = Operation(reference.prefill_experts_nvfp4, "float_kernel", checks=(check_prefill, check_nvfp4))
swiglu = Operation(reference.swiglu, "shared", cpu="cpu")
add_shared = Operation(reference.add_shared, "shared", cpu="cpu")
