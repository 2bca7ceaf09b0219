"""A step's inputs stand in the packed words as the step says, whatever stood there before."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.batch import decode_inputs
from onebox.engine.draft.kinds import Drafter
from onebox.engine.inputs import InputPacker, PageTable, StepSizes, exact_sizes, last_row
from onebox.engine.request import SamplingParams
from onebox.engine.step import DecodeRows, DraftCheck, Draw, PromptChunk
from onebox.spec.kv import PAGE_TOKENS

WAYS = (
    SamplingParams(seed=0),
    SamplingParams(seed=2**64 - 3, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125),
    SamplingParams(seed=-1, temperature=0, top_k=2**31 - 1),
)
TABLES = tuple(np.array(pages, dtype=np.int32) for pages in ([3], [5, 2], [9, 8, 7], [1, 2, 3, 4, 5]))
SIZES = StepSizes(num_rows=12, num_sequences=4, num_pages=4)
"""Room for three rows of each sequence, and fewer pages than a sequence may have."""


LAYOUTS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(WAYS)), min_size=1, max_size=4)
"""Of each sequence the number of its rows and how it is sampled."""


@st.composite
def parts_of_a_step(draw, layouts=LAYOUTS):
    """Up to four sequences of up to three rows, each with its own way, pages and place."""
    parts = []
    slots = draw(st.permutations(range(9)))
    for slot, (count, way) in zip(slots, draw(layouts), strict=False):
        pages = draw(st.sampled_from(TABLES))
        start = draw(st.integers(0, min(len(pages), SIZES.num_pages) * PAGE_TOKENS - count))
        ids = draw(st.lists(st.integers(0, 10**6), min_size=count + 1, max_size=count + 1))
        checks = tuple(draw(st.lists(st.sampled_from(DraftCheck), min_size=count, max_size=count)))
        next_ids = (*ids[1:-1], draw(st.sampled_from([-1, ids[-1]])))
        keep, offset = draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 40]))
        drawing = Draw(way, next_ids, checks, first_new=0)
        parts.append(DecodeRows(f"request {slot}", slot, tuple(ids[:count]), start, keep, pages, drawing, offset))
    return parts


def packed(parts):
    """What the model gets of a step over these parts."""
    table = PageTable(SIZES.num_sequences, SIZES.num_pages)
    table.put(parts)
    return decode_inputs(InputPacker(SIZES).pack(parts), SIZES, table.rows, max_rows=3)


@given(st.data())
def test_nothing_is_left_of_the_steps_before(data):
    """Two layouts take turns and last for a while, as they do when sequences go on."""
    layouts = st.sampled_from([data.draw(LAYOUTS), data.draw(LAYOUTS)])
    packing, table = InputPacker(SIZES), PageTable(SIZES.num_sequences, SIZES.num_pages)
    copied = table.rows.clone()
    for parts in data.draw(st.lists(parts_of_a_step(layouts), min_size=2, max_size=6)):
        assert packing.pack(parts).tolist() == InputPacker(SIZES).pack(parts).tolist()
        num_changed = table.put(parts)
        copied[:num_changed] = table.rows[:num_changed]
        alone = PageTable(SIZES.num_sequences, SIZES.num_pages)
        alone.put(parts)
        assert copied.tolist() == alone.rows.tolist()


@given(parts_of_a_step())
def test_what_is_unpacked_is_what_the_step_says(parts):
    batch, draw, *_ = packed(parts)
    rows = [(place, part, row) for place, part in enumerate(parts) for row in range(len(part.token_ids))]
    for at, (place, part, row) in enumerate(rows):
        position, way = part.start + row, part.draw.sampling
        page = int(part.pages[position // PAGE_TOKENS])
        assert batch.token_ids[at] == part.token_ids[row]
        assert batch.positions[:, at].tolist() == [position + part.position_offset] * 3
        assert batch.slot_mapping[at] == page * PAGE_TOKENS + position % PAGE_TOKENS
        assert (draw.row_sequence[at], draw.positions[at]) == (place, position)
        assert (draw.next_ids[at], draw.checks[at]) == (part.draw.next_ids[row], part.draw.checks[row])
        assert int(draw.seeds[at]) % 2**64 == way.seed % 2**64
        assert (draw.top_k[at], draw.temperature[at]) == (way.top_k, way.temperature)
        assert (draw.top_p[at], draw.min_p[at]) == (way.top_p, way.min_p)
    for place, part in enumerate(parts):
        assert (batch.slots[place], batch.num_accepted[place], batch.seen[place]) == (
            part.slot,
            part.num_accepted,
            part.end,
        )
        assert batch.cu_rows[place + 1] - batch.cu_rows[place] == len(part.token_ids)
        assert batch.page_table[place].tolist() == [*part.pages.tolist(), 0, 0, 0][: SIZES.num_pages]


@given(parts_of_a_step())
def test_blank_rows_are_of_no_sequence_and_write_nowhere(parts):
    batch, draw, num_sequences, _ = packed(parts)
    num_rows, num_parts = sum(len(part.token_ids) for part in parts), len(parts)
    assert (batch.num_rows.tolist(), num_sequences.tolist()) == ([num_rows], [num_parts])
    assert (batch.slot_mapping[num_rows:] == -1).all()
    assert (draw.row_sequence[num_rows:] == SIZES.num_sequences).all()
    assert (batch.cu_rows[num_parts:] == num_rows).all()
    assert (batch.num_accepted[num_parts:] == 0).all()
    assert (batch.page_table[num_parts:] == 0).all()


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 33))
def test_what_kernels_take_in_32_bits_is_theirs_without_a_copy_and_aligned(rows, sequences, pages):
    sizes = StepSizes(rows, sequences, pages)
    words = InputPacker(sizes).words
    batch, _, num_sequences, order = decode_inputs(words, sizes, PageTable(sequences, pages).rows, max_rows=3)
    parts = [batch.slots, batch.num_accepted, batch.seen, order, batch.cu_rows, batch.num_rows, num_sequences]
    for part in parts:
        assert part.dtype is torch.int32
        assert part.is_contiguous()
        assert (part.data_ptr() - words.data_ptr()) % 16 == 0
        assert part.untyped_storage().data_ptr() == words.untyped_storage().data_ptr()
    edges = [(part.data_ptr(), part.data_ptr() + 4 * part.numel()) for part in parts]
    assert all(end <= start for (_, end), (start, _) in pairwise(edges)), "fields overlap"
    assert edges[-1][1] <= words.data_ptr() + 8 * words.numel()


def test_sizes_are_those_of_the_step_and_reach_its_last_draft():
    draw = Draw(WAYS[0], (4, -1), (DraftCheck.COMPARE,) * 2, 0)
    parts = [DecodeRows("a", 0, (1, 4), 61, 1, TABLES[1], draw), DecodeRows("b", 1, (1, 4), 10, 1, TABLES[0], draw)]
    assert exact_sizes(parts, depth=0) == StepSizes(4, 2, 1)
    assert exact_sizes(parts, depth=1) == StepSizes(4, 2, 2)


def test_after_a_prompt_its_last_token_is_drawn_from():
    draw = Draw(WAYS[0], (-1,), (DraftCheck.COMPARE,), 0, depth=2)
    piece = PromptChunk("a", 3, (7, 8, 9), 64, TABLES[1], (), draw)
    assert last_row(piece) == DecodeRows("a", 3, (9,), 66, 0, TABLES[1], draw)


def test_blocks_are_drafted_for_those_who_asked_and_for_nobody_twice_with_other_numbers():
    plain = Draw(WAYS[0], (-1,), (DraftCheck.COMPARE,), 0)
    drafters = [Drafter.MTP, Drafter.DFLASH, Drafter.NONE, Drafter.DFLASH]
    parts = [
        DecodeRows(str(slot), slot, (1,), 5, 1, TABLES[0], plain._replace(drafter=drafter, depth=2))
        for slot, drafter in enumerate(drafters)
    ]
    assert packed(parts).block_order.tolist() == [1, 3, 1, 1]


def test_rows_that_are_computed_already_have_no_slots_to_write_to():
    draw = Draw(WAYS[0], (-1,), (DraftCheck.COMPARE,), 0)
    parts = [DecodeRows("a", 0, (1,), 5, 0, TABLES[0], draw)]
    packing = InputPacker(SIZES)
    for is_computed in (True, False, True):
        words = packing.pack(parts, is_computed=is_computed)
        batch = decode_inputs(words, SIZES, PageTable(4, 4).rows, max_rows=3).batch
        assert (int(batch.slot_mapping[0]) < 0) == is_computed
