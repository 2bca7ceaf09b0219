"""The slots of keys and values in Triton: one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["kv_slots"]

_BLOCK = 64


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_pages"])
def kv_slots_kernel(
    page_table_ptr,  # int32 [num_sequences, num_pages]
    sequences_ptr,  # int64 [num_tokens], and so the next two
    positions_ptr,
    slots_ptr,
    num_tokens,
    num_sequences,
    num_pages,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    sequence = tl.load(sequences_ptr + token, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    is_kept = (sequence < num_sequences) & (position < num_pages.to(tl.int64) * P)
    page = tl.load(page_table_ptr + sequence * num_pages + position // P, mask=inside & is_kept, other=0).to(tl.int64)
    tl.store(slots_ptr + token, tl.where(is_kept, page * P + position % P, -1), mask=inside)


def kv_slots(page_table: Tensor, sequences: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """See `onebox.kernels.kv_slots.kv_slots`."""
    slots = torch.empty_like(positions)
    if len(slots):
        kv_slots_kernel[(triton.cdiv(len(slots), _BLOCK),)](
            page_table,
            sequences,
            positions,
            slots,
            len(slots),
            *page_table.shape,
            P=page_tokens,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return slots
