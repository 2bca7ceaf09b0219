"""Every `Batch` that the model computes is built here, from the parts of a StepPlan.

    decode_inputs    all rows of a decode step, as views of the packed buffer (`onebox.engine.inputs`)
    exact_inputs     the same without blank rows, for a step that runs without graphs
    following_batch  the same rows one token later, for the MTP head
    chained_batch    one row per sequence, its latest draft, for the MTP head's next draft
    prefill_batch    chunks of several prompts, in segments and stages

Nothing here asks the device for a value: the first three run inside captured graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.inputs import InputPacker, PageTable, StepSizes, exact_sizes, split_fields
from onebox.engine.step import DecodeRows, PromptChunk
from onebox.kernels.step import slot_mapping
from onebox.model.batch import Batch, ImageRows, Stage
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "DrawInputs",
    "PrefillSegment",
    "StepInputs",
    "chained_batch",
    "decode_inputs",
    "exact_inputs",
    "following_batch",
    "prefill_batch",
    "prefill_stages",
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


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens of one chunk up to the next state to save, or to its end, and the rows they take in the batch."""

    chunk: int
    """Its place among the step's chunks."""
    start: int
    end: int
    first_row: int
    checkpoint: int | None
    """Where the state at its end is saved."""

    @property
    def end_row(self) -> int:
        return self.first_row + self.end - self.start


def prefill_stages(chunks: Sequence[PromptChunk]) -> list[list[PrefillSegment]]:
    """The chunks' segments: the first ones of all, the second ones, and so on; rows are numbered in that order."""
    cuts = [[chunk.start, *(save.num_tokens for save in chunk.saves), chunk.end] for chunk in chunks]
    checkpoints = [[save.checkpoint for save in chunk.saves] for chunk in chunks]
    stages: list[list[PrefillSegment]] = []
    row = 0
    for level in range(max(len(cut) for cut in cuts) - 1):
        stage: list[PrefillSegment] = []
        for chunk, cut in enumerate(cuts):
            # A state saved at the chunk's very end leaves nothing for a last segment.
            if level + 1 < len(cut) and cut[level] < cut[level + 1]:
                checkpoint = checkpoints[chunk][level] if level < len(checkpoints[chunk]) else None
                stage.append(PrefillSegment(chunk, cut[level], cut[level + 1], row, checkpoint))
                row += cut[level + 1] - cut[level]
        if stage:
            stages.append(stage)
    return stages


def prefill_batch(
    chunks: Sequence[PromptChunk], stages: list[list[PrefillSegment]], first_checkpoint: int, device: torch.device
) -> Batch:
    """The batch of these chunks; checkpoint c is the memory's row first_checkpoint + c."""
    segments = [segment for stage in stages for segment in stage]

    def on_device(values: "NDArray[np.int64] | NDArray[np.int32] | list[int]", dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values).to(dtype).to(device)

    def concatenated(parts: "list[NDArray[np.int64]]", axis: int = 0) -> Tensor:
        return on_device(np.concatenate(parts, axis=axis), torch.int64)

    return Batch(
        token_ids=concatenated([_token_ids(chunks[segment.chunk], segment) for segment in segments]),
        positions=concatenated([_positions(chunks[segment.chunk], segment) for segment in segments], axis=1),
        cu_rows=on_device(_edges(segments), torch.int32),
        slots=on_device([chunks[segment.chunk].slot for segment in segments], torch.int32),
        num_accepted=on_device(np.zeros(len(segments), dtype=np.int32), torch.int32),
        seen=on_device([segment.end for segment in segments], torch.int32),
        page_table=on_device(_page_table(chunks, segments), torch.int32),
        slot_mapping=concatenated([_slot_mapping(chunks[segment.chunk].pages, segment) for segment in segments]),
        stages=tuple(_stage(stage, chunks, first_checkpoint, device) for stage in stages),
        image_rows=_image_rows(chunks, segments, device),
    )


def _stage(
    segments: list[PrefillSegment], chunks: Sequence[PromptChunk], first_checkpoint: int, device: torch.device
) -> Stage:
    edges = _edges(segments)
    saved = [
        (chunks[segment.chunk].slot, first_checkpoint + segment.checkpoint)
        for segment in segments
        if segment.checkpoint is not None
    ]
    return Stage(
        first_row=segments[0].first_row,
        end_row=segments[0].first_row + edges[-1],
        cu_rows=torch.tensor(edges, dtype=torch.int32, device=device),
        slots=torch.tensor([chunks[segment.chunk].slot for segment in segments], dtype=torch.int32, device=device),
        copy_from=torch.tensor([slot for slot, _ in saved], dtype=torch.int64, device=device),
        copy_to=torch.tensor([row for _, row in saved], dtype=torch.int64, device=device),
    )


def _token_ids(chunk: PromptChunk, segment: PrefillSegment) -> NDArray[np.int64]:
    return np.array(chunk.token_ids[segment.start - chunk.start : segment.end - chunk.start])


def _positions(chunk: PromptChunk, segment: PrefillSegment) -> NDArray[np.int64]:
    """[3, n]: time, height, width."""
    if chunk.images:
        return chunk.images.positions[:, segment.start : segment.end]
    return np.tile(np.arange(segment.start, segment.end), (3, 1))


def _page_table(chunks: Sequence[PromptChunk], segments: list[PrefillSegment]) -> NDArray[np.int32]:
    width = max(-(-segment.end // PAGE_TOKENS) for segment in segments)
    table = np.zeros((len(segments), width), dtype=np.int32)
    for place, segment in enumerate(segments):
        pages = chunks[segment.chunk].pages[:width]
        table[place, : len(pages)] = pages
    return table


def _slot_mapping(pages: NDArray[np.int32], segment: PrefillSegment) -> NDArray[np.int64]:
    positions = np.arange(segment.start, segment.end)
    return pages[positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS


def _image_rows(
    chunks: Sequence[PromptChunk], segments: list[PrefillSegment], device: torch.device
) -> ImageRows | None:
    """The rows of the batch that are image pads, with their embeddings."""
    rows, embeddings = [], []
    for segment in segments:
        images = chunks[segment.chunk].images
        if images:
            inside = (images.places >= segment.start) & (images.places < segment.end)
            rows.append(images.places[inside] - segment.start + segment.first_row)
            embeddings.append(images.embeddings[torch.from_numpy(inside).to(device)])
    if not rows:
        return None
    return ImageRows(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(embeddings))


def _edges(segments: list[PrefillSegment]) -> list[int]:
    edges = [0]
    for segment in segments:
        edges.append(edges[-1] + segment.end - segment.start)
    return edges
