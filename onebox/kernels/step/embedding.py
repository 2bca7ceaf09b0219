"""Rows of the embedding table in Triton, as one early launch: torch's own takes 6 us and cannot start early."""

import torch
import triton
import triton.language as tl

from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import ELEMENTWISE_BLOCK, elementwise_grid
from onebox.kernels.common.tuning import Tunable

__all__ = ["embed"]

_EMBED = Tunable("embed")


@triton.jit(do_not_specialize=["token_ids_ptr"])  # how it is aligned depends on the number of rows
def embed_kernel(
    token_ids_ptr,  # int64 [R], stride token_stride
    embedding_ptr,  # [V, H]
    rows_ptr,  # [R, H]
    token_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    wait(DEPENDENT)
    token = tl.load(token_ids_ptr + row * token_stride)
    values = tl.load(embedding_ptr + token * H + columns, mask=inside, other=0.0)
    tl.store(rows_ptr + row * H + columns, values.to(rows_ptr.dtype.element_ty), mask=inside)


def embed(token_ids, embedding, dtype):
    hidden = embedding.shape[1]
    rows = torch.empty(len(token_ids), hidden, dtype=dtype, device=embedding.device)
    if len(rows):
        embed_kernel[elementwise_grid(*rows.shape)](
            token_ids,
            embedding,
            rows,
            token_ids.stride(0),
            H=hidden,
            BLOCK=ELEMENTWISE_BLOCK,
            **launch_options(_EMBED, hidden),
        )
    return rows
