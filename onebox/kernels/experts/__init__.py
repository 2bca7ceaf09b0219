"""The routed experts (SwiGLU through each row's k experts, weighted and summed) and the shared expert's operations.

`routed_...` computes the few rows of a decode step, `prefill_...` any number of tokens sorted by expert; the suffix is
the weight format. `routed_experts_..._fused` is the decode form that leaves its sums to the next operation. The
`..._int4` operations take integers of 4, 3 or 2 bits, gate_up and down each its own, as tiles that tell their bits by
their size (`formats.expert_tiles`). Other weights stay as a checkpoint stores them, stacked over experts: the E
matrices gate_up [2I, H], gate rows before up rows, and down [H, I]. Activations are never quantised. Every format gives
the same sums as bfloat16 weights with the same numbers.

    FP8     gate_up float8_e4m3fn [E, 2I, H], down [E, H, I], and scales bfloat16 or float32, either one per 128x128
            block, gate and up separately: [E, 2 * ceil(I/128), ceil(H/128)] and [E, ceil(H/128), ceil(I/128)],
            or one per row: [E, 2I] and [E, H]
    NVFP4   gate_up uint8 [E, 2I, H/2] with scales float8_e4m3fn [E, 2I, H/16], down [E, H, I/2] with [E, H, I/16], and
            multipliers float32 [E, 3] of gate, up and down
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.experts import reference
from onebox.kernels.experts.shapes import (
    check_fp8,
    check_fused_fp8,
    check_fused_nvfp4,
    check_nvfp4,
    check_prefill,
    check_routed,
)

__all__ = [
    "add_shared",
    "prefill_experts_bf16",
    "prefill_experts_fp8",
    "prefill_experts_int4",
    "prefill_experts_nvfp4",
    "routed_experts_bf16",
    "routed_experts_bf16_fused",
    "routed_experts_fp8",
    "routed_experts_fp8_fused",
    "routed_experts_int4",
    "routed_experts_int4_fused",
    "routed_experts_nvfp4",
    "routed_experts_nvfp4_fused",
    "swiglu",
]

routed_experts_int4 = Operation(reference.routed_experts_int4, "decode_int4")
routed_experts_bf16 = Operation(reference.routed_experts_bf16, "decode_bf16")
routed_experts_fp8 = Operation(reference.routed_experts_fp8, "decode_fp8_nvfp4", checks=(check_routed, check_fp8))
routed_experts_nvfp4 = Operation(reference.routed_experts_nvfp4, "decode_fp8_nvfp4", checks=(check_routed, check_nvfp4))
routed_experts_int4_fused = Operation(reference.routed_experts_int4_fused, "decode_int4")
routed_experts_bf16_fused = Operation(reference.routed_experts_bf16_fused, "decode_float")
routed_experts_fp8_fused = Operation(reference.routed_experts_fp8_fused, "decode_float", checks=(check_fused_fp8,))
routed_experts_nvfp4_fused = Operation(
    reference.routed_experts_nvfp4_fused, "decode_float", checks=(check_fused_nvfp4,)
)
prefill_experts_int4 = Operation(reference.prefill_experts_int4, "prefill_int4")
prefill_experts_bf16 = Operation(reference.prefill_experts_bf16, "prefill_bf16")
prefill_experts_fp8 = Operation(reference.prefill_experts_fp8, "prefill_fp8_nvfp4", checks=(check_prefill, check_fp8))
prefill_experts_nvfp4 = Operation(
    reference.prefill_experts_nvfp4, "prefill_fp8_nvfp4", checks=(check_prefill, check_nvfp4)
)
swiglu = Operation(reference.swiglu, "shared_expert", cpu="cpu")
add_shared = Operation(reference.add_shared, "shared_expert", cpu="cpu")
