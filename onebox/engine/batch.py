"""The batches of decode steps, from the parts of a StepPlan; those of prefills are in `prompts.py`.

    decode_inputs    all rows of a decode step, as views of the packed buffer (`onebox.engine.inputs`)
    exact_inputs     the same without blank rows, for a step that runs without graphs
    following_batch  the same rows one token later, for the MTP head
    chained_batch    one row per sequence, its latest draft, for the MTP head's next draft

Nothing here asks the device for a value: all but `exact_inputs` run inside captured graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.engine.inputs import InputPacker, PageTable, StepSizes, exact_sizes, split_fields
from onebox.engine.step import DecodeRows
from onebox.kernels.step import slot_mapping
from onebox.model.batch import Batch
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "DrawInputs",
    "StepInputs",
    "chained_batch",
    "decode_inputs",
    "exact_inputs",
    "following_batch",
]

_DRAFT_TOP_K = 64
"""Drafts are sampled from so many tokens at most: a wider choice costs more than it gains."""


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

    @property
    def draft_top_k(self) -> Tensor:
        return torch.where(self.top_k > 0, self.top_k, _DRAFT_TOP_K).clamp(max=_DRAFT_TOP_K)


class StepInputs(NamedTuple):
    batch: Batch
    draw: DrawInputs
    num_sequences: Tensor | None
    """int32 [1]: sequences from this number on are blank; None where none is."""


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
    return StepInputs(batch, draw, fields["num_sequences"])


def exact_inputs(parts: Sequence[DecodeRows], depth: int, device: torch.device) -> StepInputs:
    """The inputs of a decode step over these parts that drafts to this depth, without blank rows or sequences.

    On a GPU the numbers of rows and sequences are given all the same, so that the kernels are those of other steps.
    """
    sizes = exact_sizes(parts, depth)
    table = PageTable(sizes.num_sequences, sizes.num_pages)
    table.put(parts)
    max_rows = max(len(part.token_ids) for part in parts)
    inputs = decode_inputs(InputPacker(sizes).pack(parts).to(device), sizes, table.rows.to(device), max_rows)
    if device.type == "cpu":
        return StepInputs(replace(inputs.batch, num_rows=None), inputs.draw, None)
    return inputs


def following_batch(inputs: StepInputs, token_ids: Tensor) -> Batch:
    """What the MTP head takes: for each row the token [R] after it, at that token's place.

    Rejected rows come last in their sequence: what they write is overwritten by the next step before it is read.
    """
    batch, draw, _ = inputs
    return replace(
        batch,
        token_ids=token_ids,
        positions=batch.positions + 1,
        seen=batch.seen + 1,
        slot_mapping=slot_mapping(batch.page_table, draw.row_sequence, draw.positions + 1, PAGE_TOKENS),
    )


def chained_batch(inputs: StepInputs, drafts: Tensor, positions: Tensor, offsets: Tensor) -> Batch:
    """One row per sequence: its latest draft [S], at these places [S]; offsets [S] turn places into positions."""
    batch = inputs.batch
    sequences = torch.arange(len(drafts), device=drafts.device)
    return replace(
        batch,
        token_ids=drafts,
        positions=(positions + offsets).expand(3, -1),
        cu_rows=torch.arange(len(drafts) + 1, dtype=torch.int32, device=drafts.device),
        seen=(positions + 1).to(torch.int32),
        slot_mapping=slot_mapping(batch.page_table, sequences, positions, PAGE_TOKENS),
        num_rows=inputs.num_sequences,
        max_rows=1,
    )
