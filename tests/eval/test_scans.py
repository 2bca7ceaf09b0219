"""Noisy scans: the same from the same seed, worse at each level, and still holding what is asked for."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageFont

from onebox.eval.circulars import make_circular
from onebox.eval.invoices import LANGUAGES, make_invoice
from onebox.eval.judge import judge
from onebox.eval.ocr import drawn_page, font_file
from onebox.eval.question import GivenAnswer
from onebox.eval.scans import LEVELS, make_scan, ring_text, scan_questions, upper

MAKERS = {"invoice": make_invoice, "circular": make_circular}


def grey(picture):
    return np.asarray(picture.convert("L"), dtype=float)


def straightened(scan):
    """The scan turned back and cut to the clean page, in grey."""
    noisy = Image.open(io.BytesIO(scan.noisy)).convert("L").rotate(-scan.angle, Image.Resampling.BICUBIC)
    left, top = ((one - other) // 2 for one, other in zip(noisy.size, scan.clean.size, strict=True))
    return grey(noisy.crop((left, top, left + scan.clean.width, top + scan.clean.height)))


def flat(pixels):
    """Without its shadows: each pixel against its surroundings."""
    around = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).filter(ImageFilter.BoxBlur(12))
    return pixels - np.asarray(around, dtype=float)


def likeness(one, two):
    """Correlation of two pictures, best over a shift of two pixels: the turn back is exact to about one."""
    one, two = flat(one), flat(two)
    shifts = [(x, y) for x in range(-2, 3) for y in range(-2, 3)]
    return max(np.corrcoef(np.roll(one, shift, (0, 1)).ravel(), two.ravel())[0, 1] for shift in shifts)


@pytest.mark.parametrize(
    ("kind", "language"), [("invoice", "en"), ("circular", "hu"), ("invoice", "tr"), ("circular", "tr")]
)
def test_each_level_is_noisier_and_the_last_still_shows_every_line_and_the_stamp(kind, language):
    scans = {level: make_scan(MAKERS[kind](9, language), level, 9) for level in LEVELS}
    clean = grey(scans["light"].clean)
    distances = []
    for scan in scans.values():
        assert np.array_equal(grey(scan.clean), clean)
        assert scan.truth == scans["light"].truth
        distances.append(np.abs(straightened(scan) - clean).mean())
    assert distances == sorted(distances)
    assert distances[-1] > 2 * distances[0]
    heavy = straightened(scans["heavy"])
    for row, line in enumerate(scans["heavy"].lines):
        if line:
            place = np.s_[40 + 34 * row : 40 + 34 * (row + 1), 30:600]
            assert likeness(heavy[place], clean[place]) > 0.55, line
    ink = np.asarray(scans["light"].clean).astype(int)
    stamp = np.argwhere(np.ptp(ink, axis=2) > 40)  # the only colour on the page
    (top, left), (bottom, right) = stamp.min(0), stamp.max(0)
    assert 240 < right - left < 280
    assert likeness(heavy[top:bottom, left:right], clean[top:bottom, left:right]) > 0.5


def test_a_line_that_is_not_there_does_not_look_like_one():
    """The measure above tells: the same line is alike, another is not."""
    scan, other = (make_scan(make_invoice(seed, "tr"), "heavy", 9) for seed in (9, 10))
    place = np.s_[40 + 34 * 2 : 40 + 34 * 3, 30:600]
    assert likeness(straightened(scan)[place], grey(other.clean)[place]) < 0.45


def test_a_seed_makes_the_same_bytes_again_and_another_seed_others():
    first, again, other = (make_scan(make_invoice(3, "hu"), "medium", seed).noisy for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_questions_go_through_languages_levels_and_both_documents():
    found = scan_questions(12, 1)
    assert {question.group for question in found} == {f"{one}, {level}" for one in LANGUAGES for level in LEVELS}
    circulars = [question for question in found if "signatories" in question.truth.value]
    assert len(circulars) == 3
    for question in found:
        picture, words = question.body["messages"][0]["content"]
        assert all(key in words["text"] for key in question.truth.value)
        assert judge(question.truth, GivenAnswer(json.dumps(question.truth.value))).right
        assert not judge(question.truth, GivenAnswer(json.dumps({**question.truth.value, "stamp": "X"}))).right
        data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        assert Image.open(io.BytesIO(data)).format == "JPEG"
    assert found[:4] == scan_questions(4, 1)


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_asked_for_is_on_the_page(language):
    for seed in range(30):
        circular = make_circular(seed, language)
        text = "\n".join(circular.lines)
        for value in (circular.truth["company"], circular.truth["notary"], *circular.truth["signatories"]):
            assert value in text
        assert len(set(circular.truth["signatories"])) == 2
    assert {make_circular(seed, language).truth["authority"] for seed in range(30)} == {"joint", "sole"}


def test_the_font_has_every_letter_of_the_pages_and_stamps():
    font = ImageFont.truetype(str(font_file()), 22)
    missing = bytes(font.getmask("\uffff"))
    drawn = set()
    for language in LANGUAGES:
        for seed in range(30):
            circular = make_circular(seed, language)
            drawn |= {*"".join(circular.lines), *upper(circular.truth["notary"], language)}
    assert {"Ğ", "İ", "Ş", "Ő", "Ű"} <= drawn
    assert [letter for letter in sorted(drawn - {" "}) if bytes(font.getmask(letter)) == missing] == []


def test_capitals_follow_the_language():
    assert upper("Kadıköy 4. Noterliği", "tr") == "KADIKÖY 4. NOTERLİĞİ"
    assert upper("Szűcsi", "hu") == "SZŰCSI"


def test_the_text_of_a_stamp_runs_around_its_ring():
    """Every letter stands at the ring's radius, upright towards outside, the middle one at the top."""
    plain, lettered = (np.asarray(ring_text(text)).astype(int) for text in ("", "IIIII"))
    rows, columns = np.nonzero(lettered - plain > 100)
    middle = lettered.shape[0] / 2
    radii = np.hypot(rows - middle, columns - middle)
    assert 90 < radii.min() < radii.max() < 122
    angles = np.degrees(np.arctan2(middle - rows, columns - middle))
    assert abs(angles.mean() - 90) < 2
    top = (abs(columns - middle) < 4) & (rows < middle)
    assert np.ptp(rows[top]) > 10  # the middle letter I is upright


def test_a_page_is_drawn_in_black_on_white():
    page = np.asarray(drawn_page(("Győr",)))
    assert (page.min(), page.max()) == (0, 255)
