"""Report sections of an `onebox eval` run: failures, verdict, scores by check, predicted texts."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from onebox.report import plots
from onebox.report.document import Block, Cell, Plot, ReportSection, Sentence, Table
from onebox.report.source import ResultFile, pointer

__all__ = ["eval_failures", "eval_sections"]

_SHOWN_FAILURES = 20
_SHOWN_WRONG = 12
_OWN = ("questions/", "pictures/")
_FINER = {
    "valid": "valid JSON",
    "fields": "fields",
    "follows_schema": "follows schema",
    "characters": "characters",
    "criteria": "criteria met",
}


def eval_failures(source: ResultFile) -> Iterator[Block]:
    """Failures, shown before everything else."""
    if source.body["interrupted"]:
        yield Sentence(f"{source.name}: the run was interrupted; the results below are partial.", is_alarm=True)
    failures = source.body["failures"]
    if not failures:
        return
    yield Sentence(
        f"{source.name}: {len(failures)} requests FAILED. They are neither right nor wrong and are in no figure.",
        is_alarm=True,
    )
    kinds: Counter[tuple[str, ...]] = Counter()
    first: dict[tuple[str, ...], str] = {}
    for number, failure in enumerate(failures):
        kind = (failure["side"], str(failure["status"] or "-"), failure["message"], failure["reason"])
        kinds[kind] += 1
        first.setdefault(kind, pointer("failures", number, "reason"))
    rows = [
        (kind[0], source.value(first[kind]), kind[1], str(count), kind[2])
        for kind, count in kinds.most_common(_SHOWN_FAILURES)
    ]
    yield Table(("server", "reason", "status", "times", "for example"), tuple(rows))


def eval_sections(source: ResultFile) -> Iterator[ReportSection]:
    body = source.body
    if body["comparison"]:
        yield ReportSection(f"{source.name}: verdict", tuple(_verdict(source)))
    if any(body["tallies"]):
        yield ReportSection(f"{source.name}: right answers", tuple(_scores(source)))
    if any(body["texts"]):
        yield ReportSection(f"{source.name}: predicted text", tuple(_texts(source)))
    wrong = tuple(_wrong(source))
    if wrong:
        yield ReportSection(f"{source.name}: wrong answers", wrong)
    skipped = [
        Sentence(f"{side['target']['name']}: {what} did not run: {why}", is_note=True)
        for side in body["sides"]
        for what, why in side["skipped"].items()
    ]
    if skipped:
        yield ReportSection(f"{source.name}: not run", tuple(skipped))


def _name(side: dict[str, Any]) -> str:
    server = side["server"] or {}
    return f"{side['target']['name']} ({server.get('model') or side['target']['place']})"


def _point(interval: dict[str, float]) -> plots.Point:
    return plots.Point(interval["estimate"], interval["low"], interval["high"])


def _verdict(source: ResultFile) -> Iterator[Block]:
    comparison = source.body["comparison"]
    is_bad = comparison["outcome"] not in ("no difference seen", "B is better")
    yield Sentence(f"{comparison['outcome'][0].upper()}{comparison['outcome'][1:]}.", is_alarm=is_bad)
    for sentence in comparison["sentences"]:
        yield Sentence(sentence)
    pairs = comparison["pairs"]
    if pairs:
        labels, points = [pair["check"] for pair in pairs], [_point(pair["difference"]) for pair in pairs]
        axis = "share of right answers, B minus A"
        yield Plot(
            plots.intervals(labels, points, axis, 0.0), "With 95% intervals (Tango); a grey interval contains 0."
        )
        yield Table(
            ("check", "pairs", "both right", "only A", "only B", "same text", "B - A", "from", "to", "p (Holm)"),
            tuple(_pair_row(source, number, pair) for number, pair in enumerate(pairs)),
        )
    if comparison["texts"]:
        yield from _text_pair(source)


def _pair_row(source: ResultFile, number: int, pair: dict[str, Any]) -> tuple[Cell, ...]:
    base = pointer("comparison", "pairs", number)
    counts = [source.value(f"{base}/{key}", ",d") for key in ("num_pairs", "both", "only_first", "only_second")]
    shares = [source.value(f"{base}/difference/{key}", "+.1%") for key in ("estimate", "low", "high")]
    return (
        pair["check"],
        *counts,
        source.value(f"{base}/same_text", ",d"),
        *shares,
        source.value(f"{base}/p_value", ".2g"),
    )


def _text_pair(source: ResultFile) -> Iterator[Block]:
    base = "/comparison/texts"
    rows = [
        (title, *(source.value(f"{base}/{key}/{end}", form) for end in ("estimate", "low", "high")))
        for title, key, form in (
            ("perplexity, B / A", "perplexity_ratio", ".4f"),
            ("KL(A||B), nats per token, at least", "divergence", ".5f"),
            ("same top token", "same_likeliest", ".2%"),
        )
    ]
    yield Table(("of all tokens", "seen", "from", "to"), tuple(rows))
    yield Sentence(
        "The divergence is a lower bound: it is computed over the top tokens that both servers list, with all other "
        "tokens merged into one. Intervals (95%) are Student's, over whole passages.",
        is_note=True,
    )


def _scores(source: ResultFile) -> Iterator[Block]:
    sides, tallies = source.body["sides"], source.body["tallies"]
    labels = list(dict.fromkeys(tally["check"] for rows in tallies for tally in rows))
    series = {}
    for side, rows in zip(sides, tallies, strict=True):
        points = {tally["check"]: _point(tally["share"]) for tally in rows if tally["answered"]}
        series[_name(side)] = [points.get(label) for label in labels]
    yield Plot(plots.grouped_bars(labels, series, "share of right answers"), "With 95% intervals (Wilson).")
    rows_made: list[tuple[Cell, ...]] = []
    for number, (side, rows) in enumerate(zip(sides, tallies, strict=True)):
        for index, tally in enumerate(rows):
            base = pointer("tallies", number, index)
            counts = [source.value(f"{base}/{key}", ",d") for key in ("right", "answered", "asked", "cut")]
            shares = [source.value(f"{base}/share/{key}", ".1%") for key in ("estimate", "low", "high")]
            finer = [source.value(base + pointer("scores", key), ".1%") for key in _FINER]
            rows_made.append((_name(side), tally["check"], *counts, *shares, *finer))
    columns = ("server", "check", "right", "answered", "asked", "cut", "share", "from", "to")
    yield Table((*columns, *_FINER.values()), tuple(rows_made))
    if judge := source.body.get("judge"):
        named = (judge["server"] or {}).get("model") or "no server that answered"
        yield Sentence(f"Answers with a rubric were judged by {named} at {judge['target']['place']}.", is_note=True)
    yield from _groups(source)


def _groups(source: ResultFile) -> Iterator[Block]:
    """Scores by subgroup: language, or length and depth."""
    rows: list[tuple[Cell, ...]] = []
    for number, tallies in enumerate(source.body["tallies"]):
        for index, tally in enumerate(tallies):
            for group in tally["groups"]:
                base = pointer("tallies", number, index, "groups", group)
                cells = (source.value(f"{base}/0", ",d"), source.value(f"{base}/1", ",d"))
                rows.append((_name(source.body["sides"][number]), tally["check"], group, *cells))
    if rows:
        yield Table(("server", "check", "of which", "right", "answered"), tuple(rows))


def _texts(source: ResultFile) -> Iterator[Block]:
    sides, texts = source.body["sides"], source.body["texts"]
    kinds = list(dict.fromkeys(kind for text in texts if text for kind in text["kinds"]))
    series: dict[str, list[plots.Point | None]] = {}
    rows: list[tuple[Cell, ...]] = []
    for number, (side, text) in enumerate(zip(sides, texts, strict=True)):
        if not text:
            continue
        values = [text["kinds"].get(kind) for kind in kinds]
        series[_name(side)] = [None if value is None else plots.Point(value, value, value) for value in values]
        base = pointer("texts", number)
        ends = [source.value(f"{base}/perplexity/{end}", ".3f") for end in ("estimate", "low", "high")]
        counts = [source.value(f"{base}/{key}", ",d") for key in ("passages", "tokens")]
        by_kind = [source.value(base + pointer("kinds", kind), ".3f") for kind in kinds]
        rows.append((_name(side), *counts, *ends, source.value(f"{base}/bits_per_byte", ".4f"), *by_kind))
    yield Plot(plots.grouped_bars(kinds, series, "perplexity per token", is_log=True), "By kind of text.")
    yield Table(("server", "passages", "tokens", "perplexity", "from", "to", "bits per byte", *kinds), tuple(rows))


def _wrong(source: ResultFile) -> Iterator[Block]:
    """A few wrong answers of each server, as examples; those to the user's own questions first."""
    for number, side in enumerate(source.body["sides"]):
        rows: list[tuple[Cell, ...]] = []
        replies = sorted(enumerate(side["replies"]), key=lambda one: not one[1]["question_id"].startswith(_OWN))
        for index, reply in replies:
            judgement = reply["judgement"]
            if judgement and not judgement["right"] and len(rows) < _SHOWN_WRONG:
                base = pointer("sides", number, "replies", index)
                rows.append((_name(side), source.value(f"{base}/question_id"), source.value(f"{base}/judgement/why")))
        if rows:
            yield Table(("server", "question", "what is wrong"), tuple(rows))
