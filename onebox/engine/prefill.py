"""Prefill: pieces of several prompts in one pass over the model, their states kept where they are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.step import PromptChunk
from onebox.model.linear import Phase
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Batch, Qwen35, Shown, Stage
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["prefill"]


@dataclass(frozen=True)
class _Stretch:
    """Tokens of one piece up to the next state to be kept, or to its end, and the rows they take in the batch."""

    piece: int
    start: int
    end: int
    first_row: int
    checkpoint: int | None


def prefill(
    model: Qwen35, memory: Memory, pieces: Sequence[PromptChunk], first_checkpoint: int, *, with_mtp: bool
) -> list[Tensor]:
    """Computes the pieces and takes them into memory; the hidden states of each one's tokens, [n, H].

    Checkpoint c is the memory's row first_checkpoint + c. With the MTP head, its KV entries are written too.
    """
    stages = _stages(pieces)
    batch = _batch(model.device, pieces, stages, first_checkpoint)
    hidden = model.forward(batch, memory)
    if with_mtp and model.mtp and memory.mtp:
        shifted = torch.cat([memory.hidden, hidden])[_rows_before(pieces, stages, len(memory.hidden), model.device)]
        model.remember(model.mtp, batch, shifted, memory.mtp)
    results: list[list[Tensor]] = [[] for _ in pieces]
    for stretch in (stretch for stage in stages for stretch in stage):
        rows = hidden[stretch.first_row : stretch.first_row + stretch.end - stretch.start]
        results[stretch.piece].append(rows)
        memory.hidden[pieces[stretch.piece].slot] = rows[-1]
        if stretch.checkpoint is not None:
            memory.hidden[first_checkpoint + stretch.checkpoint] = rows[-1]
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in results]


def _stages(pieces: Sequence[PromptChunk]) -> list[list[_Stretch]]:
    """The pieces' stretches: the first ones of all, the second ones, and so on; rows are numbered in that order."""
    cuts = [[piece.start, *(save.num_tokens for save in piece.saves), piece.end] for piece in pieces]
    checkpoints = [[save.checkpoint for save in piece.saves] for piece in pieces]
    stages: list[list[_Stretch]] = []
    row = 0
    for level in range(max(len(cut) for cut in cuts) - 1):
        stage: list[_Stretch] = []
        for piece, cut in enumerate(cuts):
            # A state kept at the piece's very end leaves nothing for a last stretch.
            if level + 1 < len(cut) and cut[level] < cut[level + 1]:
                checkpoint = checkpoints[piece][level] if level < len(checkpoints[piece]) else None
                stage.append(_Stretch(piece, cut[level], cut[level + 1], row, checkpoint))
                row += cut[level + 1] - cut[level]
        if stage:
            stages.append(stage)
    return stages


def _batch(device: torch.device, pieces: Sequence[PromptChunk], stages: list[list[_Stretch]], first_checkpoint: int) -> Batch:
    stretches = [stretch for stage in stages for stretch in stage]
    slots = [pieces[stretch.piece].slot for stretch in stretches]
    positions = np.concatenate([_positions(pieces[stretch.piece], stretch) for stretch in stretches], axis=1)
    tokens = np.concatenate(
        [
            np.array(pieces[s.piece].token_ids[s.start - pieces[s.piece].start : s.end - pieces[s.piece].start])
            for s in stretches
        ]
    )
    kv_slots = np.concatenate([_kv_slots(pieces[s.piece].pages, s) for s in stretches])
    width = max(-(-stretch.end // PAGE_TOKENS) for stretch in stretches)
    table = np.zeros((len(stretches), width), dtype=np.int32)
    for place, stretch in enumerate(stretches):
        pages = pieces[stretch.piece].pages[:width]
        table[place, : len(pages)] = pages
    none = np.zeros(len(stretches), dtype=np.int32)

    def on_device(values: "NDArray[np.int64] | NDArray[np.int32] | list[int]", dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values).to(dtype).to(device)

    return Batch(
        phase=Phase.PREFILL,
        token_ids=on_device(tokens, torch.int64),
        positions=on_device(positions, torch.int64),
        cu_rows=on_device(_edges(stretches), torch.int32),
        slots=on_device(slots, torch.int32),
        keep=on_device(none, torch.int32),
        seen=on_device([stretch.end for stretch in stretches], torch.int32),
        page_table=on_device(table, torch.int32),
        kv_slots=on_device(kv_slots, torch.int64),
        stages=tuple(_stage(stage, pieces, first_checkpoint, device) for stage in stages),
        shown=_shown(pieces, stretches, device),
    )


def _stage(stage: list[_Stretch], pieces: Sequence[PromptChunk], first_checkpoint: int, device: torch.device) -> Stage:
    edges = _edges(stage)
    saved = [
        (pieces[stretch.piece].slot, first_checkpoint + stretch.checkpoint)
        for stretch in stage
        if stretch.checkpoint is not None
    ]
    return Stage(
        first_row=stage[0].first_row,
        end_row=stage[0].first_row + edges[-1],
        cu_rows=torch.tensor(edges, dtype=torch.int32, device=device),
        slots=torch.tensor([pieces[stretch.piece].slot for stretch in stage], dtype=torch.int32, device=device),
        copy_from=torch.tensor([slot for slot, _ in saved], dtype=torch.int64, device=device),
        copy_to=torch.tensor([row for _, row in saved], dtype=torch.int64, device=device),
    )


def _positions(piece: PromptChunk, stretch: _Stretch) -> NDArray[np.int64]:
    """[3, n]: time, height, width."""
    if piece.seen:
        return piece.seen.positions[:, stretch.start : stretch.end]
    return np.tile(np.arange(stretch.start, stretch.end), (3, 1))


def _shown(pieces: Sequence[PromptChunk], stretches: list[_Stretch], device: torch.device) -> Shown | None:
    """The rows of the batch that stand for parts of images, with their embeddings."""
    rows, embeddings = [], []
    for stretch in stretches:
        seen = pieces[stretch.piece].seen
        if seen:
            inside = (seen.places >= stretch.start) & (seen.places < stretch.end)
            rows.append(seen.places[inside] - stretch.start + stretch.first_row)
            embeddings.append(seen.embeddings[torch.from_numpy(inside).to(device)])
    if not rows:
        return None
    return Shown(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(embeddings))


def _edges(stretches: list[_Stretch]) -> list[int]:
    edges = [0]
    for stretch in stretches:
        edges.append(edges[-1] + stretch.end - stretch.start)
    return edges


def _kv_slots(pages: NDArray[np.int32], stretch: _Stretch) -> NDArray[np.int64]:
    positions = np.arange(stretch.start, stretch.end)
    return pages[positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS


def _rows_before(pieces: Sequence[PromptChunk], stages: list[list[_Stretch]], num_kept: int, device: torch.device) -> Tensor:
    """For each row the place of the hidden state before it, among the kept ones and then the batch's own: int64 [T]."""
    last_row = {place: piece.slot for place, piece in enumerate(pieces)}
    before: list[NDArray[np.int64]] = []
    for stretch in (stretch for stage in stages for stretch in stage):
        first = num_kept + stretch.first_row
        length = stretch.end - stretch.start
        before.append(np.concatenate([[last_row[stretch.piece]], np.arange(first, first + length - 1)]))
        last_row[stretch.piece] = first + length - 1
    return torch.from_numpy(np.concatenate(before).astype(np.int64)).to(device)
