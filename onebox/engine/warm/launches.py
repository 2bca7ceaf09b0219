"""Every kernel launch that an engine can make, on tensors without memory (`meta`).

Kernels are compiled for combinations of formats, sizes and row classes, not for each number of rows or tokens: the
decode shapes, prefills of doubling lengths and the sampling behind a prefill meet all of them.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onebox.engine.batch import StepInputs, decode_inputs, exact_inputs
from onebox.engine.config import EngineConfig
from onebox.engine.decode import Decoder, OutcomeLayout, OutcomeTensors
from onebox.engine.graphs import predict_inputs
from onebox.engine.inputs import InputPacker, StepSizes
from onebox.engine.logits import Adjustment, Bias, Penalties, apply_adjustments
from onebox.engine.prefill import Prefiller
from onebox.engine.request import SamplingParams
from onebox.engine.shapes import MAX_STEP_ROWS, StepShapes
from onebox.engine.step import DecodeRows, DraftCheck, Draw, PromptChunk, StateSave
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["launch_all"]

META = torch.device("meta")


def launch_all(model: Qwen35, memory: Memory, config: EngineConfig) -> None:
    """Makes the launches; those whose kernels take longest to compile come first."""
    with torch.inference_mode():
        shapes, decoder = StepShapes.of(config), Decoder(model, memory)
        _launch_prefill(model, memory, config)
        for count in _row_counts(min(config.max_num_seqs, MAX_STEP_ROWS)):
            _launch_first_tokens(decoder, shapes, count, model.spec.hidden_size)
        for sizes in _decode_sizes(shapes):
            _launch_decode(decoder, shapes, sizes)
        _launch_blocks(decoder, shapes)
        for count in _row_counts(MAX_STEP_ROWS):
            model.logits(torch.empty(count, model.spec.hidden_size, dtype=model.dtype, device=META))


def _decode_sizes(shapes: StepShapes) -> Iterator[StepSizes]:
    """Each number of rows and each number of sequences once, the largest first: no kernel depends on both."""
    most_sequences = {rows: count for count, choices in shapes.rows.items() for rows in choices}
    pairs = {*most_sequences.items(), *((choices[0], count) for count, choices in shapes.rows.items())}
    for num_rows, num_sequences in sorted(pairs, reverse=True):
        yield StepSizes(num_rows, num_sequences, shapes.num_pages)


def _depths(shapes: StepShapes) -> set[int]:
    """The first and the last, and one with a second draft: further drafts are the same launches again."""
    return {shapes.depths[0], min(2, shapes.depths[-1])}


def _launch_decode(decoder: Decoder, shapes: StepShapes, sizes: StepSizes) -> None:
    words = InputPacker(sizes).words.to(META)
    table = torch.empty(sizes.num_sequences, sizes.num_pages, dtype=torch.int32, device=META)
    inputs = decode_inputs(words, sizes, table, shapes.rows_per_sequence)
    forwarded = decoder.forward(inputs.batch)
    _launch_adjustments(forwarded.logits, sizes.num_rows)
    outcome = _outcome(inputs, shapes.width)
    for depth in _depths(shapes):
        decoder.sample(forwarded, inputs, depth, outcome)
        decoder.anchor_blocks(inputs, outcome)
    predict_inputs(inputs.batch, outcome)


def _launch_adjustments(logits: Tensor, num_rows: int) -> None:
    """Penalties of a few tokens and of many, a bias, a ban and a grammar's mask."""
    vocab_size = logits.shape[1]
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    for count in (1, 16, 17):
        ids = np.arange(count, dtype=np.int64) % vocab_size
        penalties = Penalties(ids, ids, 0.5, 0.5, 1.5)
        adjustment = Adjustment(penalties, Bias(ids, ids.astype(np.float32)), ids, mask)
        draw = Draw(SamplingParams(), (-1,), (DraftCheck.COMPARE,), first_new=0, adjustments=(adjustment,) * num_rows)
        part = DecodeRows("warm", 0, (0,) * num_rows, 0, 0, np.zeros(1, dtype=np.int32), draw)
        apply_adjustments(logits, [part])


def _outcome(inputs: StepInputs, width: int) -> OutcomeTensors:
    layout = OutcomeLayout(len(inputs.batch.token_ids), len(inputs.batch.slots), width)
    return layout.split(torch.empty(layout.size, dtype=torch.int64, device=META))


def _launch_blocks(decoder: Decoder, shapes: StepShapes) -> None:
    """The block drafter's passes, which are by numbers of sequences, depths and widths of the page table."""
    most = shapes.largest.num_sequences
    drafts = torch.empty(most, shapes.width, dtype=torch.int64, device=META)
    for num_pages in shapes.widths:
        table = torch.empty(most, shapes.num_pages, dtype=torch.int32, device=META)[:, :num_pages]
        for count in shapes.rows:
            for depth in shapes.block_depths:
                decoder.draft_blocks(count, depth, table, drafts)


def _launch_prefill(model: Qwen35, memory: Memory, config: EngineConfig) -> None:
    """Doubling lengths up to the longest of a step: kernels differ by how many tokens they are for."""
    saves = (StateSave(PAGE_TOKENS, 0),) if config.num_checkpoints else ()
    prefiller = Prefiller(model, memory, config.max_num_seqs, config.speculation.with_mtp)
    most = max(config.max_num_batched_tokens, PAGE_TOKENS + 1)
    doublings = (PAGE_TOKENS * 2**power + 1 for power in range(most.bit_length()))
    for num_tokens in (*(length for length in doublings if length < most), most):
        pages = np.arange(1, 2 + num_tokens // PAGE_TOKENS, dtype=np.int32)
        prefiller.run([PromptChunk("warm", 0, (0,) * num_tokens, 0, pages, saves, None)])


def _launch_first_tokens(decoder: Decoder, shapes: StepShapes, count: int, hidden_size: int) -> None:
    """What follows the prefill of so many prompts: their first tokens are sampled, and drafts made."""
    draw = Draw(SamplingParams(), (-1,), (DraftCheck.COMPARE,), first_new=0)
    pages = np.arange(1, 3, dtype=np.int32)
    parts = [DecodeRows(str(slot), slot, (0,), PAGE_TOKENS, 0, pages, draw) for slot in range(count)]
    forwarded = decoder.logits_for(torch.empty(count, hidden_size, dtype=decoder.dtype, device=META))
    for depth in _depths(shapes):
        inputs = exact_inputs(parts, depth, META, is_computed=True)
        outcome = _outcome(inputs, shapes.width)
        decoder.sample(forwarded, inputs, depth, outcome)
        decoder.anchor_blocks(inputs, outcome)


def _row_counts(most: int) -> list[int]:
    """A number of rows in each class of the kernels, and both parities: the fields of odd numbers are less aligned."""
    return [count for count in (1, 2, 3, 4, 5, 6, 9, 10, 17, 18, 33, 34, 65, 66, 97, 98, 128) if count <= most]
