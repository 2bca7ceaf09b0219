"""Contexts that are written late: every committed row once and as it was, and none of another sequence.

A context that is wrong costs accepted drafts and changes no answer, so the gate would not notice it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.contexts import LateContext
from onebox.engine.decode import Decoder
from onebox.engine.request import SamplingParams
from onebox.engine.step import DecodeRows
from onebox.model.load import load_model
from onebox.spec.kv import PAGE_TOKENS
from tests.engine.gate import Gate, Variant
from tests.engine.gate_prompts import Case, text
from tests.engine.scripted import DeferredRun

CAPACITY, SLOTS, WIDTH = 20, 3, 4
NUM_PAGES = 12


class Context:
    """What was written, by slot and place: (token, position, cell, vector)."""

    def __init__(self, shift=0):
        self.rows = [{} for _ in range(SLOTS)]
        self.num_writes = 0
        self.late = LateContext(self._write, CAPACITY, shift)

    def add(self, *sequences):
        """Each sequence is (slot, first place, tokens)."""
        tokens = torch.tensor([token for _, _, tokens in sequences for token in tokens])
        self.late.add(decode_rows(*sequences), (tokens.unsqueeze(1) * torch.ones(WIDTH),), tokens)

    def _write(self, batch, parts):
        [vectors] = parts
        self.num_writes += 1
        [slot], [seen], count = batch.slots.tolist(), batch.seen.tolist(), len(vectors)
        assert batch.cu_rows.tolist() == [0, count]
        assert len(set(batch.positions[:, 0].tolist())) == 1
        for row, place in enumerate(range(seen - count, seen)):
            numbers = batch.token_ids[row], batch.positions[0, row], batch.slot_mapping[row]
            self.rows[slot][place] = (*map(int, numbers), vectors[row].tolist())


def decode_rows(*sequences):
    """Page p of slot s is number 100 s + p + 1."""
    return [
        DecodeRows("", slot, tuple(tokens), first, 0, np.arange(NUM_PAGES, dtype=np.int32) + 100 * slot + 1, None, 7)
        for slot, first, tokens in sequences
    ]


def row(token, place, slot, shift=0):
    """What is written of a token at a place."""
    page, cell = divmod(place + shift, PAGE_TOKENS)
    return token, place + shift + 7, (100 * slot + page + 1) * PAGE_TOKENS + cell, [float(token)] * WIDTH


def ends(*places):
    return torch.tensor(places, dtype=torch.int32)


def test_nothing_is_written_before_it_is_needed():
    context = Context()
    context.add((0, 5, [1, 2]), (2, 9, [3]))
    assert context.num_writes == 0
    context.late.write_up_to(ends(0), ends(7))
    assert context.rows == [{5: row(1, 5, 0), 6: row(2, 6, 0)}, {}, {}]


def test_rejected_rows_are_never_written():
    context = Context()
    context.add((1, 5, [1, 2, 3]))
    context.add((1, 6, [4, 5]))
    context.late.write_up_to(ends(1), ends(7))
    assert context.rows[1] == {5: row(1, 5, 1), 6: row(4, 6, 1)}
    # What was rejected last is gone, too.
    context.add((1, 7, [6]))
    context.late.write_up_to(ends(1), ends(8))
    assert context.rows[1][7] == row(6, 7, 1)


def test_rows_before_a_batch_are_written_and_its_own_are_not():
    context = Context()
    context.add((0, 5, [1, 2]), (1, 3, [8]))
    context.late.write_before(decode_rows((0, 6, [4])))
    assert context.rows == [{5: row(1, 5, 0)}, {}, {}]


def test_a_row_can_make_the_context_of_the_token_after_it():
    context = Context(shift=1)
    first = PAGE_TOKENS - 2
    context.add((2, first, [1, 2, 3]))
    context.late.write_before(decode_rows((2, first + 3, [4])))
    assert context.rows[2] == {first + 1 + i: row(1 + i, first + i, 2, shift=1) for i in range(3)}


def test_rows_of_a_sequence_that_ended_are_dropped():
    context = Context()
    context.add((0, 5, [1, 2]))
    context.late.drop(0)
    context.add((0, 0, [9]))
    context.late.write_up_to(ends(0), ends(1))
    assert context.rows[0] == {0: row(9, 0, 0)}


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16), st.booleans()), max_size=40), st.integers(0, 2))
def test_every_committed_row_is_written_in_its_last_version_within_the_memory(steps, slot):
    context, end, committed = Context(), 3, {}
    for number, (count, accepted, is_read) in enumerate(steps):
        tokens = [100 * number + i for i in range(count)]
        context.add((slot, end, tokens))
        for token in tokens[:accepted]:
            committed[end] = row(token, end, slot)
            end += 1
        if is_read:
            context.late.write_up_to(ends(slot), ends(end))
            assert context.rows[slot] == committed
    context.late.write_up_to(ends(slot), ends(end))
    assert context.rows[slot] == committed


@pytest.mark.parametrize("count", [1, 4])
def test_rows_are_written_together(count):
    context = Context()
    for step in range(12):
        context.add((0, count * step, [step] * count))
    assert context.num_writes == max(0, 12 * count // CAPACITY - (12 * count % CAPACITY == 0))


class LastStep:
    """Notes where the answer's committed rows end."""

    def __init__(self, runner):
        self.runner = runner
        self.vocab_size = runner.vocab_size

    def start(self, plan):
        return DeferredRun(lambda: self._run(plan))

    def _run(self, plan):
        output = self.runner.start(plan).finish()
        for part, result in zip(plan.rows, output.rows, strict=True):
            self.slot, self.pages, self.end = part.slot, part.pages, part.start + result.num_accepted
        return output

    def contexts(self):
        """(of the MTP head, of the block drafter): all that both know of the answer, bit for bit."""
        decoder, memory = self.runner._decoder, self.runner.memory
        for late in (decoder._late_mtp, decoder._late_block):
            if late:
                late.write_up_to(ends(self.slot), ends(self.end))
        places = torch.arange(self.end)
        pages, ring = torch.from_numpy(self.pages)[places // PAGE_TOKENS], places % memory.drafts.ring_tokens
        # The head's entry of a row is that of the token after it.
        mtp = torch.stack([memory.mtp.key_codes, memory.mtp.value_codes])[:, pages[1:], :, places[1:] % PAGE_TOKENS]
        full = memory.drafts.pages[pages, :, :, :, places % PAGE_TOKENS]
        window = slice(max(0, self.end - memory.drafts.window), None)
        return mtp, full, memory.drafts.rings[self.slot][..., ring[window], :]


@pytest.mark.parametrize("drafts", ["mixed7", "mixed15"])
def test_contexts_that_were_written_late_have_the_bits_of_those_written_at_once(checkpoint, drafts):
    gate = Gate(load_model(checkpoint, torch.device("cpu"), torch.float32))
    case = Case("one", "contexts", text(75, "x"), SamplingParams(seed=5, max_tokens=80, ignore_eos=True))

    def contexts(kept_rows):
        wrapped = []

        def wrap(runner):
            runner._decoder = Decoder(runner._model, replace(runner.memory, kept_rows=kept_rows))
            wrapped.append(LastStep(runner))
            return wrapped[-1]

        assert not gate.run(Variant("bf16", drafts=drafts), [case], wrap=wrap).differences
        assert wrapped[-1].end > 75 + 70
        return wrapped[-1].contexts()

    at_once = contexts(kept_rows=0)
    assert all(part.any() for part in at_once)
    for kept_rows in (20, 200):
        for part, expected in zip(contexts(kept_rows), at_once, strict=True):
            assert torch.equal(part, expected)
