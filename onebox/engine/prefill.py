"""Prefill: chunks of several prompts in one pass over the model, their states saved at the planned places."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.batch import PrefillSegment, prefill_batch, prefill_stages
from onebox.engine.step import PromptChunk
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35

__all__ = ["prefill"]


def prefill(
    model: Qwen35, memory: Memory, chunks: Sequence[PromptChunk], first_checkpoint: int, *, with_mtp: bool
) -> list[Tensor]:
    """Computes the chunks into memory; returns the hidden states of each one's tokens, [n, H].

    Checkpoint c is the memory's row first_checkpoint + c. With the MTP head, its KV entries are written too.
    """
    stages = prefill_stages(chunks)
    segments = [segment for stage in stages for segment in stage]
    batch = prefill_batch(chunks, stages, first_checkpoint, model.device)
    hidden = model.prefill(batch, memory)
    if with_mtp and model.mtp and memory.mtp:
        previous = _previous_rows(chunks, segments, len(memory.hidden), model.device)
        model.prefill_draft_kv(batch, torch.cat([memory.hidden, hidden])[previous], memory.mtp)
    results: list[list[Tensor]] = [[] for _ in chunks]
    for segment in segments:
        rows = hidden[segment.first_row : segment.end_row]
        results[segment.chunk].append(rows)
        memory.hidden[chunks[segment.chunk].slot] = rows[-1]
        if segment.checkpoint is not None:
            memory.hidden[first_checkpoint + segment.checkpoint] = rows[-1]
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in results]


def _previous_rows(
    chunks: Sequence[PromptChunk], segments: list[PrefillSegment], num_saved: int, device: torch.device
) -> Tensor:
    """int64 [T]: for each row the index of the hidden state before it, in the saved ones and then the batch's own."""
    last_row = {place: chunk.slot for place, chunk in enumerate(chunks)}
    previous: list[NDArray[np.int64]] = []
    for segment in segments:
        first, end = num_saved + segment.first_row, num_saved + segment.end_row
        previous.append(np.concatenate([[last_row[segment.chunk]], np.arange(first, end - 1)]))
        last_row[segment.chunk] = end - 1
    return torch.from_numpy(np.concatenate(previous).astype(np.int64)).to(device)
