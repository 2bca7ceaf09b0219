"""The questions themselves: their truths are true, their lengths hold, their pictures show what is asked for."""

import asyncio
import io
import json

import pytest
from PIL import Image, ImageFont

from onebox.eval.facts import fact_questions, language_questions
from onebox.eval.invoices import LANGUAGES, invoice_questions, make_invoice, schema_questions
from onebox.eval.judge import judge
from onebox.eval.keys import DEPTHS, key_questions, parse_lengths
from onebox.eval.ocr import draw, font_file, ocr_questions
from onebox.eval.passages import file_passages, shipped_passages
from onebox.eval.question import GivenAnswer, TruthKind
from onebox.eval.tools import tool_questions
from onebox.spec.errors import UnreadableError


async def count_words(body):
    return len(body["messages"][0]["content"].split())


def keys(lengths=(300, 1000), repeats=2, seed=1, count=count_words):
    return asyncio.run(key_questions(lengths, repeats, seed, count))


def everything(seed=1):
    return [
        *fact_questions(),
        *language_questions(),
        *invoice_questions(24, seed),
        *schema_questions(24, seed),
        *tool_questions(24, seed),
        *ocr_questions(3, seed),
        *keys(seed=seed),
    ]


def perfect(truth):
    match truth.kind:
        case TruthKind.JSON:
            return GivenAnswer(json.dumps(truth.value))
        case TruthKind.CALLS:
            return GivenAnswer("", tuple(truth.value))
    return GivenAnswer(truth.value[0])


def test_the_truth_is_a_right_answer_to_every_question_and_silence_is_not():
    for question in everything():
        assert judge(question.truth, perfect(question.truth)).right, question.id
        if question.truth.value:
            assert not judge(question.truth, GivenAnswer("")).right, question.id


def test_the_question_does_not_give_a_fact_away():
    """An answer that only repeats the question must be wrong."""
    for question in [*fact_questions(), *language_questions()]:
        text = question.body["messages"][0]["content"]
        assert question.truth.kind is TruthKind.TEXT or not judge(question.truth, GivenAnswer(text)).right, text


def test_every_question_has_a_name_of_its_own_and_a_seed_makes_the_same_ones_again():
    first, again, other = everything(), everything(), everything(seed=2)
    assert len({question.id for question in first}) == len(first)
    assert first == again
    assert [q.body for q in first if q.check == "invoices"] != [q.body for q in other if q.check == "invoices"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_invoice_adds_up_and_says_what_its_truth_says(language):
    for seed in range(40):
        invoice = make_invoice(seed, language)
        truth = invoice.truth
        assert round(truth["subtotal"] + truth["tax"], 2) == truth["total"]
        assert truth["date"] < truth["due_date"]
        for key in ("vendor", "customer", "invoice_number", "currency"):
            assert truth[key] in invoice.text
        digits = f"{truth['total']:.2f}".removesuffix(".00").replace(".", "")
        assert digits in invoice.text.replace(",", "").replace(".", "").replace(" ", "")


def test_hidden_keys_fill_the_length_and_stand_at_their_depth():
    for question in keys():
        text = question.body["messages"][0]["content"]
        length, depth = int(question.id.split("/")[1]), float(question.id.split("/")[2])
        words = len(text.split())
        assert 0.8 * length <= words <= length, question.id
        (key,) = question.truth.value
        assert text.count(key) == 1
        assert abs(text.index(key) / len(text) - depth) < 0.2


def test_without_a_count_the_length_is_guessed_and_errs_on_the_short_side():
    async def cannot_count(_):
        return None

    for question in keys(count=cannot_count):
        assert len(question.body["messages"][0]["content"]) < 3 * int(question.id.split("/")[1])


def test_lengths_beyond_the_context_are_named_not_asked():
    found = parse_lengths((1024, 4096, 8192), 4096)
    assert (found.fitting, found.too_long) == ((1024,), (4096, 8192))
    assert parse_lengths((1024,), None).fitting == (1024,)
    assert len({question.group for question in keys()}) == 2 * len(DEPTHS)


def test_a_drawn_document_has_ink_where_its_lines_are():
    invoice = make_invoice(5, "hu")
    picture = Image.open(io.BytesIO(draw(invoice)))
    rows = [picture.crop((0, 40 + 34 * n, picture.width, 40 + 34 * (n + 1))) for n in range(len(invoice.lines))]
    for line, row in zip(invoice.lines, rows, strict=True):
        assert (row.getextrema()[0] < 100) is bool(line), line


def test_the_font_has_every_letter_that_is_drawn():
    font = ImageFont.truetype(str(font_file()), 22)
    missing = bytes(font.getmask("\uffff"))
    drawn = {letter for language in LANGUAGES for seed in range(40) for letter in make_invoice(seed, language).text}
    assert {"ő", "ű", "ş", "ğ", "İ", "ı"} <= drawn
    assert [letter for letter in sorted(drawn - {"\n", " "}) if bytes(font.getmask(letter)) == missing] == []


def test_shipped_passages_are_many_and_differ():
    found = shipped_passages()
    assert len({passage.text for passage in found}) == len(found) == 24
    assert {passage.kind for passage in found} == {"en", "hu", "tr", "code", "invoice", "filler"}


def test_a_file_is_cut_into_passages_without_losing_a_line(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("".join(f"Line {number} of a text of my own.\n" for number in range(200)) + "x" * 5000)
    found = file_passages(path)
    assert "".join(passage.text for passage in found) == path.read_text()
    assert max(len(passage.text) for passage in found) <= 3200
    path.write_text("short")
    with pytest.raises(UnreadableError, match="less than 80"):
        file_passages(path)
    path.write_bytes(b"\xff\xfe" * 90)
    with pytest.raises(UnreadableError, match="UTF-8"):
        file_passages(path)
