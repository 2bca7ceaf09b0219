"""The language-model head in Triton.

A logit and its token id are one 64-bit key: the logit's bits above, in an order that integers share with floats, the id
below, counted down. The largest key is the largest logit with the lowest id, and no two keys are equal, so that every
reduction gives the same answer in whatever order it runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS
from onebox.kernels.dependent import dependent, release
from onebox.kernels.int_linear.groups import sum_groups
from onebox.kernels.int_linear.kernel import decode_shape, linear
from onebox.spec.errors import MismatchError

__all__ = ["greedy_head", "logits_head", "top_k_head"]

MAX_K = 64
KEY_BLOCK = 4096
NO_KEY = tl.constexpr(-(2**63))  # below every key


@triton.jit
def to_keys(logits, ids):
    """int64 keys of float32 logits and their ids."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats grow with their magnitude: turned round
    return (ordered.to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def from_keys(keys):
    """The ids int64 and the logits float32 of keys."""
    ordered = (keys >> 32).to(tl.int32)
    logits = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return (keys & 0x7FFFFFFF) ^ 0x7FFFFFFF, logits


@triton.jit(do_not_specialize=["R", "num_tiles"])
def greedy_head_block_kernel(
    planes_ptr,  # int8 [R, 2, K]
    scale_ptr,  # float32 [R, K/128]
    weight_ptr,  # uint8 [K/128, tiles, 2048]
    weight_scale_ptr,  # [V]
    keys_ptr,  # int64 [R, blocks]
    R,
    V,
    num_tiles,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    USE_ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    block = tl.program_id(0)
    total = sum_groups(
        planes_ptr,
        scale_ptr,
        weight_ptr,
        weight_scale_ptr,
        None,
        R,
        V,
        num_tiles,
        block * TILES,
        0,
        0.0,
        K,
        8,
        K // 128,
        COLUMNS,
        TILES,
        UNROLL,
        USE_ASM,
        1,
        0,
        DEPENDENT,
    )
    ids = block * TILES * 16 + tl.arange(0, 16 * TILES)
    keys = tl.where((ids < V)[:, None], to_keys(total, ids[:, None]), NO_KEY)
    rows = tl.arange(0, COLUMNS // 2)
    tl.store(keys_ptr + rows * tl.num_programs(0) + block, tl.max(keys, 0), mask=rows < R)


@triton.jit
def top_k_head_logits_kernel(
    logits_ptr,  # float32 [R, V]
    keys_ptr,  # int64 [R, blocks, k]
    V,
    k,
    BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=0.0)
    keys = tl.where(ids < V, to_keys(logits, ids), NO_KEY)
    slots = tl.arange(0, K_BLOCK)
    at = keys_ptr + (row * tl.num_programs(0) + block) * k + slots
    tl.store(at, best_keys(keys, K_BLOCK), mask=slots < k)


@triton.jit
def top_k_head_merge_kernel(
    keys_ptr,  # int64 [R, width]
    best_ptr,  # int64 [R, blocks, k], if there are more blocks than one
    ids_ptr,  # int64 [R, k], if there is one
    logits_ptr,  # float32 [R, k], likewise
    width,
    k,
    BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * width + places, mask=places < width, other=NO_KEY)
    best = best_keys(keys, K_BLOCK)
    slots = tl.arange(0, K_BLOCK)
    if IS_LAST:
        ids, logits = from_keys(best)
        tl.store(ids_ptr + row * k + slots, ids, mask=slots < k)
        tl.store(logits_ptr + row * k + slots, logits, mask=slots < k)
    else:
        tl.store(best_ptr + (row * tl.num_programs(0) + block) * k + slots, best, mask=slots < k)


@triton.jit
def best_keys(keys, K_BLOCK: tl.constexpr):
    """int64 [K_BLOCK]: the largest keys, largest first; NO_KEY where there are fewer."""
    slots = tl.arange(0, K_BLOCK)
    best = tl.full((K_BLOCK,), NO_KEY, tl.int64)
    for slot in tl.range(0, K_BLOCK):
        largest = tl.max(keys, 0)
        best = tl.where(slots == slot, largest, best)
        keys = tl.where(keys == largest, NO_KEY, keys)
    return best


def logits_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.lm_head.logits_head`."""
    return linear(planes, scale, weight, weight_scale, torch.float32, bits=8, splits=1)


def greedy_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.lm_head.greedy_head`."""
    rows = len(planes)
    num_groups, num_tiles = weight.shape[:2]
    shape = decode_shape(rows, num_groups, "greedy_head")
    blocks = triton.cdiv(num_tiles, shape["TILES"])
    keys = torch.empty((rows, blocks), dtype=torch.int64, device=planes.device)
    greedy_head_block_kernel[(blocks,)](
        planes,
        scale,
        weight,
        weight_scale,
        keys,
        rows,
        len(weight_scale),
        num_tiles,
        K=num_groups * TILE_COLUMNS,
        **shape,
        **dependent(planes, "greedy_head"),
    )
    ids, logits = _merge(keys, 1)
    return ids[:, 0], logits[:, 0]


def top_k_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.lm_head.top_k_head`."""
    vocabulary = len(weight_scale)
    if not 1 <= k <= min(vocabulary, MAX_K):
        raise MismatchError(f"The head gives the best 1 to {min(vocabulary, MAX_K)} of its logits, not {k}.")
    logits = logits_head(planes, scale, weight, weight_scale)
    block = _block(vocabulary)
    blocks = triton.cdiv(vocabulary, block)
    keys = torch.empty((len(logits), blocks * k), dtype=torch.int64, device=logits.device)
    top_k_head_logits_kernel[(blocks, len(logits))](
        logits, keys, vocabulary, k, BLOCK=block, K_BLOCK=triton.next_power_of_2(k), num_warps=4
    )
    return _merge(keys, k)


def _merge(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids [R, k], logits [R, k]) of the k largest of keys [R, width], in as many passes as the width needs."""
    rows, width = keys.shape
    ids = torch.empty((rows, k), dtype=torch.int64, device=keys.device)
    logits = torch.empty((rows, k), dtype=torch.float32, device=keys.device)
    while True:
        block = _block(width)
        blocks = triton.cdiv(width, block)
        best = keys.new_empty((rows, blocks * k))
        top_k_head_merge_kernel[(blocks, rows)](
            keys,
            best,
            ids,
            logits,
            width,
            k,
            BLOCK=block,
            K_BLOCK=triton.next_power_of_2(k),
            IS_LAST=blocks == 1,
            num_warps=4,
        )
        if blocks == 1:
            return ids, logits
        keys, width = best, blocks * k


def _block(width: int) -> int:
    """Keys that one program looks through."""
    return min(KEY_BLOCK, int(triton.next_power_of_2(width)))
