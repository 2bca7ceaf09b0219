"""The words of a step's outcome: what the device writes into a field is what the host reads from it."""

import pytest
import torch

from onebox.engine.decode import OutcomeLayout


@pytest.mark.parametrize(("num_rows", "num_sequences", "depth"), [(1, 1, 0), (6, 2, 2), (5, 4, 0), (16, 3, 4)])
def test_each_field_is_read_where_it_is_written_and_none_overlap(num_rows, num_sequences, depth):
    layout = OutcomeLayout(num_rows, num_sequences, depth)
    words = torch.full((layout.size,), -1, dtype=torch.int64)
    tensors = layout.split(words)
    fields = (tensors.token_ids, tensors.num_accepted, tensors.is_finite, tensors.drafts)
    expected, first = [], 0
    for field in fields:
        values = torch.arange(first, first + field.numel()).view(field.shape)
        field.copy_(values)
        expected.append(values.tolist())
        first += field.numel()
    assert first == layout.size
    outcome = layout.read(words.tolist())
    assert [outcome.token_ids, outcome.num_accepted, outcome.is_finite, outcome.drafts] == expected
    assert len(tensors.verified) == 2 * num_rows + num_sequences
