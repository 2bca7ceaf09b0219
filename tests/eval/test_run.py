"""A whole evaluation over HTTP: servers that answer, that fail, and that cannot do what is asked."""

import asyncio
import base64
import io
import json
import re

import pytest
from PIL import Image

from onebox.bench.client import Client, Connection
from onebox.bench.record import Failure, Reason
from onebox.eval.asking import Manner, ask_all
from onebox.eval.compared import compare_answers, compare_texts, tally_answers
from onebox.eval.facts import fact_questions, language_questions
from onebox.eval.likelihood import Likelihoods, Place
from onebox.eval.question import GivenAnswer, Judgement, QuestionResult
from onebox.eval.verdict import ComparisonOutcome, conclude
from tests.bench.faulty import faulty


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("400", "refused"),
        ("500", "server error"),
        ("cut", "cut stream"),
        ("duplicates", "duplicate chunks"),
        ("overstated", "wrong usage"),
        ("not json", "malformed stream"),
        ("empty", "empty answer"),
    ],
)
def test_a_faulty_server_is_reported_first_and_its_failures_are_no_wrong_answers(run_cli, tmp_path, fault, reason):
    output = tmp_path / "eval.json"
    with faulty(fault_of=lambda number: fault if number % 2 else "") as server:
        result = run_cli("eval", server.url, "--checks", "facts", "--output", output, "--json")
    assert result.code == 1, result.err
    shown = result.err[result.err.index("18 requests FAILED") :]
    assert reason in shown.splitlines()[1]
    found = json.loads(output.read_text())
    (tally, _) = found["tallies"][0]
    assert (tally["asked"], tally["answered"]) == (36, 18)
    assert {failure["reason"] for failure in found["failures"]} == {reason}
    told = json.loads(result.out)
    assert (told["failures"], told["right"][0]["facts"][1]) == (18, 18)


def test_nothing_but_failures_is_no_score_at_all(run_cli, tmp_path):
    output = tmp_path / "eval.json"
    with faulty("500") as server:
        result = run_cli("eval", server.url, server.url, "--checks", "facts", "--output", output)
    assert result.code == 1
    assert "Verdict: no verdict" in result.out
    (tally, _) = json.loads(output.read_text())["tallies"][0]
    assert (tally["answered"], tally["share"]["estimate"]) == (0, None)


def test_a_busy_server_is_asked_again_and_its_last_refusal_stands():
    def replies(fault_of):
        found = []

        async def run(url):
            async with Client(Connection(url)) as client:
                await client.discover()
                await ask_all(client, fact_questions()[:1], Manner(waits_s=(0.01, 0.01)), found.append)

        with faulty(fault_of=fault_of) as server:
            asyncio.run(run(server.url))
        return found

    (patient,) = replies(lambda number: "429" if number < 2 else "")
    assert patient.answer is not None
    assert patient.answer.retries == 2
    (refused,) = replies(lambda _: "503")
    assert refused.failure is not None
    assert refused.failure.status == 503


def test_what_a_server_does_not_offer_is_said_and_is_no_failure(run_cli):
    with faulty(max_model_len=600) as server:
        checks = ("--checks", "keys,ocr,likelihood", "--lengths", "400,4096", "--repeats", "1", "--count", "2")
        result = run_cli("eval", server.url, server.url, *checks)
    assert result.code == 4, result.err  # nothing was answered right, so that no loss could be seen
    assert "not run: keys at 4,096 tokens: the context of 600 tokens has no room for them" in result.out
    assert "not run: ocr: the server takes no images" in result.out
    assert "not run: likelihood: the server returns no log-probabilities of a prompt" in result.out
    assert "Not compared: ocr (the server takes no images); keys at 4,096 tokens" in result.out.replace("\n", "")


def test_a_server_with_a_shorter_context_is_not_asked_what_it_cannot_hold(run_cli, tmp_path):
    output = tmp_path / "keys.json"
    with faulty(max_model_len=4096) as long, faulty(max_model_len=600) as short:
        options = ("--checks", "keys", "--lengths", "400,1024", "--repeats", "1", "--output", output)
        result = run_cli("eval", long.url, short.url, *options)
    assert result.code == 4, result.out  # nothing was answered right
    found = json.loads(output.read_text())
    assert [len(side["replies"]) for side in found["sides"]] == [6, 3]
    assert [list(side["skipped"]) for side in found["sides"]] == [[], ["keys at 1,024 tokens"]]
    assert found["comparison"]["pairs"][-1]["num_pairs"] == 3


def test_a_server_that_sees_is_shown_the_drawn_document(run_cli, tmp_path):
    output = tmp_path / "ocr.json"
    with faulty(modalities=("text", "image")) as server:
        result = run_cli("eval", server.url, "--checks", "ocr", "--count", "2", "--output", output)
    assert result.code == 0, result.err
    assert '"valid": 0.0' in output.read_text()
    for body in server.bodies:
        picture, words = body["messages"][0]["content"]
        data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert Image.open(io.BytesIO(data)).size[0] == 720
        assert "Extract the following as JSON: invoice_number" in words["text"]


def test_a_server_that_is_not_there_is_one_sentence(run_cli):
    result = run_cli("eval", "http://127.0.0.1:9", "--checks", "facts")
    assert result.code == 1
    assert result.err.startswith("onebox: No server answers at http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere is neither a URL"),
        (("localhost:1", "--checks", "facts,wit"), "--checks holds 'wit'"),
        (("localhost:1", "--checks", ","), "--checks is empty"),
        (("localhost:1", "--lengths", "1k"), "--lengths '1k' is not a list"),
        (("localhost:1", "--lengths", "16"), "less than 256 tokens"),
        (("localhost:1", "--serve-a", "--dtype float32"), "is a running server"),
        (("localhost:1", "--serve-b", "--dtype float32"), "need B, which is not given"),
        (("pocket", "--serve-a", "'"), "cannot be split into arguments"),
        (("localhost:1", "--text", "/no/such/file"), "cannot be read as UTF-8 text"),
        (("localhost:1", "--output", "/no/such/place/eval.json"), "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(run_cli, arguments, message):
    result = run_cli("eval", *arguments)
    assert result.code == 2
    assert message in result.err.replace("\n", " ")
    assert result.out == ""


def test_a_directory_that_cannot_be_served_is_told_with_the_servers_own_words(run_cli, tmp_path):
    result = run_cli("eval", str(tmp_path), "--checks", "facts")
    assert result.code == 1
    assert "ended before it was ready. Its output:" in result.err
    assert "config.json" in result.err


def replies_of(rights):
    """Replies to the facts; None is a failure."""
    failure = Failure(Reason.SERVER_ERROR, "boom", 500)
    return [
        QuestionResult(question.id, failure=failure)
        if right is None
        else QuestionResult(question.id, GivenAnswer("yes" if right else "no"), Judgement(right))
        for question, right in zip(fact_questions(), rights, strict=False)
    ]


def verdict_of(first, second):
    return conclude(compare_answers(fact_questions(), replies_of(first), replies_of(second)), None, 0, [])


def test_a_pair_with_a_failure_is_no_pair():
    first, second = [True, True, None, False], [True, None, True, True]
    (facts, _) = compare_answers(fact_questions(), replies_of(first), replies_of(second))
    assert (facts.num_pairs, facts.both, facts.only_first, facts.only_second) == (2, 1, 0, 1)
    (tally, _) = tally_answers(fact_questions(), replies_of(first))
    assert (tally.asked, tally.answered, tally.right) == (4, 3, 2)


def test_the_verdict_goes_with_the_evidence():
    right, wrong = [True] * 36, [False] * 36
    assert verdict_of(right, right).outcome is ComparisonOutcome.SAME
    assert verdict_of(right, wrong).outcome is ComparisonOutcome.WORSE
    assert verdict_of(wrong, right).outcome is ComparisonOutcome.BETTER
    assert verdict_of([], []).outcome is ComparisonOutcome.UNKNOWN
    # Where nobody is ever right, there is nothing to lose: that is no "no difference".
    assert verdict_of(wrong, wrong).outcome is ComparisonOutcome.UNKNOWN
    assert "show no difference either way" in verdict_of(wrong, wrong).sentences[0]
    # Two of 36 are well within chance, and what could have been missed is said.
    few = verdict_of(right, [False] * 2 + right[2:])
    assert few.outcome is ComparisonOutcome.SAME
    assert few.sentences[0].startswith("No difference seen on 36 answers (2 right only with A, 0 only with B;")
    assert few.pairs[-1].at_most_worse > 2 / 36


def test_failures_are_the_first_thing_that_a_verdict_says():
    pairs = compare_answers(fact_questions(), replies_of([True]), replies_of([True]))
    assert conclude(pairs, None, 3, []).sentences[0].startswith("3 requests failed")


def texts_of(changes, num_tokens=50):
    """Two servers on passages of which the second predicts every token worse by so many nats; kinds of text differ."""
    sides = []
    for shift in (0.0, 1.0):
        found = []
        for number, change in enumerate(changes):
            loss = 1.0 + 0.2 * (number % 4) + shift * change
            place = Place("5", -loss, {"5": -loss, "6": -9.0})
            found.append(Likelihoods(f"en/{number}", "prompt_logprobs", (place,) * (num_tokens + number)))
        sides.append(found)
    return compare_texts(*sides)


@pytest.mark.parametrize("num_passages", [1, 2])
def test_one_or_two_passages_are_too_few_to_tell_whatever_they_show(num_passages):
    for change in (0.0, 1.0):
        found = conclude([], texts_of([change] * num_passages), 0, [])
        assert found.outcome is ComparisonOutcome.TOO_FEW
        assert "too few to tell: it takes 3 or more" in found.sentences[0]


@pytest.mark.parametrize("num_passages", [3, 4, 5, 9])
def test_a_server_that_is_one_nat_worse_on_every_token_is_worse_from_three_passages_up(num_passages):
    spread = [1.0 + 0.02 * (-1) ** number for number in range(num_passages)]
    assert conclude([], texts_of(spread), 0, []).outcome is ComparisonOutcome.WORSE
    assert conclude([], texts_of([-change for change in spread]), 0, []).outcome is ComparisonOutcome.BETTER
    alike = conclude([], texts_of([0.01 * (-1) ** number for number in range(num_passages)]), 0, [])
    assert alike.outcome is ComparisonOutcome.SAME


def test_a_wide_interval_is_too_few_to_tell_and_the_number_that_it_takes_settles_it():
    """Changes of 1 nat with a deviation of 0.7: nothing is significant with three, and nothing is ruled out."""
    changes = [0.3, 1.0, 1.7]
    found = conclude([], texts_of(changes), 0, [])
    assert found.outcome is ComparisonOutcome.TOO_FEW
    assert found.texts is not None
    assert found.texts.p_value > 0.05
    told = re.search(
        r"3 passages are too few to tell: B's perplexity may be [\d,]+% higher\. It takes about (\d+)\.",
        found.sentences[0],
    )
    assert told, found.sentences
    needed = int(told.group(1))
    assert 4 <= needed <= 12
    again = (changes * needed)[:needed]
    assert conclude([], texts_of(again), 0, []).outcome is ComparisonOutcome.WORSE


@pytest.mark.parametrize("num_answers", [1, 5, 8])
def test_few_answers_are_too_few_to_tell_even_if_all_are_alike(num_answers):
    found = verdict_of([True] * num_answers, [True] * num_answers)
    assert found.outcome is ComparisonOutcome.TOO_FEW
    assert found.sentences[0].endswith("It takes about 9 questions.")
    assert verdict_of([True] * 9, [True] * 9).outcome is ComparisonOutcome.SAME


def test_six_losses_of_six_are_told_and_five_of_five_are_not():
    """One check is one comparison: its answers are not counted a second time as all answers."""
    assert verdict_of([True] * 5, [False] * 5).outcome is ComparisonOutcome.TOO_FEW
    assert verdict_of([True] * 6, [False] * 6).outcome is ComparisonOutcome.WORSE


def test_a_check_too_small_to_tell_does_not_raise_the_bar_for_the_others():
    questions = [*fact_questions()[:6], *language_questions()[:5]]
    replies = [
        [
            QuestionResult(question.id, GivenAnswer(""), Judgement(right))
            for question in questions[: len(rights)]
            for right in [rights[questions.index(question)]]
        ]
        for rights in ([True] * 11, [False] * 6 + [True] * 5)
    ]
    facts, languages, overall = conclude(compare_answers(questions, *replies), None, 0, []).pairs
    assert (facts.p_value, languages.p_value, overall.p_value) == (2 * 0.03125, 1.0, 2 * 0.03125)


def test_an_eval_that_cannot_tell_does_not_end_as_if_all_were_well(run_cli):
    with faulty() as server:
        options = ("--checks", "keys", "--lengths", "400", "--repeats", "1")
        result = run_cli("eval", server.url, server.url, *options)
    assert result.code == 4, result.out + result.err
    assert "Verdict: no verdict" in result.out
