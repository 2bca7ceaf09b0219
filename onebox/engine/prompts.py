"""The inputs of a prefill: chunks of several prompts, packed on the host into one buffer of 64-bit words.

One buffer means one copy to the device, and a captured graph finds its inputs where they were at capture. The layout
follows from `PromptSizes`. What lies beyond a step's own chunks is blank: rows of no sequence that write nowhere,
chunks without rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.engine.step import PromptChunk
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.batch import Batch, ImageRows
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["PromptInputs", "PromptPacker", "PromptSizes", "exact_prompt_inputs", "prompt_inputs"]

Words = NDArray[Any]
W = TypeVar("W", Words, Tensor)

_ALIGNED_WORDS = 2
"""Each field starts at a multiple of 16 bytes, as kernels want it."""


class PromptSizes(NamedTuple):
    """What determines the shapes of a prefill's tensors."""

    num_rows: int
    num_chunks: int
    num_kept: int
    """Hidden vectors that are kept: one per chunk and one per saved state."""

    @property
    def fields(self) -> dict[str, tuple[int, bool, int]]:
        """(length, whether 64 bits wide, value where blank) by name, in their order."""
        rows, chunks, kept = self
        return {
            "token_ids": (rows, True, 0),
            "positions": (3 * rows, True, 0),
            "slot_mapping": (rows, True, -1),
            "previous": (rows, True, 0),
            "kept_from": (kept, True, 0),
            "kept_to": (kept, True, 0),
            "saves": (rows, False, -1),
            "cu_rows": (chunks + 1, False, 0),
            "slots": (chunks, False, 0),
            "seen": (chunks, False, 0),
            "num_rows": (1, False, 0),
        }

    @property
    def num_words(self) -> int:
        return sum(_num_words(length, is_wide=is_wide) for length, is_wide, _ in self.fields.values())

    @classmethod
    def of(cls, chunks: Sequence[PromptChunk]) -> "PromptSizes":
        num_saves = sum(len(chunk.saves) for chunk in chunks)
        return cls(sum(len(chunk.token_ids) for chunk in chunks), len(chunks), len(chunks) + num_saves)


class PromptInputs(NamedTuple):
    """What a prefill reads, on the model's device. Hidden vectors have numbers: those in memory, then the rows'."""

    batch: Batch
    previous: Tensor
    """int64 [R]: the hidden vector before each row."""
    kept_from: Tensor
    """int64 [kept]: rows whose hidden vectors are kept."""
    kept_to: Tensor
    """int64 [kept]: where in memory. A place may occur twice, with the same row."""


class PromptPacker:
    """Packs the inputs of prefills of one shape into one buffer."""

    def __init__(self, sizes: PromptSizes, *, is_pinned: bool = False) -> None:
        """Blank at first: a prefill without chunks. Pinned memory lets the device copy asynchronously."""
        self.words = torch.zeros(sizes.num_words, dtype=torch.int64, pin_memory=is_pinned)
        self._sizes = sizes
        self._fields = split_fields(self.words.numpy(), sizes, np.int32)
        self._clear()

    def pack(self, chunks: Sequence[PromptChunk], first_checkpoint: int, num_hidden: int) -> Tensor:
        """The inputs of these chunks: int64 words, valid until the next call.

        Checkpoint c is the memory's row first_checkpoint + c; it holds num_hidden hidden vectors.
        """
        self._clear()
        fields, row = self._fields, 0
        positions = fields["positions"].reshape(3, -1)
        kept: list[tuple[int, int]] = []
        for place, chunk in enumerate(chunks):
            end = row + len(chunk.token_ids)
            rows = slice(row, end)
            fields["token_ids"][rows] = chunk.token_ids
            positions[:, rows] = _positions(chunk)
            fields["slot_mapping"][rows] = _slot_mapping(chunk)
            fields["previous"][rows] = np.arange(num_hidden + row - 1, num_hidden + end - 1)
            fields["previous"][row] = chunk.slot
            for save in chunk.saves:
                last = row + save.num_tokens - chunk.start - 1
                fields["saves"][last] = first_checkpoint + save.checkpoint
                kept.append((last, first_checkpoint + save.checkpoint))
            kept.append((end - 1, chunk.slot))
            fields["slots"][place], fields["seen"][place] = chunk.slot, chunk.end
            fields["cu_rows"][place + 1 :] = row = end
        fields["num_rows"][:] = row
        # Places that are left repeat the last one, which changes nothing.
        fields["kept_from"][:], fields["kept_to"][:] = kept[-1]
        fields["kept_from"][: len(kept)], fields["kept_to"][: len(kept)] = np.array(kept).T
        return self.words

    def _clear(self) -> None:
        for name, (_, _, blank) in self._sizes.fields.items():
            self._fields[name][:] = blank


def prompt_inputs(words: Tensor, sizes: PromptSizes, page_table: Tensor) -> PromptInputs:
    """The inputs on the device, as views of the packed buffer; page_table int32 [chunks, pages]."""
    fields = split_fields(words, sizes, torch.int32)
    batch = Batch(
        token_ids=fields["token_ids"],
        positions=fields["positions"].view(3, -1),
        cu_rows=fields["cu_rows"],
        slots=fields["slots"],
        num_accepted=fields["slots"],  # not read
        seen=fields["seen"],
        page_table=page_table,
        slot_mapping=fields["slot_mapping"],
        num_rows=fields["num_rows"],
        saves=fields["saves"],
    )
    return PromptInputs(batch, fields["previous"], fields["kept_from"], fields["kept_to"])


def exact_prompt_inputs(
    chunks: Sequence[PromptChunk], first_checkpoint: int, num_hidden: int, device: torch.device
) -> PromptInputs:
    """The inputs of these chunks without blank rows, with their pictures.

    On a GPU the number of rows is given all the same, so that the kernels are those of captured graphs.
    """
    sizes = PromptSizes.of(chunks)
    words = PromptPacker(sizes).pack(chunks, first_checkpoint, num_hidden).to(device)
    inputs = prompt_inputs(words, sizes, torch.from_numpy(_page_table(chunks)).to(device))
    num_rows = inputs.batch.num_rows if uses_kernels(device) else None
    return inputs._replace(batch=replace(inputs.batch, num_rows=num_rows, image_rows=_image_rows(chunks, device)))


def split_fields(words: W, sizes: PromptSizes, narrow: Any) -> dict[str, W]:
    """Views of the words by name, the 32-bit ones in the type `narrow`."""
    fields, start = dict[str, W](), 0
    for name, (length, is_wide, _) in sizes.fields.items():
        end = start + _num_words(length, is_wide=is_wide)
        fields[name] = words[start : start + length] if is_wide else words[start:end].view(narrow)[:length]
        start = end
    return fields


def _num_words(length: int, *, is_wide: bool) -> int:
    per_step = _ALIGNED_WORDS if is_wide else 2 * _ALIGNED_WORDS
    return -(-length // per_step) * _ALIGNED_WORDS


def _positions(chunk: PromptChunk) -> NDArray[np.int64]:
    """[3, n], or [n] for all three: time, height, width."""
    if chunk.images:
        return chunk.images.positions[:, chunk.start : chunk.end]
    return np.arange(chunk.start, chunk.end)


def _slot_mapping(chunk: PromptChunk) -> NDArray[np.int64]:
    positions = np.arange(chunk.start, chunk.end)
    return chunk.pages[positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS


def _page_table(chunks: Sequence[PromptChunk]) -> NDArray[np.int32]:
    table = np.zeros((len(chunks), max(-(-chunk.end // PAGE_TOKENS) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        pages = chunk.pages[: len(row)]
        row[: len(pages)] = pages
    return table


def _image_rows(chunks: Sequence[PromptChunk], device: torch.device) -> ImageRows | None:
    """The rows of the batch that are image pads, with their embeddings."""
    rows, embeddings, first_row = [], [], 0
    for chunk in chunks:
        images = chunk.images
        if images:
            inside = (images.places >= chunk.start) & (images.places < chunk.end)
            rows.append(images.places[inside] - chunk.start + first_row)
            embeddings.append(images.embeddings[torch.from_numpy(inside).to(device)])
        first_row += len(chunk.token_ids)
    if not rows:
        return None
    return ImageRows(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(embeddings))
