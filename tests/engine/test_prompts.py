"""A prefill's packed inputs are those of its chunks, in a buffer of any larger shape."""

import numpy as np
import pytest
import torch

from onebox.engine.prompts import PromptInputs, PromptPacker, PromptSizes, exact_prompt_inputs, prompt_inputs
from onebox.engine.step import PromptChunk, StateSave
from onebox.spec.kv import PAGE_TOKENS

FIRST_CHECKPOINT = 4
NUM_HIDDEN = 20


def chunk(slot: int, start: int, length: int, saves: tuple[StateSave, ...] = ()) -> PromptChunk:
    pages = np.arange(slot * 10 + 1, slot * 10 + 1 + -(-(start + length) // PAGE_TOKENS), dtype=np.int32)
    token_ids = tuple(range(100 * slot, 100 * slot + length))
    return PromptChunk(str(slot), slot, token_ids, start, pages, saves, draw=None)


def padded(sizes: PromptSizes, *steps: list[PromptChunk]) -> PromptInputs:
    """The inputs of the last step, packed after the others into the same buffer."""
    packer = PromptPacker(sizes)
    for chunks in steps:
        words = packer.pack(chunks, FIRST_CHECKPOINT, NUM_HIDDEN)
    return prompt_inputs(words, sizes, torch.zeros(sizes.num_chunks, 8, dtype=torch.int32))


CHUNKS = [
    chunk(2, 64, 70, (StateSave(128, 5),)),
    chunk(0, 0, 64, (StateSave(64, 3),)),
    chunk(1, 128, 1),
]


@pytest.mark.parametrize("extra", [PromptSizes(0, 0, 0), PromptSizes(1, 1, 1), PromptSizes(57, 5, 9)])
def test_rows_beyond_the_chunks_belong_to_no_sequence_and_write_nowhere(extra):
    exact = exact_prompt_inputs(CHUNKS, FIRST_CHECKPOINT, NUM_HIDDEN, torch.device("cpu"))
    sizes = PromptSizes(*(own + more for own, more in zip(PromptSizes.of(CHUNKS), extra, strict=True)))
    longer = [chunk(3, 0, sizes.num_rows, (StateSave(sizes.num_rows // 64 * 64, 7),))]
    inputs = padded(sizes, longer, CHUNKS)
    rows, count = len(exact.batch.token_ids), len(CHUNKS)
    for name in ("token_ids", "slot_mapping", "saves"):
        assert torch.equal(getattr(inputs.batch, name)[:rows], getattr(exact.batch, name)), name
    assert torch.equal(inputs.batch.positions[:, :rows], exact.batch.positions)
    assert torch.equal(inputs.previous[:rows], exact.previous)
    assert torch.equal(inputs.batch.slots[:count], exact.batch.slots)
    assert torch.equal(inputs.batch.seen[:count], exact.batch.seen)
    assert inputs.batch.cu_rows.tolist() == exact.batch.cu_rows.tolist() + [rows] * extra.num_chunks
    assert inputs.batch.num_rows is not None
    assert inputs.batch.num_rows.tolist() == [rows]
    assert (inputs.batch.slot_mapping[rows:] == -1).all()
    assert (inputs.batch.saves[rows:] == -1).all()
    assert (inputs.batch.seen[count:] == 0).all()


def test_hidden_vectors_are_kept_for_each_chunk_and_each_saved_state():
    inputs = padded(PromptSizes(200, 4, 12), CHUNKS)
    kept = set(zip(inputs.kept_from.tolist(), inputs.kept_to.tolist(), strict=True))
    assert kept == {(63, FIRST_CHECKPOINT + 5), (69, 2), (133, FIRST_CHECKPOINT + 3), (133, 0), (134, 1)}
    assert len(inputs.kept_from) == 12


def test_each_row_follows_the_row_before_it_or_the_vector_in_memory():
    previous = padded(PromptSizes(140, 3, 5), CHUNKS).previous.tolist()
    assert previous[:3] == [2, NUM_HIDDEN, NUM_HIDDEN + 1]
    assert previous[70:72] == [0, NUM_HIDDEN + 70]
    assert previous[134] == 1
