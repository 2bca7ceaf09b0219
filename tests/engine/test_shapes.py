"""The few shapes of decode steps: every step has one, and it is not much larger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.inputs import StepSizes
from onebox.engine.shapes import MAX_STEP_ROWS, StepShapes


def shapes_of(max_num_seqs=8, method="auto", drafts=4, max_model_len=262_144):
    speculation = SpeculationConfig(SpeculationMethod(method), drafts)
    return StepShapes.of(
        EngineConfig(max_model_len, num_pages=10_000, max_num_seqs=max_num_seqs, speculation=speculation)
    )


@given(st.data(), st.integers(1, 80), st.integers(0, 8), st.integers(1, 300_000))
def test_every_step_that_an_engine_can_have_fits_a_shape(data, max_num_seqs, drafts, max_model_len):
    shapes = shapes_of(max_num_seqs, "auto" if drafts else "none", drafts, max_model_len)
    num_sequences = data.draw(st.integers(1, min(max_num_seqs, MAX_STEP_ROWS)))
    num_rows = data.draw(st.integers(num_sequences, min(num_sequences * (1 + drafts), MAX_STEP_ROWS)))
    # The furthest row may lie at the context's end, with as many drafts behind it.
    num_pages = data.draw(st.integers(1, (max_model_len + drafts) // 64 + 1))
    found = shapes.fit(StepSizes(num_rows, num_sequences, num_pages))
    assert found is not None
    assert found >= (num_rows, num_sequences, num_pages)
    assert all(part >= least for part, least in zip(found, (num_rows, num_sequences, num_pages), strict=True))
    assert all(part <= most for part, most in zip(found, shapes.largest, strict=True))
    assert found.num_rows <= max(2 * num_rows, num_rows + 2)


@pytest.mark.parametrize("drafts", range(9))
def test_one_sequence_has_no_blank_rows(drafts):
    shapes = shapes_of(drafts=drafts, method="mtp" if drafts else "none")
    for num_rows in range(1, 2 + drafts):
        assert shapes.fit(StepSizes(num_rows, 1, 1))[:2] == (num_rows, 1)


def test_there_are_few_of_them():
    shapes = shapes_of()
    num_forward = sum(len(rows) for rows in shapes.rows.values()) * len(shapes.widths)
    assert num_forward <= 32
    assert num_forward // len(shapes.widths) * len(shapes.depths) <= 64


def test_a_short_context_has_one_width():
    assert shapes_of(max_model_len=4096).widths == (65,)


def test_drafts_are_made_to_a_captured_depth():
    assert [shapes_of().fit_depth(depth) for depth in range(6)] == [0, 1, 2, 4, 4, None]
    assert [shapes_of(method="mtp", drafts=2).fit_depth(depth) for depth in range(4)] == [2, 2, 2, None]
    assert [shapes_of(method="ngram", drafts=4).fit_depth(depth) for depth in range(2)] == [0, None]


def test_what_is_larger_has_none():
    assert shapes_of(max_num_seqs=4).fit(StepSizes(5, 5, 1)) is None
    assert shapes_of(max_model_len=640).fit(StepSizes(1, 1, 12)) is None
