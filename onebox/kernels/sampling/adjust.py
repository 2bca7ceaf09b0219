"""What changes logits before they are sampled from, in Triton: penalties and a grammar's mask, both in place."""

import triton
import triton.language as tl

from onebox.kernels.common.launch import ceil_div

__all__ = ["apply_mask", "apply_penalties"]

_BLOCK = 1024


# Not specialised: neither the number of tokens nor of rows, which moves the last three, may compile it anew.
@triton.jit(do_not_specialize=["presence_ptr", "frequency_ptr", "repetition_ptr", "N"])
def apply_penalties_kernel(
    logits_ptr,  # float32 [R, V], written in place
    token_ids_ptr,  # [R, N]
    counts_ptr,  # [R, N]
    presence_ptr,  # [R]; so are the next two
    frequency_ptr,
    repetition_ptr,
    V: tl.constexpr,
    N,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids_ptr + row * N + places, mask=places < N, other=-1).to(tl.int64)
    count = tl.load(counts_ptr + row * N + places, mask=places < N, other=0).to(tl.float64)
    presence = tl.load(presence_ptr + row).to(tl.float64)
    frequency = tl.load(frequency_ptr + row).to(tl.float64)
    repetition = tl.load(repetition_ptr + row).to(tl.float64)
    # In float64, so that the single rounding at the end gives the twin's bits even if the device fuses operations.
    logit = tl.load(logits_ptr + row * V + ids, mask=ids >= 0, other=0.0).to(tl.float64)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit = logit - frequency * count - tl.where(count > 0, presence, 0.0)
    tl.store(logits_ptr + row * V + ids, logit.to(tl.float32), mask=ids >= 0)


@triton.jit
def apply_mask_kernel(
    logits_ptr,  # float32 [R, V], written in place
    bitmask_ptr,  # int32 [R, WORDS]
    V: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask_ptr + row * WORDS + ids // 32, mask=ids < V, other=0)
    is_cleared = ((words >> (ids % 32)) & 1) == 0
    refused = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * V + ids, refused, mask=(ids < V) & is_cleared)


def apply_penalties(logits, token_ids, counts, presence, frequency, repetition):
    rows, length = token_ids.shape
    if rows and length:
        apply_penalties_kernel[(rows, ceil_div(length, _BLOCK))](
            logits, token_ids, counts, presence, frequency, repetition, V=logits.shape[1], N=length, BLOCK=_BLOCK
        )


def apply_mask(logits, bitmask):
    rows, vocabulary = logits.shape
    if rows:
        apply_mask_kernel[(rows, ceil_div(vocabulary, _BLOCK))](
            logits, bitmask, V=vocabulary, WORDS=bitmask.shape[1], BLOCK=_BLOCK
        )
