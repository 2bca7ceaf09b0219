"""Contexts that are written late: every committed row once and as it was, and none of another sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.contexts import WrittenLate
from onebox.model.batch import Batch

CAPACITY, SLOTS, WIDTH = 20, 3, 4


class Context:
    """What was written, by slot and place: (token, position, cell, vector)."""

    def __init__(self):
        self.rows = [{} for _ in range(SLOTS)]
        self.num_writes = 0
        self.late = WrittenLate(self._write, torch.zeros(SLOTS, CAPACITY, WIDTH))

    def _write(self, batch, vectors):
        self.num_writes += 1
        [slot], [seen], count = batch.slots.tolist(), batch.seen.tolist(), len(vectors)
        assert batch.cu_rows.tolist() == [0, count]
        assert len(set(batch.positions[:, 0].tolist())) == 1
        for row, place in enumerate(range(seen - count, seen)):
            numbers = batch.token_ids[row], batch.positions[0, row], batch.slot_mapping[row]
            self.rows[slot][place] = (*map(int, numbers), vectors[row].tolist())


def batch_of(*sequences):
    """(its batch, its vectors): each sequence is (slot, first place, tokens)."""
    counts = [len(tokens) for _, _, tokens in sequences]
    places = [place for _, first, tokens in sequences for place in range(first, first + len(tokens))]
    token_ids = torch.tensor([token for _, _, tokens in sequences for token in tokens])
    numbers = {
        "cu_rows": [0, *torch.tensor(counts).cumsum(0).tolist()],
        "slots": [slot for slot, _, _ in sequences],
        "seen": [first + len(tokens) for _, first, tokens in sequences],
        "num_accepted": [0] * len(sequences),
    }
    rows = torch.tensor(places)
    batch = Batch(
        token_ids=token_ids,
        positions=(rows + 7).expand(3, -1),
        page_table=torch.zeros(len(sequences), 1, dtype=torch.int32),
        slot_mapping=rows + 64,
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in numbers.items()},
    )
    return batch, token_ids.unsqueeze(1) * torch.ones(WIDTH)


def row(token, place):
    return token, place + 7, place + 64, [float(token)] * WIDTH


def ends(*places):
    return torch.tensor(places, dtype=torch.int32)


def test_nothing_is_written_before_it_is_needed():
    context = Context()
    context.late.add(*batch_of((0, 5, [1, 2]), (2, 9, [3])))
    assert context.num_writes == 0
    context.late.write_up_to(ends(0), ends(7))
    assert context.rows == [{5: row(1, 5), 6: row(2, 6)}, {}, {}]


def test_rejected_rows_are_never_written():
    context = Context()
    context.late.add(*batch_of((1, 5, [1, 2, 3])))
    context.late.add(*batch_of((1, 6, [4, 5])))
    context.late.write_up_to(ends(1), ends(7))
    assert context.rows[1] == {5: row(1, 5), 6: row(4, 6)}
    # What was rejected last is gone, too.
    context.late.add(*batch_of((1, 7, [6])))
    context.late.write_up_to(ends(1), ends(8))
    assert context.rows[1][7] == row(6, 7)


def test_rows_before_a_batch_are_written_and_its_own_are_not():
    context = Context()
    context.late.add(*batch_of((0, 5, [1, 2]), (1, 3, [8])))
    context.late.write_before(batch_of((0, 6, [4]))[0])
    assert context.rows == [{5: row(1, 5)}, {}, {}]


def test_rows_of_a_sequence_that_ended_are_dropped():
    context = Context()
    context.late.add(*batch_of((0, 5, [1, 2])))
    context.late.drop(0)
    context.late.add(*batch_of((0, 0, [9])))
    context.late.write_up_to(ends(0), ends(1))
    assert context.rows[0] == {0: row(9, 0)}


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16), st.booleans()), max_size=40), st.integers(0, 2))
def test_every_committed_row_is_written_in_its_last_version_within_the_memory(steps, slot):
    context, end, committed = Context(), 3, {}
    for number, (count, accepted, is_read) in enumerate(steps):
        tokens = [100 * number + i for i in range(count)]
        context.late.add(*batch_of((slot, end, tokens)))
        for token in tokens[:accepted]:
            committed[end] = row(token, end)
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
        context.late.add(*batch_of((0, count * step, [step] * count)))
    assert context.num_writes == max(0, 12 * count // CAPACITY - (12 * count % CAPACITY == 0))
