"""Inputs of a step's bookkeeping: padding rows, sequences without rows, tokens beyond the page table."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.common.case import Case, generator
from onebox.kernels.step.tensors import ANCHOR_WORDS, DraftLimits, FollowingRows, LastRows, StepTensors

__all__ = ["CASES"]

_PAGE_TOKENS = 64


def _embedding(device: torch.device, tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = generator(tokens + hidden)
    table = torch.randn(vocabulary, hidden, generator=draw).to(torch.bfloat16)
    token_ids = torch.randint(0, vocabulary, (tokens,), generator=draw)
    token_ids[:1] = vocabulary - 1
    return {"token_ids": token_ids.to(device), "embedding": table.to(device), "dtype": dtype}


def _embedding_case(
    tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype = torch.bfloat16, is_full: bool = False
) -> Case:
    make = partial(_embedding, tokens=tokens, vocabulary=vocabulary, hidden=hidden, dtype=dtype)
    return Case("embed", f"{tokens}x{hidden}-{dtype}", make, is_full)


def _mapping(device: torch.device, tokens: int, sequences: int, pages: int) -> dict[str, Any]:
    draw = generator(tokens + sequences)
    tensors = {
        "page_table": torch.randint(0, 2**24, (sequences, pages), generator=draw, dtype=torch.int32),
        "sequences": torch.randint(0, sequences + 1, (tokens,), generator=draw),
        "positions": torch.randint(0, (pages + 1) * _PAGE_TOKENS, (tokens,), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"page_tokens": _PAGE_TOKENS}


def _mapping_case(tokens: int, sequences: int, pages: int, is_full: bool = False) -> Case:
    make = partial(_mapping, tokens=tokens, sequences=sequences, pages=pages)
    return Case("slot_mapping", f"{tokens}-tokens-{sequences}x{pages}-pages", make, is_full)


def _verification(device: torch.device, counts: list[int], padding: int) -> dict[str, Any]:
    """Sequences of so many rows, then `padding` rows of none; most drafts are the sampled token."""
    rows = sum(counts) + padding
    draw = generator(rows + len(counts))
    sampled = torch.randint(0, 1000, (rows,), generator=draw)
    differs = torch.rand(rows, generator=draw) < 0.3
    checks = torch.randint(0, 3, (rows,), generator=draw) * (torch.rand(rows, generator=draw) < 0.3)
    sampled[torch.rand(rows, generator=draw) < 0.1] = -1
    tensors = {
        "verified": torch.zeros(2 * rows + len(counts), dtype=torch.int64),
        "sampled": sampled,
        "next_ids": torch.where(differs, -1, sampled),
        "checks": checks,
        "cu_rows": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _verification_case(counts: list[int], padding: int = 0, is_full: bool = False) -> Case:
    name = f"{len(counts)}-sequences-{sum(counts)}-rows-{padding}-padding"
    make = partial(_verification, counts=counts, padding=padding)
    return Case("verify_drafts", name, make, is_full, ("verified",))


def _next(device: torch.device, sequences: int, depth: int, pages: int, padding: int, missing: int) -> dict[str, Any]:
    """Each sequence with 1 + depth rows, then `padding` sequences without rows and rows of no sequence.

    Of the drafts, so many are `missing`.
    """
    draw = generator(sequences * 100 + depth)
    rows_each, total = 1 + depth, sequences + padding
    num_rows = sequences * rows_each
    last_start = pages * _PAGE_TOKENS - rows_each
    starts = torch.randint(0, last_start, (sequences,), generator=draw)
    starts[-1:] = last_start  # however many it accepts, its next rows pass the table's end
    counts = torch.tensor([rows_each] * sequences + [0] * padding)
    places = starts.repeat_interleave(rows_each) + torch.arange(rows_each).repeat(sequences)
    accepted = torch.randint(1, rows_each + 1, (total,), generator=draw)
    seen = torch.zeros(total, dtype=torch.int32)
    seen[:sequences] = starts + rows_each
    step = StepTensors(
        token_ids=torch.randint(0, 1000, (num_rows + padding,), generator=draw),
        positions=torch.cat([places + 5, torch.zeros(padding, dtype=torch.int64)]),
        slot_mapping=torch.full((num_rows + padding,), -1),
        num_accepted=torch.zeros(total, dtype=torch.int32),
        seen=seen,
    )
    tensors = {
        "cu_rows": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32),
        "page_table": torch.randint(1, 99, (total, pages), generator=draw, dtype=torch.int32),
        "token_ids": torch.randint(0, 1000, (num_rows + padding,), generator=draw),
        "num_accepted": torch.where(counts > 0, accepted, 0),
        "drafts": torch.randint(0, 1000, (total, depth - missing), generator=draw),
    }
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    return moved | {"step": StepTensors(*(tensor.to(device) for tensor in step)), "page_tokens": _PAGE_TOKENS}


def _next_case(
    sequences: int, depth: int, pages: int, padding: int = 0, missing: int = 0, is_full: bool = False
) -> Case:
    make = partial(_next, sequences=sequences, depth=depth, pages=pages, padding=padding, missing=missing)
    name = f"{sequences}x{1 + depth}-of-{pages}-pages{f'-and-{padding}-padding' if padding else ''}"
    name += f"-without-{missing}-drafts" if missing else ""
    return Case("next_inputs", name, make, is_full, ("step",))


def _following(device: torch.device, rows: int, sequences: int, pages: int) -> dict[str, Any]:
    draw = generator(rows + sequences)
    arguments = _mapping(device, rows, sequences, pages)
    places = arguments.pop("positions")
    seen = torch.randint(0, pages * _PAGE_TOKENS, (sequences,), generator=draw, dtype=torch.int32)
    return {
        **{"row_sequence" if name == "sequences" else name: value for name, value in arguments.items()},
        "places": places,
        "positions": places + 5,
        "seen": seen.to(device),
    }


def _following_case(rows: int, sequences: int, pages: int, is_full: bool = False) -> Case:
    make = partial(_following, rows=rows, sequences=sequences, pages=pages)
    return Case("following_rows", f"{rows}-rows-{sequences}x{pages}-pages", make, is_full)


def _chain(device: torch.device, counts: list[int], padding: int, depth: int, hidden: int) -> dict[str, Any]:
    """Sequences of so many rows, then `padding` rows of none; the last sequence ends beyond the page table."""
    draw, rows, pages = generator(sum(counts) + depth), sum(counts) + padding, 3
    edges = torch.tensor([0, *counts]).cumsum(0)
    places = torch.randint(0, pages * _PAGE_TOKENS - depth, (rows,), generator=draw)
    places[edges[-1] - 1 :] = pages * _PAGE_TOKENS - 2
    positions, seen = places + torch.arange(rows), torch.zeros(len(counts), dtype=torch.int32)
    limits = (
        torch.rand(rows, generator=draw, dtype=torch.float64),
        torch.arange(rows) * 40 % 130,
        torch.rand(rows, generator=draw, dtype=torch.float64),
        torch.rand(rows, generator=draw, dtype=torch.float64),
        torch.randint(-(2**62), 2**62, (rows,), generator=draw),
    )
    tensors = {
        "mixed": torch.randn(rows, hidden, generator=draw).to(torch.bfloat16),
        "cu_rows": edges.to(torch.int32),
        "num_accepted": torch.tensor([(count + 1) // 2 for count in counts]),
        "page_table": torch.randint(1, 99, (len(counts), pages), generator=draw, dtype=torch.int32),
    }
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    moved["following"] = FollowingRows(*(part.to(device) for part in (places, positions, places, seen)))
    moved["limits"] = DraftLimits(*(part.to(device) for part in limits))
    return moved | {"depth": depth, "page_tokens": _PAGE_TOKENS}


def _chain_case(counts: list[int], padding: int, depth: int, hidden: int, is_full: bool = False) -> Case:
    make = partial(_chain, counts=counts, padding=padding, depth=depth, hidden=hidden)
    return Case("chain_rows", f"{len(counts)}-sequences-{padding}-padding-{depth}-deep-{hidden}", make, is_full)


def _anchors(device: torch.device, counts: list[int], padding: int, order: list[int]) -> dict[str, Any]:
    """Sequences of so many rows, then `padding` rows of none."""
    draw, rows = generator(sum(counts)), sum(counts) + padding
    chain = _chain(torch.device("cpu"), counts, padding, 1, 1)
    token_ids, places = torch.randint(0, 1000, (2, rows), generator=draw)
    slots = torch.arange(len(counts), dtype=torch.int32).flip(0)
    last = LastRows(token_ids, places, places + 7, chain["cu_rows"], chain["num_accepted"], slots)
    return {
        "anchors": torch.zeros(len(order), ANCHOR_WORDS, dtype=torch.int64, device=device),
        "rows": LastRows(*(part.to(device) for part in last)),
        "limits": DraftLimits(*(part.to(device) for part in chain["limits"])),
        "order": torch.tensor(order, dtype=torch.int32, device=device),
    }


def _anchors_case(counts: list[int], padding: int, order: list[int], is_full: bool = False) -> Case:
    make = partial(_anchors, counts=counts, padding=padding, order=order)
    return Case("block_anchors", f"{len(order)}-of-{len(counts)}", make, is_full, ("anchors",))


def _block_rows(device: torch.device, blocks: int, depth: int) -> dict[str, Any]:
    draw = generator(blocks)
    anchors = torch.randint(0, 2**20, (blocks, ANCHOR_WORDS), generator=draw)
    anchors[:, (5, 7, 8)] = torch.rand(blocks, 3, generator=draw, dtype=torch.float64).view(torch.int64)
    return {"anchors": anchors.to(device), "depth": depth, "mask_token_id": 1234}


def _block_rows_case(blocks: int, depth: int, is_full: bool = False) -> Case:
    return Case("block_rows", f"{blocks}x{depth}", partial(_block_rows, blocks=blocks, depth=depth), is_full)


CASES = [
    _embedding_case(1, 9, 200),
    _embedding_case(5, 70, 1030, torch.float32),
    _embedding_case(0, 9, 64),
    _embedding_case(3, 8192, 3072, is_full=True),
    _embedding_case(2048, 8192, 3072, is_full=True),
    _mapping_case(1, 1, 1),
    _mapping_case(9, 3, 4),
    _mapping_case(70, 8, 2),
    _mapping_case(0, 1, 1),
    _mapping_case(64, 16, 4096, is_full=True),
    _verification_case([1]),
    _verification_case([5]),
    _verification_case([1, 1, 1], padding=2),
    _verification_case([3, 9, 1, 0, 4], padding=7),
    _verification_case([64]),
    _verification_case([3] * 16, padding=16, is_full=True),
    _next_case(1, 0, 1),
    _next_case(1, 2, 1),
    _next_case(3, 0, 4, padding=2),
    _next_case(4, 4, 2, padding=1),
    _next_case(2, 3, 2, padding=1, missing=1),
    _next_case(1, 4, 1, missing=4),
    _next_case(1, 2, 4096, is_full=True),
    _next_case(16, 3, 128, padding=3, is_full=True),
    _following_case(1, 1, 1),
    _following_case(9, 3, 4),
    _following_case(70, 8, 2),
    _following_case(2, 66, 2),
    _following_case(64, 16, 4096, is_full=True),
    _chain_case([1], 0, 1, 64),
    _chain_case([3, 0, 2, 0], 2, 3, 1030),
    _chain_case([3], 0, 2, 3072, is_full=True),
    _chain_case([5] * 12, 4, 4, 2048, is_full=True),
    _anchors_case([3, 0, 2, 4], 2, [3, 0]),
    _anchors_case([1], 0, [0, 0]),
    _anchors_case([13] * 8, 0, list(range(8)), is_full=True),
    _block_rows_case(1, 7),
    _block_rows_case(3, 1),
    _block_rows_case(8, 15, is_full=True),
]
