"""`onebox eval`: the same questions to one or two servers, and a verdict with its confidence."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.options import grouped, option_group
from onebox.spec.errors import OneboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onebox.eval.run import EvalRun, EvalSettings, EvalTarget, Evaluation

__all__ = ["eval_command"]

FAILED, WORSE, UNTOLD = 1, 3, 4
"""Exit codes; 0: no failures and no loss seen; 2: wrong arguments."""
_CHECKS = ("facts", "languages", "invoices", "schema", "tools", "keys", "ocr", "scans", "likelihood")
_OWN = ("questions", "pictures")
"""Checks of the user's own, which an option of the same name gives."""


@option_group("Questions")
class QuestionOptions:
    """The checks and their settings."""

    checks: Annotated[
        str,
        typer.Option(help=f"Checks to run, of {', '.join(_CHECKS)}; questions or pictures alone: only your own."),
    ] = "all"
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Your own questions, one JSON object a line, run beside the checks; docs/eval.md has the format."
        ),
    ] = None
    pictures: Annotated[
        Path | None,
        typer.Option(help="A directory of your own images, each with NAME.json (fields) or NAME.txt (text)."),
    ] = None
    count: Annotated[
        int,
        typer.Option(min=1, help="Number of questions of each generated check: invoices, schema, tools, ocr, scans."),
    ] = 24
    lengths: Annotated[str, typer.Option(help="Prompt lengths for the hidden keys, in tokens.")] = "1024,4096"
    repeats: Annotated[int, typer.Option(min=1, help="Hidden keys for each length and each of three depths.")] = 3
    text: Annotated[
        list[Path] | None, typer.Option(help="A text file to predict instead of the built-in passages; repeatable.")
    ] = None
    top_logprobs: Annotated[int, typer.Option(min=1, max=20, help="Top tokens compared at each position.")] = 20
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the models think before they answer.")] = False
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent questions.")] = 4
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated questions.")] = 1

    def refuse_beside_saved(self) -> None:
        """A saved result brings its own questions."""
        defaults = type(self)()
        given = [name for name in vars(self) if (getattr(self, name) or None) != (getattr(defaults, name) or None)]
        given = [name for name in given if name != "concurrency"]
        if given:
            named = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{named} cannot be given beside a saved result, which brings its questions.")

    def settings(self, stall_s: float) -> "EvalSettings":
        from onebox.eval.run import EvalSettings

        return EvalSettings(
            checks=_chosen(self.checks, {"questions": self.questions, "pictures": self.pictures}),
            count=self.count,
            lengths=_lengths(self.lengths),
            repeats=self.repeats,
            seed=self.seed,
            concurrency=self.concurrency,
            thinking=self.thinking,
            num_top=self.top_logprobs,
            texts=tuple(map(str, self.text or ())),
            questions=str(self.questions or ""),
            pictures=str(self.pictures or ""),
            stall_s=stall_s,
        )


@option_group("Servers")
class TargetOptions:
    """How A and B are served and accessed."""

    serve_a: Annotated[
        str, typer.Option(help='For directory A: arguments of `onebox serve`, "--kv-cache-dtype fp8".')
    ] = ""
    serve_b: Annotated[str, typer.Option(help="The same for directory B.")] = ""
    model_a: Annotated[str | None, typer.Option(help="Model name on A; default: the first listed.")] = None
    model_b: Annotated[str | None, typer.Option(help="Model name on B.")] = None
    api_key: Annotated[str | None, typer.Option(envvar="ONEBOX_API_KEY", help="API key for servers given by URL.")] = (
        None
    )
    judge: Annotated[
        str | None,
        typer.Option(help="The server that judges answers by a rubric: a URL, a directory to serve, or pocket."),
    ] = None
    judge_model: Annotated[str | None, typer.Option(help="Model name on the judge; default: the first listed.")] = None
    judge_api_key: Annotated[str | None, typer.Option(envvar="ONEBOX_JUDGE_API_KEY", help="The judge's API key.")] = (
        None
    )
    stall: Annotated[
        float, typer.Option(min=0.1, help="Seconds without an event after which a stream counts as stalled.")
    ] = 120

    def targets(self, first: str, second: str | None) -> "list[EvalTarget]":
        from onebox.eval.run import EvalTarget
        from onebox.eval.target import refuse_wrong_target

        if not second and (self.serve_b or self.model_b):
            raise UsageError("--serve-b and --model-b need B, which is not given.")
        found = [EvalTarget("A", first, self.serve_a, self.api_key, self.model_a)]
        if second:
            found.append(EvalTarget("B", second, self.serve_b, self.api_key, self.model_b))
        for target in found:
            refuse_wrong_target(target.place, target.serve_arguments)
        return found

    def judging(self) -> "EvalTarget | None":
        """The server that judges by rubrics, if one is given."""
        from onebox.eval.run import EvalTarget
        from onebox.eval.target import refuse_wrong_target

        if self.judge is None:
            if self.judge_model:
                raise UsageError("--judge-model needs --judge, which is not given.")
            return None
        refuse_wrong_target(self.judge, "")
        return EvalTarget("judge", self.judge, "", self.judge_api_key, self.judge_model)


@grouped
def eval_command(
    questions: QuestionOptions,
    servers: TargetOptions,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A server's URL, a checkpoint to serve (directory or hub id), pocket, or a result of --output.",
        ),
    ],
    second: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The same for B, which is compared with A. Without B, A is only scored."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for all questions, answers and figures.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON and nothing else; tables go to stderr.")
    ] = False,
) -> None:
    """Send the same questions to one or two servers and test whether B is worse than A.

    Exit code: 0 no loss seen, 1 something failed, 2 wrong arguments, 3 B is worse, 4 too few questions or passages to
    tell, or none that could show a loss.
    """
    from onebox.eval.run import Evaluation
    from onebox.eval.saved import is_saved

    targets = servers.targets(first, second)
    if any(is_saved(target.place) for target in targets):
        questions.refuse_beside_saved()
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: the directory {output.parent} does not exist.")
    _carry_out(Evaluation(targets, questions.settings(servers.stall), servers.judging()), output, as_json)


def _carry_out(evaluation: "Evaluation", output: Path | None, as_json: bool) -> None:
    """Runs the evaluation, shows and writes the results, and exits with the exit code."""
    from onebox.cli import eval_view
    from onebox.eval.run import write_eval

    stopped: BaseException | None = None
    with eval_view.bars() as report:
        try:
            evaluation.run(report)
        except (KeyboardInterrupt, OneboxError) as error:
            if not evaluation.has_answers:
                raise
            # Partial results are shown and written; the exit code marks them as incomplete.
            stopped = error
    run = evaluation.result([Path(sys.argv[0]).name, *sys.argv[1:]], interrupted=stopped is not None)
    eval_view.show(run)
    if output is not None:
        write_eval(run, output)
        typer.echo(f"All questions and answers are in {output}.")
    if as_json:
        echo_json(summary(run))
    if stopped is not None:
        raise stopped
    raise typer.Exit(exit_code(run))


def _chosen(checks: str, own: "Mapping[str, Path | None]") -> tuple[str, ...]:
    """The named checks, and those that are the user's own."""
    names = _CHECKS if checks == "all" else tuple(name.strip() for name in checks.split(",") if name.strip())
    for name in names:
        if name not in (*_CHECKS, *_OWN):
            raise UsageError(f"--checks holds {name!r}; the checks are {', '.join((*_CHECKS, *_OWN))}.")
        if name in own and not own[name]:
            raise UsageError(f"--checks holds {name!r}, which --{name} gives; it is not given.")
    if not names:
        raise UsageError(f"--checks is empty; the checks are {', '.join((*_CHECKS, *_OWN))}.")
    return tuple(dict.fromkeys((*names, *(name for name, given in own.items() if given))))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--lengths {text!r} is not a list of whole numbers; give for instance 1024,8192.") from None
    if any(length < 256 for length in found):
        raise UsageError(f"--lengths {text!r} holds less than 256 tokens, too short to hide a key.")
    return found


def exit_code(run: "EvalRun") -> int:
    from onebox.eval.verdict import ComparisonOutcome

    if not run.is_success:
        return FAILED
    codes = {
        ComparisonOutcome.WORSE: WORSE,
        ComparisonOutcome.MIXED: WORSE,
        ComparisonOutcome.TOO_FEW: UNTOLD,
        ComparisonOutcome.UNKNOWN: UNTOLD,
    }
    return codes.get(run.comparison.outcome, 0) if run.comparison else 0


def summary(run: "EvalRun") -> dict[str, object]:
    """The run in one line of JSON, for scripts."""
    return {
        "failures": len(run.failures),
        "interrupted": run.interrupted,
        "outcome": run.comparison.outcome.value if run.comparison else None,
        "right": [{tally.check: [tally.right, tally.answered] for tally in tallies} for tallies in run.tallies],
        "perplexity": [text.perplexity.estimate if text else None for text in run.texts],
    }
