"""The target's rows are what the reference says, and its features the reference's taps."""

import numpy as np
import pytest
import torch

from onebox.model import reference
from onebox.model.reference_weights import load_weights
from onebox.pocket.ready import MODEL_DIRECTORY
from recipes.pocket.drafter.measure import Steps, labels_of, tokens_a_step
from recipes.pocket.drafter.target import AnsweredRows, Target, write_scripts

TAPS = (0, 4, 7)
END, MESSAGE_END = 8166, 8168


@pytest.fixture(scope="module")
def answered():
    """Two rows of 20 tokens: two prompts with answers of up to 4 tokens, and one with a longer answer."""
    torch.set_num_threads(1)
    target = Target(MODEL_DIRECTORY, TAPS, torch.device("cpu"))
    prompts = [
        np.arange(40, 46, dtype=np.uint16),
        np.arange(90, 93, dtype=np.uint16),
        np.arange(7, 14, dtype=np.uint16),
    ]
    scripts = write_scripts([[(prompts[0], 4), (prompts[1], 4)], [(prompts[2], 30)]], 20, END)
    return target, target.answer(scripts, MESSAGE_END)


def test_rows_follow_their_scripts_and_the_reference_speaks_in_between(answered):
    _, rows = answered
    spec, weights, _ = load_weights(MODEL_DIRECTORY)
    assert rows.tokens[0, :6].tolist() == list(range(40, 46))
    assert rows.is_answer[0].tolist() == [False] * 6 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 2
    assert rows.tokens[0, 10:14].tolist() == [END, 90, 91, 92]
    for row in range(2):
        taps = {}
        hidden = reference.forward(spec, weights, rows.tokens[row], reference.Cache.empty(spec), taps=taps)
        likely = reference.lm_head(spec, weights, hidden).argmax(-1)
        said = rows.is_answer[row]
        assert torch.equal(rows.predicted[row, 1:], likely[:-1])
        assert torch.equal(rows.tokens[row][said], rows.predicted[row][said])
        features = torch.cat([taps[tap] for tap in TAPS], dim=-1)
        torch.testing.assert_close(rows.features[row].float(), features, rtol=2e-2, atol=2e-2)


def test_reading_given_tokens_gives_the_same_rows(answered):
    target, rows = answered
    read = target.read(rows.tokens, rows.is_answer)
    assert torch.equal(read.predicted[:, 1:], rows.predicted[:, 1:])
    torch.testing.assert_close(read.features.float(), rows.features.float(), rtol=3e-2, atol=3e-2)


def test_labels_stop_behind_the_first_token_that_the_target_would_not_say():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    predicted = torch.tensor([[0, 2, 3, 9, 5, 6, 7]])
    said = torch.tensor([[False, True, True, True, True, True, False]])
    rows = AnsweredRows(tokens, said, predicted, torch.zeros(1, 7, 1))
    right, counts = labels_of(rows, torch.tensor([[1, 3]]), 4)
    assert right[0, 0, :2].tolist() == [3, 9]
    assert counts[0].tolist() == [[True, True, False, False], [True, True, False, False]]


def test_a_walk_counts_steps_as_an_engine_makes_them():
    """Answers at 3..9 and 20..21: a step makes the drafts that hold and one token more."""
    held = {3: 2, 4: 0, 5: 0, 6: 1, 7: 0, 8: 1, 9: 0, 20: 1, 21: 0}
    assert tokens_a_step(held) == Steps(num_steps=4, num_tokens=7)
