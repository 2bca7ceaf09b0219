"""A report: whole, self-contained, honest about failures, and every figure where it says it is."""

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from onebox.bench.record import Acceptance, Failure, Power, Reason, Server, write_run
from onebox.eval.facts import fact_questions
from onebox.eval.likelihood import Likelihoods, Place
from onebox.eval.run import EvalSettings, EvalTarget, Evaluation, write_eval
from onebox.planner import Weights, named_preset
from onebox.report import load, make_report, plots
from onebox.report.ceiling import Ceiling
from onebox.spec.errors import UnreadableError
from onebox.spec.hardware import named_box
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec
from tests.bench.test_compare import run
from tests.eval.test_run import replies_of

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page; notes its figures, its words in order, and whether its tags close as they opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.figures, self.words, self.ids, self.references = [], [], [], [], []
        self._figure = None
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.references += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for _, value in attrs))
        if tag == "data":
            self._figure = given | {"text": ""}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "data":
            self.figures.append(self._figure)
            self._figure = None

    def handle_data(self, data):
        if self._figure is not None:
            self._figure["text"] += data
        if data.strip() and "style" not in self.open:
            self.words.append(data.strip())


def bench_run(**changes):
    made = run(
        memory_bytes={"weights": 3 << 30, "KV pages": 1 << 30, "reserve": 5 << 30},
        startup_s={"weights": 1.25, "first token": 4.0},
        power=Power(210.5, 300.0, 80.0, 12, 1.0),
        commit="0123456789ab+",
        notes=("the server has no /tokenize",),
        **changes,
    )
    drafts = Acceptance(30, 48, 2.25, "usage", 24, (0.75, 0.5))
    figures = {
        "prompt_tokens": 64.0,
        "completion_tokens": 21.0,
        "decode_p50_tok_s": 101.26,
        "decode_min_tok_s": 99.0,
        "decode_max_tok_s": 103.0,
        "ttft_cold_p50_s": 0.123,
        "ttft_warm_p50_s": 0.012,
    }
    single, load_, sweep = made.workloads
    more = {"completed": 15.0, "failed": 0.0, "aggregate_tok_s": 333.3, "ttft_p50_s": 1.5, "ttft_p99_s": 2.5}
    workloads = (
        replace(single, figures=figures, acceptance=drafts, notes=("scaled down to 64 tokens",)),
        replace(load_, figures=load_.figures | more),
        replace(sweep, settings=sweep.settings | {"prompt": 512, "answer": 64, "depth": 0, "concurrency": 1}),
        replace(single, name="Vision/OCR", figures={}, requests=(), skipped="the server takes no images"),
    )
    return replace(made, workloads=workloads)


def failing_run():
    made = bench_run()
    broken = [
        replace(request, failure=Failure(Reason.STALL, "Nothing came <for> 5 s.", 200))
        for request in made.workloads[1].requests[:3]
    ]
    loaded = replace(made.workloads[1], requests=(*broken, *made.workloads[1].requests[3:]))
    return replace(made, workloads=(made.workloads[0], loaded, *made.workloads[2:]))


def eval_run(second, *, likelihoods=True, num_passages=None):
    evaluation = Evaluation(
        [EvalTarget("A", "http://a", api_key="secret"), EvalTarget("B", "http://b")],
        EvalSettings(("facts", "likelihood")),
    )
    evaluation.questions = fact_questions()
    evaluation.passages = evaluation.passages[:num_passages]
    for side, rights, worse in zip(evaluation.sides, ([True] * 36, second), (0.0, 0.5), strict=True):
        side.server = Server("http://a", "pocket", "onebox", "0.1.0")
        side.replies = replies_of(rights)
        side.skipped = {"ocr": "the server takes no images"}
        if likelihoods:
            place = Place("5", -1.0 - worse, {"5": -1.0 - worse, "6": -1.2})
            side.likelihoods = [
                Likelihoods(passage.id, "prompt_logprobs", (place,) * 7) for passage in evaluation.passages
            ]
    return evaluation.result(("onebox", "eval"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Files of all kinds by name."""
    tmp_path = tmp_path_factory.mktemp("results")
    write_run(bench_run(), tmp_path / "good.json")
    write_run(failing_run(), tmp_path / "bad.json")
    write_eval(eval_run([True] * 20 + [False] * 16), tmp_path / "eval.json")
    write_eval(eval_run([None] * 2 + [True] * 34, likelihoods=False), tmp_path / "broken_eval.json")
    return tmp_path


@functools.cache
def made(results, *names):
    return make_report([load(results / name) for name in names])


def at(results, file, key):
    place = json.loads((results / file).read_text())
    for part in key.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        place = place[int(part)] if isinstance(place, list) else place[part]
    return place


NAMES = [("good.json",), ("bad.json",), ("eval.json",), ("good.json", "bad.json", "eval.json", "broken_eval.json")]


@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_every_figure_is_in_its_file_at_its_key(results, names):
    page = Page(made(results, *names).html)
    assert len(page.figures) > 20
    for figure in page.figures:
        found = at(results, figure["data-file"], figure["data-key"])
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        assert figure["value"] == (repr(found) if is_number else str(found)), figure
        digits = re.sub(r"[^0-9.eE-]", "", figure["text"].replace(",", "")) if is_number else ""
        if is_number:
            scale = 100 if "%" in figure["text"] else 1000 if figure["text"].endswith(" ms") else 1
            assert float(digits) == pytest.approx(found * scale, rel=0.05, abs=0.06), figure


def test_the_figures_that_matter_are_shown(results):
    shown = {(figure["data-key"], figure["text"]) for figure in Page(made(results, "good.json").html).figures}
    expected = {
        ("/workloads/0/figures/decode_p50_tok_s", "101.3"),
        ("/workloads/0/figures/ttft_cold_p50_s", "123 ms"),
        ("/workloads/0/figures/ttft_warm_p50_s", "12 ms"),
        ("/workloads/0/acceptance/by_position/1", "50.0%"),
        ("/workloads/0/acceptance/tokens_per_step", "2.25"),
        ("/workloads/1/figures/aggregate_tok_s", "333.3"),
        ("/workloads/1/figures/ttft_p50_s", "1.5 s"),
        ("/workloads/1/figures/ttft_p99_s", "2.5 s"),
        ("/workloads/2/settings/prompt", "512"),
        ("/memory_bytes/KV pages", "1,073,741,824"),
        ("/startup_s/first token", "4 s"),
        ("/power/mean_w", "210.5 W"),
        ("/commit", "0123456789ab+"),
        ("/hardware/cpu", "a CPU"),
        ("/versions/onebox", "0.1.0"),
        ("/server/model", "pocket"),
    }
    assert expected <= shown


@pytest.mark.parametrize("name", ["bad.json", "broken_eval.json"])
def test_failures_stand_at_the_top_of_both_forms(results, name):
    report = made(results, name)
    words = Page(report.html).words
    place = next(index for index, text in enumerate(words) if "requests FAILED" in text)
    # Before it there are the title twice (of the page and on it) and the heading of the section.
    assert place == 3, words[:6]
    assert "requests FAILED" in report.markdown.split("\n\n")[2]
    assert 'class="alarm"' in report.html
    if name == "bad.json":
        assert "3 of 30 requests FAILED" in words[place]
        assert "Nothing came <for> 5 s." in words
    assert "Nothing failed." not in report.html


def test_a_run_without_failures_says_so_and_one_that_was_stopped_does_not(results):
    assert "Nothing failed." in made(results, "good.json").html
    write_run(bench_run(interrupted=True), results / "stopped.json")
    assert "the run was interrupted" in made(results, "stopped.json").html


def test_a_page_needs_nothing_from_outside_and_its_names_are_its_own(results):
    report = made(results, "good.json", "eval.json")
    page = Page(report.html)
    assert [reference for reference in page.references if not reference.startswith("#")] == []
    assert len(set(page.ids)) == len(page.ids)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "<script" not in report.html
    assert report.html.count("<svg") >= 8


def test_the_same_results_give_the_same_bytes(results):
    assert made(results, "good.json", "eval.json") == made.__wrapped__(results, "good.json", "eval.json")


def test_markdown_links_every_figure_to_its_key(results):
    report = made(results, "good.json", "eval.json")
    links = re.findall(r'\]\((\S+) "(/[^"]*)"\)', report.markdown)
    assert len(links) == len(Page(report.html).figures)
    for file, key in links:
        at(results, re.sub("%20", " ", file), key)
    rows = [line for line in report.markdown.splitlines() if line.startswith("|")]
    for before, line in pairwise(rows):
        if set(line) <= set("|- "):
            assert before.count(" | ") == line.count(" | ")


def test_two_passages_have_no_interval_and_are_too_few_to_tell(tmp_path):
    path = tmp_path / "two.json"
    write_eval(eval_run([True] * 36, num_passages=2), path)
    assert json.loads(path.read_text())["comparison"]["texts"]["perplexity_ratio"]["low"] is None
    words = " ".join(Page(made.__wrapped__(tmp_path, "two.json").html).words)
    assert "Too few to tell." in words
    assert "2 passages are too few to tell: it takes 3 or more" in words


def test_the_verdict_of_an_eval_and_what_was_not_looked_at_are_told(results):
    words = " ".join(Page(made(results, "eval.json").html).words)
    assert "B is worse on facts" in words
    assert "predicting text (perplexity x 1.6487" in words
    assert "lower bound" in words
    assert "ocr did not run: the server takes no images" in words


def test_a_key_to_a_server_is_in_no_file(results):
    assert "secret" not in (results / "eval.json").read_text()


def test_the_roofline_has_the_planners_limit_and_the_measured_point(run_cli, results):
    output = results / "r.html"
    ceiling = ("--model", "qwen3.5-122b-a10b", "--box", "h200")
    result = run_cli("report", results / "good.json", "--output", output, "--title", "My <run>", *ceiling)
    assert result.code == 0, result.err
    page = Page(output.read_text())
    assert page.words[:2] == ["My <run>", "My <run>"]
    assert (results / "r.md").read_text().startswith("# My \\<run\\>\n")
    plan = json.loads(
        run_cli(
            "plan",
            *ceiling[1:2],
            "--box",
            "h200",
            "--speculative-tokens",
            "2",
            "--acceptance",
            "0.75,0.5",
            "--context",
            "74",
            "--json",
        ).out
    )
    limit = plan["projected"][-1]["limit"]["tokens_per_second"]
    assert f"{limit:,.1f}" in page.words
    assert f"{101.26 / limit:.1%}" in page.words
    assert {figure["data-file"] for figure in page.figures} == {"good.json"}


def test_a_point_lies_as_far_below_the_roof_as_the_table_says(results, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "roofline", lambda roofs, points, _: drawn.append((roofs, points)) or "<svg></svg>")
    spec = named_spec("qwen3.5-122b-a10b")
    weights = Weights("a model", "predicted", spec, named_preset("hybrid").weight_bytes(spec))
    ceiling = Ceiling(weights, named_box("h200"), KVFormat.parse("bf16"))
    report = make_report([load(results / "good.json")], "", ceiling)
    ((roofs, points),) = drawn
    ((intensity, rate),) = points.values()
    assert f"{rate / (roofs[0].bytes_per_second * intensity):.1%}" in Page(report.html).words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.json",), "cannot be read"),
        (("text.json",), "is not JSON"),
        (("other.json",), "its format is None"),
        (("damaged.json",), "is damaged"),
        (("good.json", "--output", "r.txt"), "must end in .html"),
        (("good.json", "--bandwidth", "20"), "needs --model"),
        (("good.json", "--model", "qwen3.5-122b-a10b", "--bandwidth", "-1"), "give GB/s above 0"),
    ],
)
def test_wrong_files_and_arguments_are_one_sentence(run_cli, results, monkeypatch, arguments, message):
    (results / "text.json").write_text("hello")
    (results / "other.json").write_text("{}")
    (results / "damaged.json").write_text('{"format": "onebox-eval/1"}')
    monkeypatch.chdir(results)
    result = run_cli("report", *arguments)
    assert result.code == 2
    assert message in result.err
    assert not (results / "report.html").exists()
    with pytest.raises(UnreadableError):
        load(results / "missing.json")


def test_torch_is_never_loaded_and_matplotlib_only_to_draw():
    code = (
        "import sys, onebox.eval.run, onebox.bench.compare, onebox.cli.main\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import onebox.report\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_files_of_one_name_are_told_apart(results):
    (results / "sub").mkdir()
    write_run(bench_run(), results / "sub" / "good.json")
    html = make_report([load(results / "good.json"), load(results / "sub" / "good.json", "sub/good.json")]).html
    assert "sub/good.json" in Page(html).words
