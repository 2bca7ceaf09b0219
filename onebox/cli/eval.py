"""`onebox eval`: the same questions to one server or two, and a verdict that says how sure it is."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.spec.errors import OneboxError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from onebox.eval.compared import Pair
    from onebox.eval.run import EvalRun, Evaluation
    from onebox.eval.verdict import Comparison

__all__ = ["eval_command", "render"]

WIDTH = 110
FAILED, WORSE = 1, 3
"""Exit codes; 0 is for a run without failures that saw no loss, 2 for wrong arguments."""
SHOWN_FAILURES = 12
_CHECKS = ("facts", "languages", "invoices", "schema", "tools", "keys", "ocr", "likelihood")


def eval_command(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="A server's address, a checkpoint directory to serve, or the word pocket."),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="The same, to be held against A. Without it A is only scored.")
    ] = None,
    checks: Annotated[str, typer.Option(help=f"What to look at, of {', '.join(_CHECKS)}.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="Generated questions: invoices, schema, tools, ocr, each.")] = 24,
    lengths: Annotated[str, typer.Option(help="Prompts in which a key is hidden, in tokens.")] = "1024,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Hidden keys for each length and each of three depths.")] = 3,
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file to predict in place of the passages that ship; repeatable.")
    ] = None,
    top_logprobs: Annotated[int, typer.Option(min=1, max=20, help="Likeliest tokens compared at each place.")] = 20,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the models think before they answer.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions asked at once.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Another seed makes other questions.")] = 1,
    serve_a: Annotated[
        str, typer.Option(help='For directory A: arguments of `onebox serve`, "--kv-cache-dtype fp8".')
    ] = "",
    serve_b: Annotated[str, typer.Option(help="The same for directory B.")] = "",
    model_a: Annotated[str | None, typer.Option(help="Which of A's models; the first it lists unless told.")] = None,
    model_b: Annotated[str | None, typer.Option(help="Which of B's models.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ONEBOX_API_KEY", help="Sent to servers given by address.")
    ] = None,
    stall: Annotated[
        float, typer.Option(min=0.1, help="Seconds without an event after which a stream has stalled.")
    ] = 120,
    output: Annotated[Path | None, typer.Option(help="JSON file for all questions, answers and figures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Ask one or two servers the same questions and say, with confidence, whether B is worse than A.

    Exit code: 0 no loss seen, 1 something failed, 2 wrong arguments, 3 B is worse.
    """
    from onebox.eval.run import EvalSettings, EvalTarget, Evaluation
    from onebox.eval.target import refuse_wrong_target

    sides = [("A", first, serve_a, model_a)] + ([("B", second, serve_b, model_b)] if second else [])
    if not second and (serve_b or model_b):
        raise UsageError("--serve-b and --model-b speak of B, and no B is given.")
    for _, place, arguments, _ in sides:
        refuse_wrong_target(place, arguments)
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: the directory {output.parent} is not there.")
    settings = EvalSettings(
        checks=_chosen(checks),
        count=count,
        lengths=_lengths(lengths),
        repeats=repeats,
        seed=seed,
        concurrency=concurrency,
        thinking=thinking,
        num_top=top_logprobs,
        texts=tuple(map(str, text or ())),
        stall_s=stall,
    )
    targets = [EvalTarget(name, place, arguments, api_key, model) for name, place, arguments, model in sides]
    _carry_out(Evaluation(targets, settings), output, as_json)


def _carry_out(evaluation: "Evaluation", output: Path | None, as_json: bool) -> None:
    """Runs it, shows and keeps what came of it, and leaves with the exit code."""
    from onebox.eval.run import write_eval

    stopped: BaseException | None = None
    with _progress() as report:
        try:
            evaluation.run(report)
        except (KeyboardInterrupt, OneboxError) as error:
            if not evaluation.has_answers:
                raise
            # What came so far is shown and kept; the exit code says that it is not all.
            stopped = error
    run = evaluation.result([Path(sys.argv[0]).name, *sys.argv[1:]], interrupted=stopped is not None)
    _print(render(run))
    if output is not None:
        write_eval(run, output)
        typer.echo(f"All questions and answers are in {output}.", err=as_json)
    if as_json:
        typer.echo(json.dumps(summary(run)))
    if stopped is not None:
        raise stopped
    raise typer.Exit(exit_code(run))


def _chosen(checks: str) -> tuple[str, ...]:
    names = _CHECKS if checks == "all" else tuple(name.strip() for name in checks.split(",") if name.strip())
    for name in names:
        if name not in _CHECKS:
            raise UsageError(f"--checks holds {name!r}; the checks are {', '.join(_CHECKS)}.")
    if not names:
        raise UsageError(f"--checks is empty; the checks are {', '.join(_CHECKS)}.")
    return names


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--lengths {text!r} is not a list of whole numbers; give for instance 1024,8192.") from None
    if any(length < 256 for length in found):
        raise UsageError(f"--lengths {text!r} holds less than 256 tokens, in which nothing can be hidden.")
    return found


def exit_code(run: "EvalRun") -> int:
    from onebox.eval.verdict import ComparisonOutcome

    if not run.is_success:
        return FAILED
    worse = (ComparisonOutcome.WORSE, ComparisonOutcome.MIXED)
    return WORSE if run.comparison is not None and run.comparison.outcome in worse else 0


def summary(run: "EvalRun") -> dict[str, object]:
    """The run in one line: what a script wants to know."""
    return {
        "failures": len(run.failures),
        "interrupted": run.interrupted,
        "outcome": run.comparison.outcome.value if run.comparison else None,
        "right": [{tally.check: [tally.right, tally.answered] for tally in tallies} for tallies in run.tallies],
        "perplexity": [text.perplexity.estimate if text else None for text in run.texts],
    }


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """One bar at a time, on stderr; without a terminal nothing."""
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


def _print(lines: "Sequence[RenderableType]") -> None:
    from rich.console import Console

    console = Console() if Console().is_terminal else Console(width=WIDTH)
    for line in lines:
        console.print(line)


def render(run: "EvalRun") -> "list[RenderableType]":
    """For people: failures first, then what each server scored, then the verdict."""
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
            lines += [Text("\nB held against A", style="bold cyan"), _pair_table(comparison.pairs)]
        lines += _comparison_lines(comparison)
    return lines


def _failure_lines(run: "EvalRun") -> "list[RenderableType]":
    from collections import Counter

    from rich.text import Text

    lines: list[RenderableType] = []
    if run.interrupted:
        lines.append(Text("Stopped before the end: what follows is a part.", style="bold red"))
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
    interval = f"{found.perplexity.low:.2f} to {found.perplexity.high:.2f}"
    kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in found.kinds.items())
    return [
        Text(
            f"perplexity {found.perplexity.estimate:.3f} ({interval} over {found.passages} passages, "
            f"{found.tokens:,} tokens), {found.bits_per_byte:.4f} bits a byte; {kinds}"
        )
    ]


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
                f"perplexity B / A {ratio.estimate:.4f} ({ratio.low:.4f} to {ratio.high:.4f}), p {texts.p_value:.2g}; "
                f"KL(A||B) {kl.estimate:.5f} nats a token ({kl.low:.5f} to {kl.high:.5f}); "
                f"same likeliest token {same.estimate:.2%} ({same.low:.2%} to {same.high:.2%})"
            )
        )
        lines.append(
            Text("KL: a lower bound, over the likeliest tokens that both name, all others as one.", style="dim")
        )
        if texts.other_tokens:
            lines.append(Text(f"{texts.other_tokens} passages have other tokens and are left out.", style="yellow"))
    colour = {"no difference seen": "green", "B is better": "green"}.get(comparison.outcome.value, "red")
    lines.append(Text(f"\nVerdict: {comparison.outcome.value}", style=f"bold {colour}"))
    return lines + [Text(sentence) for sentence in comparison.sentences]
