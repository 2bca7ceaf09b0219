"""The pocket model's recipe as stages: what is done is skipped, what was stopped goes on.

Everything lies below one working directory: the text as tokens, the run that was trained, the model, its evaluation. A
stage is done when its last files are there; before a stage runs, those of all later stages are taken away. So the
directory may be carried from a machine with Debian's packages to one with a GPU and back.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onebox.model.random_text import text_files
from onebox.spec.errors import OneboxError, UnsupportedError
from onebox.spec.model import read_json
from recipes.pocket import evaluate, export, prepare, train
from recipes.pocket.command import say
from recipes.pocket.data.token_files import INDEX

__all__ = ["STAGES", "Stage", "Work", "missed", "run_stages", "stages", "toy_stages"]

STAGES = ("prepare", "train", "export", "evaluate")
_FINISHED = "finished"
_TOY_SIZES = evaluate.Sizes(
    num_examples=1,
    num_served=1,
    recall_lengths=(256,),
    num_keys=1,
    num_texts=1,
    num_right_answers=1,
    num_compared=1,
    passage_tokens=512,
    max_tokens=4,
    builds=(),
    num_build_examples=1,
)


@dataclass(frozen=True)
class Stage:
    """One step of the recipe."""

    name: str
    outputs: tuple[Path, ...]
    """Files that are there when the stage is done."""
    run: Callable[[], None]
    check: Callable[[], None] = lambda: None
    """Refuses, before anything runs, what this machine cannot do."""
    halfway: Path | None = None
    """The directory that a stopped run goes on from."""

    @property
    def is_done(self) -> bool:
        return all(path.exists() for path in self.outputs)


@dataclass(frozen=True)
class Work:
    """Where everything goes."""

    directory: Path

    @property
    def trained(self) -> Path:
        return self.directory / "trained"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def evaluation(self) -> Path:
        return self.directory / "evaluation.json"


def run_stages(recipe: Sequence[Stage], again_from: str | None = None, until: str | None = None) -> list[str]:
    """Runs the first stage that is not done, or `again_from`, and those after it; the names of the stages that ran."""
    done = 0
    while done < len(recipe) and recipe[done].is_done and recipe[done].name != again_from:
        say(f"{recipe[done].name} is done already")
        done += 1
    names = [stage.name for stage in recipe]
    last = names.index(until) if until else len(recipe) - 1
    pending = recipe[done : last + 1]
    for stage in pending:
        stage.check()
    if pending:
        _forget(recipe[done:], is_anew=again_from == pending[0].name)
    for stage in pending:
        say(f"{stage.name} begins")
        stage.run()
    return [stage.name for stage in pending]


def _forget(later: Sequence[Stage], *, is_anew: bool) -> None:
    """Takes away what will not be true any more; the first stage's halfway work only if it shall begin anew."""
    for number, stage in enumerate(later):
        for path in stage.outputs:
            path.unlink(missing_ok=True)
        if stage.halfway and (number > 0 or is_anew):
            shutil.rmtree(stage.halfway, ignore_errors=True)


def stages(work: Work, packages: Path, minutes: float) -> list[Stage]:
    """The real recipe. Its first stage needs Debian's apt, its second a GPU."""
    text = (work.directory / INDEX, work.model / "tokenizer.json")
    options = ["--minutes", str(minutes), "--data", str(work.directory), "--model", str(work.model)]
    return [
        Stage("prepare", text, lambda: _prepare(work, packages)),
        _train_stage(work, options, lambda: _require_gpu(work.directory)),
        Stage("export", _artefact(work), lambda: export.export(work.trained, work.model, work.directory)),
        Stage("evaluate", (work.evaluation,), lambda: _evaluate(work, evaluate.FULL)),
    ]


def toy_stages(work: Work, minutes: float) -> list[Stage]:
    """The same with a tiny model and no text: shows on any machine, in a minute, that the stages fit together."""
    return [
        Stage("prepare", (work.model / "tokenizer.json",), lambda: _write_toy_text(work.model)),
        _train_stage(work, ["--minutes", str(minutes), "--toy"]),
        Stage("export", _artefact(work), lambda: export.export(work.trained, work.model)),
        Stage("evaluate", (work.evaluation,), lambda: _evaluate(work, _TOY_SIZES)),
    ]


def missed(work: Work) -> list[str]:
    """What the model was asked to reach and did not, by the evaluation that is there."""
    return [
        f"{claim['what']}: {claim['found']:.1%} of {claim['num']}, and at least {claim['least']:.0%} was asked"
        for claim in read_json(work.evaluation)["claims"]
        if not claim["holds"]
    ]


def _artefact(work: Work) -> tuple[Path, ...]:
    return work.model / "model.safetensors", work.model / "README.md"


def _prepare(work: Work, packages: Path) -> None:
    index = prepare.prepare(packages, work.directory, work.model)
    say(f"{sum(source['tokens'] for source in index.values()):,} tokens of text")


def _write_toy_text(model: Path) -> None:
    model.mkdir(parents=True, exist_ok=True)
    for name, text in text_files().items():
        (model / name).write_text(text, encoding="utf-8")


def _train_stage(work: Work, options: list[str], check: Callable[[], None] = lambda: None) -> Stage:
    def run() -> None:
        code = train.main([*options, "--out", str(work.trained), "--resume"])
        if code:
            raise StoppedError(code)
        (work.trained / _FINISHED).touch()

    return Stage("train", (work.trained / _FINISHED,), run, check, work.trained)


def _require_gpu(data: Path) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"Training needs a GPU and there is none here: make the text with `--until prepare`, carry {data} to a "
            "machine with a GPU and go on there with the same command, or try the recipe with `--toy`."
        )
    if importlib.util.find_spec("fla") is None and not any((data / "wheels").glob("fla_core-*.whl")):
        raise UnsupportedError(
            "Training within minutes needs fla's kernels: `pip install --no-deps fla-core einops`, or `pip download "
            f"--no-deps fla-core einops -d {data / 'wheels'}` where nothing can be installed."
        )


def _evaluate(work: Work, sizes: evaluate.Sizes) -> None:
    evaluate.write(evaluate.evaluate(work.model, work.directory, evaluate.KV_FORMATS, sizes), work.directory)
    say(f"the tables are in {work.evaluation.with_suffix('.md')}")


class StoppedError(OneboxError):
    """A stage that said itself why it stopped."""

    def __init__(self, code: int) -> None:
        super().__init__("The recipe stopped there; the same command goes on.")
        self.exit_code = code
