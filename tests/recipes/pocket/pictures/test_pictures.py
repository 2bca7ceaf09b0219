"""Rendered pictures show what their answers say, where their labels say it."""

import json
from random import Random

import numpy as np
import pytest

from recipes.pocket.evaluation.pictures import characters_right
from recipes.pocket.pictures.drawing import PATCH, SLOTS, Drawing
from recipes.pocket.pictures.fonts import CHARACTERS, FAMILIES
from recipes.pocket.pictures.lines import line_text
from recipes.pocket.pictures.workloads import PAGES, PICTURES, SMALL
from recipes.pocket.synthetic.example import score
from tests.recipes.pocket.toy_pictures import source


def drawn(name, seed=0):
    return PICTURES[name](Random(seed), source())


def read_labels(drawing: Drawing) -> str:
    """The characters of a one-line picture by its labels, from left to right."""
    height, width = drawing.grid
    labels = drawing.labels().reshape(height // 2, width // 2, 2, 2, SLOTS).transpose(0, 2, 1, 3, 4)
    rows = labels.reshape(height, width * SLOTS)
    return "".join(CHARACTERS[index] for row in rows for index in row if index)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_whole_tokens_and_a_right_answer(name):
    for seed in range(4):
        seen = drawn(name, seed)
        height, width = seen.drawing.pixels.shape
        assert height % 32 == width % 32 == 0
        assert seen.drawing.num_tokens <= 256
        assert score(seen.example, seen.example.answer)["exact"] == 1
        assert seen.example.messages[-1]["content"][0] == {"type": "image"}


def test_the_same_seed_draws_the_same_picture():
    first, second = drawn("invoice picture", 3), drawn("invoice picture", 3)
    assert np.array_equal(first.drawing.pixels, second.drawing.pixels)
    assert first.example == second.example
    assert drawn("invoice picture", 4).example != first.example


def test_labels_name_the_characters_of_a_line_in_their_order():
    right = 0
    for seed in range(8):
        seen = drawn("short line", seed)
        right += read_labels(seen.drawing) == seen.example.answer.replace(" ", "")
    assert right >= 6  # two narrow letters may share a slot, and a turned line two rows of patches


def test_patches_are_those_of_the_picture_in_squares_of_four():
    drawing = drawn("table").drawing
    patches = drawing.patches()
    assert np.array_equal(patches[1].reshape(PATCH, PATCH), drawing.pixels[:PATCH, PATCH : 2 * PATCH])
    assert np.array_equal(patches[2].reshape(PATCH, PATCH), drawing.pixels[PATCH : 2 * PATCH, :PATCH])


def test_an_invoice_shows_every_field_that_is_asked_for():
    for seed in range(5):
        seen, text = drawn("invoice picture", seed), drawn("invoice text", seed)
        fields = json.loads(seen.example.answer.rpartition("</think>\n\n")[2])
        for name in fields.keys() & {"vendor", "customer", "invoice_number", "tax_id", "email"}:
            assert fields[name] in text.example.answer


def test_lines_have_20_to_60_characters_that_can_be_drawn():
    lengths = {len(line_text(Random(seed))) for seed in range(200)}
    assert min(lengths) >= 18
    assert max(lengths) <= 60


def test_no_held_out_family_is_trained_on():
    held_out = {family.package for family in FAMILIES if family.held_out}
    assert held_out
    assert not held_out & {family.package for family in FAMILIES if not family.held_out}
    assert set(SMALL) | set(PAGES) == set(PICTURES)


def test_right_characters_are_counted_by_edits():
    assert characters_right("Invoice", "Invoice") == 1
    assert characters_right("Invioce", "Invoice") == pytest.approx(5 / 7)
    assert characters_right("nvoice", "Invoice") == pytest.approx(6 / 7)
    assert characters_right("", "Invoice") == 0
    assert characters_right("x" * 50, "Invoice") == 0
