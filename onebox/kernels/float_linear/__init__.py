"""y = x W^T for weights stored as FP8, NVFP4 or BF16; activations are never quantised.

Each format has two operations. `..._linear` is for a decode or verify step (at most `shapes.DECODE_ROWS` rows) and is
bound by loading the weight; `..._matmul` is for prefill, any number of rows. Within one of them a row's bits depend on
the row alone; between the two they may differ in the last place, so the caller chooses one and no row count switches
silently. `float_parts` is the fused decode form: any of these weights, with K cut into parts; the next operation adds
the partial sums.

x [R, K] bfloat16 or float32, its last dimension contiguous. The result [R, N] has `out_dtype`, by default that of x.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.float_linear import reference
from onebox.kernels.float_linear.shapes import (
    check_decode_rows,
    check_fp8_block,
    check_fp8_row,
    check_fp8_row_block,
    check_nvfp4,
    check_plain,
)

__all__ = [
    "bf16_linear",
    "bf16_matmul",
    "float_parts",
    "fp8_block_linear",
    "fp8_block_matmul",
    "fp8_row_block_linear",
    "fp8_row_linear",
    "fp8_row_matmul",
    "nvfp4_linear",
    "nvfp4_matmul",
]

fp8_block_linear = Operation(reference.fp8_block_linear, "kernel", checks=(check_decode_rows, check_fp8_block))
fp8_block_matmul = Operation(reference.fp8_block_linear, "kernel", checks=(check_fp8_block,), name="fp8_block_matmul")
fp8_row_block_linear = Operation(
    reference.fp8_row_block_linear, "kernel", checks=(check_decode_rows, check_fp8_row_block)
)
fp8_row_linear = Operation(reference.fp8_row_linear, "kernel", checks=(check_decode_rows, check_fp8_row))
fp8_row_matmul = Operation(reference.fp8_row_linear, "kernel", checks=(check_fp8_row,), name="fp8_row_matmul")
nvfp4_linear = Operation(reference.nvfp4_linear, "kernel", checks=(check_decode_rows, check_nvfp4))
nvfp4_matmul = Operation(reference.nvfp4_linear, "kernel", checks=(check_nvfp4,), name="nvfp4_matmul")
bf16_linear = Operation(reference.bf16_linear, "kernel", checks=(check_decode_rows, check_plain))
bf16_matmul = Operation(reference.bf16_linear, "kernel", checks=(check_plain,), name="bf16_matmul")
float_parts = Operation(reference.float_parts, "parts")
