"""Linears with integer weights in fragment order (`onebox.formats.fragments`): few rows exactly, many tokens in blocks.

Two ways through the same bytes:

- Decode (`fixed_point`, then `int4_linear` or `int8_linear`, at most 64 rows): activations are 16-bit fixed point in
  two int8 planes, so that a group's dot product is an exact integer from the int8 tensor cores. Floats enter once a
  group, in the order of the groups: a row's bits are the same however many rows are computed with it.
- Prefill (`int4_matmul`, `int8_matmul`, any number of tokens): codes are exact in bfloat16; blocks and the order along
  K are constants, so a token's bits do not depend on how many come with it.

N, the output columns, is the length of the weight scales: the last tile's rows beyond N are padding, and nothing of
them is written. K is a multiple of 128, the columns of a quantisation group and of a tile.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.int_linear import reference

__all__ = ["fixed_point", "int4_linear", "int4_matmul", "int4_parts", "int8_linear", "int8_matmul", "int8_parts"]

fixed_point = Operation(reference.fixed_point, "kernel")
int4_linear = Operation(reference.int4_linear, "kernel")
int4_matmul = Operation(reference.int4_matmul, "kernel")
int4_parts = Operation(reference.int4_parts, "kernel")
int8_linear = Operation(reference.int8_linear, "kernel")
int8_matmul = Operation(reference.int8_matmul, "kernel")
int8_parts = Operation(reference.int8_parts, "kernel")
