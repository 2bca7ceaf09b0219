"""Own questions and own pictures: what a file may say, what is refused by its line, how it is scored and reported."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onebox.eval.judge import judge
from onebox.eval.own import own_questions
from onebox.eval.pictures import character_errors, picture_questions
from onebox.eval.question import GivenAnswer, TruthKind
from onebox.spec.errors import UnreadableError
from tests.bench.faulty import faulty

LINES = [
    {"prompt": "What is the capital of Hungary?", "answer": ["Budapest", "Pest-Buda"]},
    {"id": "fire", "prompt": "Repeat: ŐSZI TŰZ", "exact": "ŐSZI TŰZ", "language": "hu"},
    {"id": "bill", "prompt": "As JSON.", "system": "Be brief.", "json": {"vendor": "Tóth Kft.", "total": 12500}},
    {"id": "order", "prompt": "As JSON.", "fields": {"order": {"id": "A-17"}}, "group": "orders", "max_tokens": 99},
    {"id": "day", "prompt": "Give a date.", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    {"id": "timer", "messages": [{"role": "user", "content": "Five minutes!"}], "tools": [{"type": "function"}],
     "calls": [{"name": "set_timer", "arguments": {"minutes": 5}}]},
    {"id": "signer", "prompt": "Who signs?", "image": "page.png", "answer": "Ayşe Doğan"},
]  # fmt: skip
RUBRIC = {"id": "no", "prompt": "Decline politely.", "rubric": ["declines", "is polite"]}


def written(directory, lines):
    path = directory / "own.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    Image.new("L", (40, 30), 255).save(directory / "page.png")
    return path


def test_every_kind_of_line_is_read(tmp_path):
    found = own_questions(written(tmp_path, [*LINES, "", RUBRIC]))
    assert [question.id for question in found][:3] == ["questions/0001", "questions/fire", "questions/bill"]
    assert {question.truth.kind for question in found} == set(TruthKind) - {TruthKind.TRANSCRIPT}
    bill, order, signer = found[2], found[3], found[6]
    assert [message["role"] for message in bill.body["messages"]] == ["system", "user"]
    assert (order.group, order.max_tokens, bill.group) == ("orders", 99, "json")
    picture, words = signer.body["messages"][0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert (data, words["text"]) == ((tmp_path / "page.png").read_bytes(), "Who signs?")
    assert signer.has_picture
    assert not bill.has_picture


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "it is not JSON"),
        ("[1]", "not a JSON object but a list"),
        ({"prompt": "x"}, "it does not say what is right; give one of answer, exact"),
        ({"prompt": "x", "answer": "y", "json": {"a": 1}}, "it has answer and json; give one of"),
        ({"prompt": "x", "answers": "y"}, "'answers' is not a field"),
        ({"answer": "y"}, "either a prompt or messages"),
        ({"prompt": "x", "messages": [], "answer": "y"}, "either a prompt or messages"),
        ({"messages": [{"role": "robot"}], "answer": "y"}, "objects with a role of system"),
        ({"messages": [{"role": "user"}], "image": "page.png", "answer": "y"}, "image goes with a prompt"),
        ({"prompt": " ", "answer": "y"}, "the prompt is empty"),
        ({"prompt": 5, "answer": "y"}, "prompt is a whole number, not a string"),
        ({"prompt": "x", "answer": []}, "none of them empty"),
        ({"prompt": "x", "answer": ""}, "none of them empty"),
        ({"prompt": "x", "json": {}}, "an object with at least one key"),
        ({"prompt": "x", "pattern": "(a"}, "not a regular expression of Python"),
        ({"prompt": "x", "pattern": ["a"]}, "must be one string"),
        ({"prompt": "x", "calls": [{"name": "f"}]}, "calls must be a list of"),
        ({"prompt": "x", "answer": "y", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "answer": "y", "max_tokens": True}, "max_tokens is true, not a whole number"),
        ({"prompt": "x", "answer": "y", "image": "none.png"}, "none.png cannot be read as an image"),
        ({"prompt": "x", "answer": "y", "image": "own.jsonl"}, "is not an image by its name"),
        ({"prompt": "x", "answer": "y", "id": "fire"}, "'fire' was used before"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path, line, message):
    path = written(tmp_path, [LINES[1], "", line])
    with pytest.raises(UnreadableError, match="line 3") as refused:
        own_questions(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{path}, line 3: ")


def test_an_empty_file_and_one_that_is_not_there_are_told(tmp_path):
    with pytest.raises(UnreadableError, match="holds no question"):
        own_questions(written(tmp_path, [""]))
    with pytest.raises(UnreadableError, match="cannot be read"):
        own_questions(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("place", "text", "right"),
    [
        (0, "It is Budapest.", True),
        (0, "It is Prague.", False),
        (1, "ŐSZI TŰZ", True),
        (2, '{"vendor": "Tóth Kft.", "total": 12500}', True),
        (2, '{"vendor": "Tóth Kft.", "total": 12500, "more": 1}', False),
        (3, '{"order": {"id": "A-17", "more": [1]}, "more": 1}', True),
        (3, '{"order": {"id": "A-18"}}', False),
        (3, '{"order": "A-17"}', False),
        (4, "2026-11-16", True),
        (4, "It is 2026-11-16.", False),
    ],
)
def test_answers_are_judged_as_their_line_says(tmp_path, place, text, right):
    question = own_questions(written(tmp_path, LINES))[place]
    assert judge(question.truth, GivenAnswer(text)).right is right


def answering(body):
    """The answers of a server that knows some of it; as a judge it finds politeness in every answer."""
    asked = json.dumps(body["messages"], ensure_ascii=False)
    for part, said in (
        ("You grade", '```json\n{"met": [%s, true], "why": "No."}\n```' % ("true" if "I cannot" in asked else "false")),
        ("capital", "Budapest, of course."),
        ("Decline", "I cannot do that, sorry."),
        ("Accept", "Gladly!"),
        ("date", "tomorrow"),
        ("Transcribe", "Árvíztűrő\ntükörfúrógép"),
        ("Extract", '{"total": 12.5, "vendor": "Tóth Kft."}'),
    ):
        if part in asked:
            return said
    return "I do not know."


def test_own_questions_and_pictures_stand_beside_the_suites_in_report_and_verdict(run_cli, tmp_path):
    accepts = {"id": "yes", "prompt": "Accept!", "rubric": ["declines", "is polite"]}
    path = written(tmp_path, [LINES[0], LINES[4], LINES[6], RUBRIC, accepts])
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, answer in (("a.txt", "Árvíztűrő tükörfúrógép"), ("b.json", '{"total": 12.5, "vendor": "Tóth Kft."}')):
        (pictures / name).write_text(answer)
        Image.new("L", (40, 30), 255).save(pictures / f"{name[0]}.png")
    output = tmp_path / "eval.json"
    with faulty(answer_of=answering, modalities=("text", "image")) as one, faulty(answer_of=answering) as judging:
        options = ("--checks", "tools", "--count", "3", "--questions", path, "--pictures", pictures)
        options = (*options, "--judge", judging.url)
        result = run_cli("eval", one.url, one.url, *options, "--judge-model", "fake", "--output", output)
    assert result.code == 0, result.out + result.err
    found = json.loads(output.read_text())
    rows = {row["check"]: (row["right"], row["answered"]) for row in found["tallies"][0]}
    assert (rows["questions"], rows["pictures"], rows["tools"][1]) == ((2, 5), (2, 2), 3)
    assert found["judge"]["server"]["model"] == "fake"
    assert [pair["check"] for pair in found["comparison"]["pairs"]] == ["tools", "questions", "pictures", "all answers"]
    replies = {reply["question_id"]: reply["judgement"] for reply in found["sides"][1]["replies"]}
    assert replies["questions/yes"]["scores"] == {"criteria": 0.5}
    assert "does not meet 'declines'" in replies["questions/yes"]["why"]
    # The judge saw four answers, two of each server, and not whose they were.
    assert len(judging.bodies) == 4
    assert sorted(map(json.dumps, judging.bodies))[::2] == sorted(map(json.dumps, judging.bodies))[1::2]
    report = run_cli("report", output, "--output", tmp_path / "eval.html")
    assert report.code == 0, report.err
    page = (tmp_path / "eval.html").read_text()
    assert "questions/yes" in page
    assert "judged by fake" in page


def test_a_judge_that_takes_a_schema_is_asked_in_it_and_only_once(run_cli, tmp_path):
    with faulty(answer_of=answering) as one, faulty(answer_of=answering, knows={"response_format"}) as judging:
        options = ("--checks", "questions", "--questions", written(tmp_path, [RUBRIC]), "--judge", judging.url)
        assert run_cli("eval", one.url, *options).code == 0
    (body,) = judging.bodies
    assert body["response_format"]["json_schema"]["schema"]["properties"]["met"]["maxItems"] == 2


@pytest.mark.parametrize("said", ["I like it.", '{"met": [true]}', '{"met": ["yes", "no"]}', "{{", "[]"])
def test_a_judge_that_gives_no_judgement_is_a_failure_and_no_wrong_answer(run_cli, tmp_path, said):
    output = tmp_path / "eval.json"
    with faulty(answer_of=answering) as one, faulty(answer_of=lambda _: said) as judging:
        options = ("--checks", "questions", "--questions", written(tmp_path, [RUBRIC]), "--judge", judging.url)
        result = run_cli("eval", one.url, *options, "--output", output)
    assert result.code == 1, result.out
    assert "1 requests FAILED" in result.out
    assert "no judgement (status 200): The judge's reply is not the JSON that was asked for" in result.out
    (reply,) = json.loads(output.read_text())["sides"][0]["replies"]
    assert reply["answer"]["text"].startswith("I cannot")
    assert reply["judgement"] is None


def test_a_server_without_images_is_not_asked_own_questions_that_have_one(run_cli, tmp_path):
    with faulty(answer_of=answering) as server:
        result = run_cli(
            "eval", server.url, "--checks", "questions", "--questions", written(tmp_path, LINES[:5] + LINES[6:])
        )
    assert result.code == 0, result.out + result.err
    assert "not run: questions with an image: the server takes no images" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checks", "questions"), "which --questions gives; it is not given"),
        (("--questions", "none.jsonl"), "none.jsonl cannot be read"),
        (("--pictures", "none"), "none is not a directory"),
        (("--judge", "localhost:1"), "no question that is asked has a rubric"),
        (("--judge-model", "x"), "--judge-model needs --judge"),
        (("--questions", "OWN"), "Question 'no' has a rubric, which another server must judge"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(run_cli, tmp_path, arguments, message):
    path = written(tmp_path, [RUBRIC])
    result = run_cli("eval", "localhost:1", *(path if part == "OWN" else part for part in arguments))
    assert result.code == 2
    assert message in result.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no image"),
        ({"a.png": ""}, "a.png has neither a.json (fields) and a.txt (text); give one"),
        ({"a.png": "", "a.json": "{}", "a.txt": "x"}, "has both"),
        ({"a.png": "", "a.json": "[1]"}, "must be a JSON object"),
        ({"a.png": "", "a.json": "{\n'"}, "line 2: it is not JSON"),
        ({"a.png": "", "a.txt": " "}, "a.txt is empty"),
        ({"a.png": "", "a.txt": "x", "b.txt": "x"}, "b.txt has no image of the same name"),
        ({"a.png": "", "a.gif": "", "a.txt": "x"}, "several images with one name"),
        ({"a.png": "broken", "a.txt": "x"}, "a.png cannot be read as an image"),
    ],
)
def test_a_directory_of_pictures_is_complete_or_refused(tmp_path, files, message):
    for name, content in files.items():
        if name.endswith(("png", "gif")) and not content:
            Image.new("L", (4, 4)).save(tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(UnreadableError) as refused:
        picture_questions(tmp_path)
    assert message in str(refused.value)


def plain_distance(one, two):
    """Levenshtein's table, cell by cell."""
    row = list(range(len(two) + 1))
    for place, letter in enumerate(one, start=1):
        above, row[0] = row[0], place
        for column, other in enumerate(two, start=1):
            above, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, above + (letter != other))
    return row[-1]


@given(st.text("abőé", max_size=12), st.text("abőé", min_size=1, max_size=12))
def test_character_errors_are_levenshteins(said, expected):
    assert character_errors(said, expected) == pytest.approx(plain_distance(said, expected) / len(expected))


def test_a_transcript_may_break_its_lines_elsewhere_and_miss_a_letter_in_fifty(tmp_path):
    expected = "Árvíztűrő tükörfúrógép és még néhány szó, hogy több mint ötven betű legyen."
    (tmp_path / "a.txt").write_text(expected)
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    (question,) = picture_questions(tmp_path)

    def score(text):
        found = judge(question.truth, GivenAnswer(text))
        return found.right, round(found.scores["characters"], 3)

    assert score(expected.replace(" ", "\n", 3)) == (True, 1.0)
    assert score(f"```\n{expected}\n```") == (True, 1.0)
    assert score(expected.replace("ű", "ü", 1))[0]
    assert not score(expected.replace("é", "e"))[0]
    assert score("") == (False, 0.0)
    assert score(expected * 3)[1] == 0.0
