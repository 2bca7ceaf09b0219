"""y = x W^T for INT4 weights with a scale per group, INT8 weights with a scale per row and their upper six bits.

Weights are tiles of 16 rows and 128 columns (a group) in fragment order (`onebox.formats.fragments`), used in two ways:

- Decode, at most 128 rows: `fixed_point` makes activations 16-bit fixed point in two int8 planes, so that a group's
  dot product is an exact integer from the int8 tensor cores. `int4_linear`, `int6_linear` and `int8_linear` scale and
  add the groups in float32, in order: a row's bits do not depend on the number of rows. `int4_parts` and `int8_parts`
  cut K into parts and leave the addition of these partial sums to the next operation; they also apply a pending norm
  division.
- Prefill, any number of tokens: `int4_matmul` and `int8_matmul` multiply in bfloat16, where codes are exact; blocks and
  the order along K are constants, so a token's bits do not depend on the number of tokens.

N, the output columns, is the length of the weight scales: the last tile's rows beyond N are padding and are not
written. K is a multiple of 128.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.int_linear import reference

__all__ = [
    "fixed_point",
    "int4_linear",
    "int4_matmul",
    "int4_parts",
    "int6_linear",
    "int8_linear",
    "int8_matmul",
    "int8_parts",
]

fixed_point = Operation(reference.fixed_point, "decode")
int4_linear = Operation(reference.int4_linear, "decode")
int4_matmul = Operation(reference.int4_matmul, "prefill")
int4_parts = Operation(reference.int4_parts, "decode")
int6_linear = Operation(reference.int6_linear, "decode")
int8_linear = Operation(reference.int8_linear, "decode")
int8_matmul = Operation(reference.int8_matmul, "prefill")
int8_parts = Operation(reference.int8_parts, "decode")
