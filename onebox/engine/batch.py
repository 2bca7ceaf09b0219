"""The batches of decode steps, from the parts of a StepPlan; those of prefills are in `prompts.py`.

    decode_inputs    all rows of a decode step, as views of the packed buffer (`onebox.engine.inputs`)
    exact_inputs     the same without blank rows, for a step that runs without graphs; `ExactPacker` for many of them
    following_batch  the same rows one token later, for the MTP head
    chained_batch    one row per sequence, one of its drafts, for the MTP head's next draft

Nothing here asks the device for a value: all but `exact_inputs` run inside captured graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.engine.inputs import InputPacker, PageTable, StepSizes, exact_sizes, split_fields
from onebox.engine.step import DecodeRows
from onebox.kernels.common.dispatch import uses_kernels
from onebox.kernels.step import chain_rows, following_rows
from onebox.kernels.step.tensors import ChainRows, DraftLimits, FollowingRows, LastRows
from onebox.model.batch import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "DrawInputs",
    "ExactPacker",
    "StepInputs",
    "chained_batch",
    "decode_inputs",
    "exact_inputs",
    "following_batch",
    "following_rows_of",
    "last_rows",
    "limits_of",
    "start_chain",
]

_MOST_SHAPES = 256
"""Whose buffers are kept, of some KB each."""


class DrawInputs(NamedTuple):
    """How each row's token is sampled and verified: int64 or float64 [R]."""

    positions: Tensor
    """The row's place in its sequence's tokens."""
    next_ids: Tensor
    checks: Tensor
    row_sequence: Tensor
    """The row's sequence; S for a blank row."""
    seeds: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor


class StepInputs(NamedTuple):
    batch: Batch
    draw: DrawInputs
    num_sequences: Tensor | None
    """int32 [1]: sequences from this number on are blank; None where none is."""
    block_order: Tensor
    """int32 [S]: the sequences for which the block drafter drafts, then the first of them again."""


def decode_inputs(words: Tensor, sizes: StepSizes, page_table: Tensor, max_rows: int) -> StepInputs:
    """The inputs of a decode step on the model's device, as views of the packed buffer.

    page_table int32 [S, pages] has the step's pages, of which the first `sizes.num_pages` are used; a sequence has at
    most `max_rows` rows.
    """
    fields = split_fields(words, sizes, torch.int32)
    batch = Batch(
        token_ids=fields["token_ids"],
        positions=fields["rotary_positions"].expand(3, -1),
        cu_rows=fields["cu_rows"],
        slots=fields["slots"],
        num_accepted=fields["num_accepted"],
        seen=fields["seen"],
        page_table=page_table[: sizes.num_sequences, : sizes.num_pages],
        slot_mapping=fields["slot_mapping"],
        num_rows=fields["num_rows"],
        max_rows=max_rows,
    )
    draw = DrawInputs(
        fields["positions"],
        fields["next_ids"],
        fields["checks"],
        fields["row_sequence"],
        fields["seeds"],
        fields["top_k"],
        fields["temperature"].view(torch.float64),
        fields["top_p"].view(torch.float64),
        fields["min_p"].view(torch.float64),
    )
    return StepInputs(batch, draw, fields["num_sequences"], fields["block_order"])


def exact_inputs(
    parts: Sequence[DecodeRows], depth: int, device: torch.device, *, is_computed: bool = False
) -> StepInputs:
    """The inputs of a decode step over these parts that drafts to this depth, without blank rows or sequences.

    On a GPU the numbers of rows and sequences are given all the same, so that the kernels are those of other steps.
    """
    sizes = exact_sizes(parts, depth)
    table = PageTable(sizes.num_sequences, sizes.num_pages)
    table.put(parts)
    max_rows = max(len(part.token_ids) for part in parts)
    words = InputPacker(sizes).pack(parts, is_computed=is_computed).to(device)
    inputs = decode_inputs(words, sizes, table.rows.to(device), max_rows)
    return inputs if uses_kernels(device) else _without_blanks(inputs)


class ExactPacker:
    """`exact_inputs` of step after step. On a CPU, steps with as many rows and sequences share a buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: dict[tuple[int, int], tuple[InputPacker, StepInputs]] = {}
        self._table = PageTable(0, 0)
        """Never written again, so that it may be kept: other pages get another table."""

    def inputs(self, parts: Sequence[DecodeRows], depth: int, *, is_computed: bool = False) -> StepInputs:
        """Valid until the next call, but for the page table, which may be kept."""
        if uses_kernels(self._device):
            return exact_inputs(parts, depth, self._device, is_computed=is_computed)
        if not self._table.holds(parts):
            # All pages, whatever the step reaches: so the table is the same until a sequence gets another page.
            self._table = PageTable(len(parts), max(len(part.pages) for part in parts))
            self._table.put(parts)
        table, max_rows = self._table.rows, max(len(part.token_ids) for part in parts)
        num_rows = sum(len(part.token_ids) for part in parts)
        packer, inputs = self._shared.get((num_rows, len(parts))) or self._new_inputs(num_rows, len(parts))
        packer.pack(parts, is_computed=is_computed)
        if inputs.batch.page_table is not table or inputs.batch.max_rows != max_rows:
            inputs = inputs._replace(batch=replace(inputs.batch, page_table=table, max_rows=max_rows))
            self._shared[num_rows, len(parts)] = packer, inputs
        return inputs

    def _new_inputs(self, num_rows: int, num_sequences: int) -> tuple[InputPacker, StepInputs]:
        """A buffer for steps of this shape, and the inputs in it."""
        if len(self._shared) >= _MOST_SHAPES:
            self._shared.clear()
        table = self._table.rows
        sizes = StepSizes(num_rows, num_sequences, table.shape[1])
        packer = InputPacker(sizes)
        return packer, _without_blanks(decode_inputs(packer.words, sizes, table, max_rows=0))


def _without_blanks(inputs: StepInputs) -> StepInputs:
    return inputs._replace(batch=replace(inputs.batch, num_rows=None), num_sequences=None)


def following_rows_of(inputs: StepInputs) -> FollowingRows:
    """The rows one token later."""
    batch, draw = inputs.batch, inputs.draw
    return following_rows(
        batch.page_table, draw.row_sequence, draw.positions, batch.positions[0], batch.seen, PAGE_TOKENS
    )


def following_batch(inputs: StepInputs, following: FollowingRows, token_ids: Tensor) -> Batch:
    """What the MTP head takes: for each row the token [R] after it, at that token's place.

    Rejected rows come last in their sequence: what they write is overwritten by the next step before it is read.
    """
    return replace(
        inputs.batch,
        token_ids=token_ids,
        positions=following.positions.expand(3, -1),
        seen=following.seen,
        slot_mapping=following.slot_mapping,
    )


def start_chain(
    inputs: StepInputs, following: FollowingRows, mixed: Tensor, num_accepted: Tensor, depth: int
) -> ChainRows:
    """The rows of `depth` drafts after each sequence's last accepted row, from the head's output for all rows."""
    batch, limits = inputs.batch, limits_of(inputs.draw)
    return chain_rows(mixed, following, limits, batch.cu_rows, num_accepted, batch.page_table, depth, PAGE_TOKENS)


def limits_of(draw: DrawInputs) -> DraftLimits:
    """How each row's token is sampled."""
    return DraftLimits(draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds)


def last_rows(inputs: StepInputs, token_ids: Tensor, num_accepted: Tensor) -> LastRows:
    """What the next blocks begin with: the tokens after all rows [R], and how many rows were accepted [S]."""
    batch = inputs.batch
    positions = batch.positions[0]
    return LastRows(token_ids, inputs.draw.positions, positions, batch.cu_rows, num_accepted, batch.slots)


def chained_batch(inputs: StepInputs, chain: ChainRows, draft: int, token_ids: Tensor) -> Batch:
    """One row per sequence: the chain's draft of this number, whose tokens are token_ids [S]."""
    return replace(
        inputs.batch,
        token_ids=token_ids,
        positions=chain.positions[draft].expand(3, -1),
        cu_rows=chain.cu_rows,
        seen=chain.seen[draft],
        slot_mapping=chain.slot_mapping[draft],
        num_rows=inputs.num_sequences,
        max_rows=1,
    )
