"""Terminal output of `onebox eval`: progress bars during the run, tables after it. Failures always come first."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from onebox.bench.statistics import Interval
    from onebox.eval.compared import Pair
    from onebox.eval.run import EvalRun
    from onebox.eval.verdict import Comparison

__all__ = ["bars", "render", "show"]

WIDTH = 110
SHOWN_FAILURES = 12


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """One bar at a time, on stderr; no output without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, object] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)  # type: ignore[arg-type]

        yield report


def show(run: "EvalRun") -> None:
    """Prints the complete report on stdout."""
    from rich.console import Console

    console = Console() if Console().is_terminal else Console(width=WIDTH)
    for line in render(run):
        console.print(line)


def render(run: "EvalRun") -> "list[RenderableType]":
    """Failures first, then each server's scores, then the verdict."""
    from rich.text import Text

    lines: list[RenderableType] = [*_failure_lines(run)]
    for side, target in enumerate(run.sides):
        server = target["server"]
        named = f"{server['model']} at {server['url']}, {server['kind']} {server['version']}" if server else "no answer"
        given = target["target"]
        lines.append(Text.assemble((f"\n{given['name']} ", "bold"), f"{given['place']} ({named})"))
        lines += [Text(f"not run: {what}: {why}", style="yellow") for what, why in target["skipped"].items()]
        if run.tallies[side]:
            lines.append(_score_table(run, side))
        lines += _text_lines(run, side)
    comparison = run.comparison
    if comparison is not None:
        if comparison.pairs:
            lines += [Text("\nB compared with A", style="bold cyan"), _pair_table(comparison.pairs)]
        lines += _comparison_lines(comparison)
    return lines


def _failure_lines(run: "EvalRun") -> "list[RenderableType]":
    from collections import Counter

    from rich.text import Text

    lines: list[RenderableType] = []
    if run.interrupted:
        lines.append(Text("Interrupted: the results below are partial.", style="bold red"))
    if run.failures:
        lines.append(Text(f"{len(run.failures)} requests FAILED, neither right nor wrong:", style="bold red"))
        kinds = Counter((one["side"], one["reason"], one["status"], one["message"]) for one in run.failures)
        for (side, reason, status, message), number in kinds.most_common(SHOWN_FAILURES):
            shown = f" (status {status})" if status else ""
            lines.append(Text(f"  {number} x {side}: {reason}{shown}: {message}", style="red"))
        if len(kinds) > SHOWN_FAILURES:
            lines.append(Text(f"  and {len(kinds) - SHOWN_FAILURES} other kinds; --output has them all", style="red"))
    return lines


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _score_table(run: "EvalRun", side: int) -> "Table":
    table = _table("check", "right", "of", "failed", "cut", "share", "95% interval", "finer")
    for tally in run.tallies[side]:
        finer = ", ".join(f"{key.replace('_', ' ')} {value:.1%}" for key, value in tally.scores.items())
        is_known = tally.answered > 0
        table.add_row(
            tally.check,
            str(tally.right),
            str(tally.answered),
            str(tally.asked - tally.answered) if tally.asked > tally.answered else "",
            str(tally.cut or ""),
            f"{tally.share.estimate:.1%}" if is_known else "-",
            f"{tally.share.low:.1%} to {tally.share.high:.1%}" if is_known else "-",
            finer,
            style="bold" if tally is run.tallies[side][-1] else "",
        )
    return table


def _text_lines(run: "EvalRun", side: int) -> "list[RenderableType]":
    from rich.text import Text

    found = run.texts[side]
    if found is None:
        return []
    interval = _ends(found.perplexity, ".2f")
    kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in found.kinds.items())
    return [
        Text(
            f"perplexity {found.perplexity.estimate:.3f} ({interval}; {found.passages} passages, "
            f"{found.tokens:,} tokens), {found.bits_per_byte:.4f} bits per byte; {kinds}"
        )
    ]


def _known(value: float, form: str) -> str:
    """A figure, or a dash if it could not be computed."""
    return "-" if math.isnan(value) else format(value, form)


def _ends(interval: "Interval", form: str) -> str:
    if math.isnan(interval.low):
        return "too few for an interval"
    return f"{interval.low:{form}} to {interval.high:{form}}"


def _pair_table(pairs: "Sequence[Pair]") -> "Table":
    table = _table("check", "pairs", "both right", "only A", "only B", "same text", "B - A", "95% interval", "p")
    for pair in pairs:
        table.add_row(
            pair.check,
            str(pair.num_pairs),
            str(pair.both),
            str(pair.only_first),
            str(pair.only_second),
            str(pair.same_text),
            f"{pair.difference.estimate:+.1%}",
            f"{pair.difference.low:+.1%} to {pair.difference.high:+.1%}",
            f"{pair.p_value:.2g}",
            style="bold" if pair is pairs[-1] else "",
        )
    return table


def _comparison_lines(comparison: "Comparison") -> "list[RenderableType]":
    from rich.text import Text

    lines: list[RenderableType] = []
    texts = comparison.texts
    if texts is not None:
        ratio, kl, same = texts.perplexity_ratio, texts.divergence, texts.same_likeliest
        lines.append(
            Text(
                f"perplexity B / A {ratio.estimate:.4f} ({_ends(ratio, '.4f')}), p {_known(texts.p_value, '.2g')}; "
                f"KL(A||B) {kl.estimate:.5f} nats per token ({_ends(kl, '.5f')}); "
                f"same top token {same.estimate:.2%} ({_ends(same, '.2%')})"
            )
        )
        lines.append(
            Text("KL: a lower bound, over the top tokens that both list, all others merged into one.", style="dim")
        )
        if texts.other_tokens:
            lines.append(
                Text(f"{texts.other_tokens} passages are tokenized differently and are excluded.", style="yellow")
            )
    colours = {"no difference seen": "green", "B is better": "green", "too few to tell": "yellow"}
    colour = colours.get(comparison.outcome.value, "red")
    lines.append(Text(f"\nVerdict: {comparison.outcome.value}", style=f"bold {colour}"))
    return lines + [Text(sentence) for sentence in comparison.sentences]
