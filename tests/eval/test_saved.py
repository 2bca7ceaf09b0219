"""Results of earlier runs as A or B: the same verdict as if both had been asked at once, and no other questions."""

import json

import pytest

from onebox.eval.target import refuse_wrong_target
from tests.bench.faulty import faulty
from tests.eval.test_own import LINES, RUBRIC, answering, written


def knowing(body):
    """Answers nothing but one of the own questions right."""
    return answering(body) if "capital of Hungary" in json.dumps(body["messages"]) else "I do not know."


def asked(run_cli, place, output, *options, server=None):
    result = run_cli("eval", place, *([server] if server else []), "--output", output, *options)
    return result, json.loads(output.read_text()) if output.is_file() else None


OPTIONS = ("--checks", "tools,questions", "--count", "2", "--seed", "7")


def test_a_saved_result_is_compared_as_if_it_were_asked_now(run_cli, tmp_path):
    own = ("--questions", written(tmp_path, [LINES[0], LINES[4]]))
    with faulty(answer_of=knowing) as one, faulty(answer_of=answering) as other:
        _, together = asked(run_cli, one.url, tmp_path / "both.json", *OPTIONS, *own, server=other.url)
        first, _ = asked(run_cli, one.url, tmp_path / "a.json", *OPTIONS, *own)
        assert first.code == 0, first.err
        _, later = asked(run_cli, tmp_path / "a.json", tmp_path / "later.json", server=other.url)
        asked(run_cli, other.url, tmp_path / "b.json", *OPTIONS, *own)
        num_asked = len(one.bodies) + len(other.bodies)
        result, files = asked(run_cli, tmp_path / "a.json", tmp_path / "files.json", server=tmp_path / "b.json")
        assert len(one.bodies) + len(other.bodies) == num_asked  # two files need no server
    assert together["comparison"] == later["comparison"] == files["comparison"]
    assert together["questions"] == later["questions"]
    assert later["config"]["seed"] == 7
    assert "a.json (fake at http://" in result.out.replace("\n", "")


def test_only_what_both_were_asked_alike_is_compared(run_cli, tmp_path):
    with faulty(answer_of=answering) as server:
        asked(run_cli, server.url, tmp_path / "a.json", "--checks", "tools", "--count", "4")
        asked(run_cli, server.url, tmp_path / "b.json", "--checks", "tools,invoices", "--count", "2")
        asked(run_cli, server.url, tmp_path / "c.json", "--checks", "invoices", "--count", "2", "--seed", "5")
    result, found = asked(run_cli, tmp_path / "a.json", tmp_path / "ab.json", server=tmp_path / "b.json")
    assert [len(side["replies"]) for side in found["sides"]] == [2, 2]
    assert "not run: 2 questions: the other result does not have them" in result.out
    result, _ = asked(run_cli, tmp_path / "a.json", tmp_path / "ac.json", server=tmp_path / "c.json")
    assert result.code == 2
    assert "no question and no text in common" in result.err


def test_answers_that_were_judged_need_no_judge_again(run_cli, tmp_path):
    own = ("--checks", "questions", "--questions", written(tmp_path, [RUBRIC]))
    with faulty(answer_of=answering) as server:
        for name in ("a.json", "b.json"):
            asked(run_cli, server.url, tmp_path / name, *own, "--judge", server.url)
        result = run_cli("eval", tmp_path / "a.json", tmp_path / "b.json")
        assert "1   " in result.out
        refused = run_cli("eval", tmp_path / "a.json", server.url)
        assert "has a rubric, which another server must judge" in refused.err
        before = len(server.bodies)
        _, found = asked(run_cli, tmp_path / "a.json", tmp_path / "c.json", "--judge", server.url, server=server.url)
        assert len(server.bodies) == before + 2  # one answer and one judgement
    assert [side["replies"][0]["judgement"]["right"] for side in found["sides"]] == [True, True]


def test_what_cannot_be_taken_is_said(run_cli, tmp_path):
    few = ("--checks", "tools", "--count", "4")
    with faulty(answer_of=answering) as server:
        asked(run_cli, server.url, tmp_path / "a.json", *few)
        asked(run_cli, server.url, tmp_path / "thought.json", *few, "--thinking")
        asked(run_cli, server.url, tmp_path / "two.json", *few, server=server.url)
    body = json.loads((tmp_path / "a.json").read_text())
    body["questions"][3]["max_tokens"] = "many"
    (tmp_path / "damaged.json").write_text(json.dumps(body))
    (tmp_path / "other.json").write_text("{}")
    for arguments, message in (
        (("two.json", "a.json"), "compares two servers already"),
        (("a.json", "thought.json"), "with thinking and the other without"),
        (("damaged.json", "a.json"), "is damaged: questions[3].max_tokens is 'many'"),
        (("other.json", "a.json"), "is not a result of this onebox's `eval --output`"),
        (("a.json", "a.json", "--checks", "facts"), "--checks cannot be given beside a saved result"),
        (("a.json", "a.json", "--seed", "2"), "--seed cannot be given beside a saved result"),
        (("a.json", "a.json", "--serve-a", "--dtype float32"), "is a saved result; arguments"),
        (("a.json", "none.json"), "nor the result of an earlier run"),
    ):
        result = run_cli("eval", *(tmp_path / part if part.endswith(".json") else part for part in arguments))
        assert result.code == 2, arguments
        assert message in result.err.replace("\n", " "), result.err


def test_a_model_by_its_name_on_the_hub_is_left_to_serve():
    refuse_wrong_target("nobody/nothing-at-all", "")
    refuse_wrong_target("nobody/nothing-at-all@main", "--dtype float32")


@pytest.mark.parametrize("place", ["./no/such", "/no/such", "a/b/c", "~/x"])
def test_a_path_is_no_name_on_the_hub(run_cli, place):
    assert "is neither a URL" in run_cli("eval", place).err.replace("\n", " ")
