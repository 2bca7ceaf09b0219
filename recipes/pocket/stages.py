"""The recipe as a list of stages. Finished stages are skipped; an interrupted training run resumes.

All files are below one working directory: token files, the training checkpoint, the model, its evaluation. A stage is
finished when all of its output files exist. Before a stage runs, the outputs of that stage and of all later ones are
deleted. So the directory can be copied from a machine with Debian's packages to one with a GPU and back.
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
from recipes.pocket import evaluate, export, prepare, see, train
from recipes.pocket.command import log_progress
from recipes.pocket.data.tokens import INDEX
from recipes.pocket.pictures.fonts import CHARACTER_INDEX, make_fonts

__all__ = ["STAGES", "RecipeStage", "WorkDirectory", "missed_claims", "pocket_stages", "run_stages", "toy_stages"]

STAGES = ("prepare", "train", "see", "export", "evaluate")
_FINISHED = "finished"


@dataclass(frozen=True)
class RecipeStage:
    """One stage of the recipe."""

    name: str
    outputs: tuple[Path, ...]
    """The stage is finished when all of these files exist."""
    run: Callable[[], None]
    check: Callable[[], None] = lambda: None
    """Raises, before any stage runs, if this machine cannot run the stage."""
    resume_from: Path | None = None
    """The directory from which an interrupted run resumes."""

    @property
    def is_finished(self) -> bool:
        return all(path.exists() for path in self.outputs)


@dataclass(frozen=True)
class WorkDirectory:
    """Paths inside the working directory."""

    directory: Path

    @property
    def trained(self) -> Path:
        return self.directory / "trained"

    @property
    def seen(self) -> Path:
        return self.directory / "seen"

    @property
    def fonts(self) -> Path:
        return self.directory / "fonts"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def evaluation(self) -> Path:
        return self.directory / "evaluation.json"


def run_stages(recipe: Sequence[RecipeStage], again_from: str | None = None, until: str | None = None) -> list[str]:
    """Runs the first unfinished stage, or `again_from`, and all after it up to `until`; returns the names that ran."""
    num_finished = 0
    while num_finished < len(recipe) and recipe[num_finished].is_finished and recipe[num_finished].name != again_from:
        log_progress(f"{recipe[num_finished].name} is already finished")
        num_finished += 1
    names = [stage.name for stage in recipe]
    last = names.index(until) if until else len(recipe) - 1
    pending = recipe[num_finished : last + 1]
    for stage in pending:
        stage.check()
    if pending:
        _delete_outputs(recipe[num_finished:], restart=again_from == pending[0].name)
    for stage in pending:
        log_progress(f"{stage.name} starts")
        stage.run()
    return [stage.name for stage in pending]


def _delete_outputs(stages: Sequence[RecipeStage], *, restart: bool) -> None:
    """Deletes the outputs of `stages`. The first stage keeps its checkpoint to resume from, unless it restarts."""
    for number, stage in enumerate(stages):
        for path in stage.outputs:
            path.unlink(missing_ok=True)
        if stage.resume_from and (number > 0 or restart):
            shutil.rmtree(stage.resume_from, ignore_errors=True)


def pocket_stages(
    work: WorkDirectory, packages: Path, minutes: float, seeing_minutes: float, start: Path | None = None
) -> list[RecipeStage]:
    """The real recipe. The first stage needs Debian's apt, the next two a GPU.

    With `start`, that text model is taken, with its tokenizer, instead of training one.
    """
    text = (work.directory / INDEX, work.model / "tokenizer.json", work.fonts / "held-out" / CHARACTER_INDEX)
    options = ["--data", str(work.directory), "--model", str(work.model)]
    train = _train_stage(work, ["--minutes", str(minutes), *options], lambda: _require_gpu(work.directory))
    return [
        RecipeStage("prepare", text, lambda: _prepare(work, packages, start)),
        *([] if start else [train]),
        _see_stage(work, ["--minutes", str(seeing_minutes), *options], lambda: _require_gpu(work.directory), start),
        RecipeStage("export", _artefact(work), lambda: export.export(work.seen, work.model, work.directory)),
        RecipeStage("evaluate", (work.evaluation,), lambda: _evaluate(work, evaluate.FULL)),
    ]


def toy_stages(work: WorkDirectory, minutes: float) -> list[RecipeStage]:
    """The same stages with a tiny model and no text: a one-minute test on any machine."""
    return [
        RecipeStage("prepare", (work.model / "tokenizer.json",), lambda: _write_toy_text_files(work.model)),
        _train_stage(work, ["--minutes", str(minutes), "--toy"]),
        _see_stage(work, ["--minutes", str(minutes), "--toy", "--data", str(work.directory)]),
        RecipeStage("export", _artefact(work), lambda: export.export(work.seen, work.model)),
        RecipeStage("evaluate", (work.evaluation,), lambda: _evaluate(work, evaluate.TOY)),
    ]


def missed_claims(work: WorkDirectory) -> list[str]:
    """The requirements that the model missed, read from its evaluation."""
    return [
        f"{claim['what']}: {claim['found']:.1%} of {claim['num']}; required: at least {claim['least']:.0%}"
        for claim in read_json(work.evaluation)["claims"]
        if not claim["holds"]
    ]


def _artefact(work: WorkDirectory) -> tuple[Path, ...]:
    return work.model / "model.safetensors", work.model / "README.md"


def _prepare(work: WorkDirectory, packages: Path, tokenizer_of: Path | None) -> None:
    num_fonts = make_fonts(packages, work.fonts)
    log_progress(f"{num_fonts} fonts to draw pictures with")
    index = prepare.prepare(packages, work.directory, work.model, tokenizer_of)
    log_progress(f"{sum(source['tokens'] for source in index.values()):,} tokens of text")


def _write_toy_text_files(model: Path) -> None:
    model.mkdir(parents=True, exist_ok=True)
    for name, text in text_files().items():
        (model / name).write_text(text, encoding="utf-8")


def _train_stage(work: WorkDirectory, options: list[str], check: Callable[[], None] = lambda: None) -> RecipeStage:
    def run() -> None:
        _finish(work.trained, train.main([*options, "--out", str(work.trained), "--resume"]))

    return RecipeStage("train", (work.trained / _FINISHED,), run, check, work.trained)


def _see_stage(
    work: WorkDirectory, options: list[str], check: Callable[[], None] = lambda: None, start: Path | None = None
) -> RecipeStage:
    def run() -> None:
        begin = ["--start", str(start or work.trained), "--out", str(work.seen), "--resume"]
        _finish(work.seen, see.main([*options, *begin]))

    return RecipeStage("see", (work.seen / _FINISHED,), run, check, work.seen)


def _finish(directory: Path, exit_code: int) -> None:
    if exit_code:
        raise TrainingStoppedError(exit_code)
    (directory / _FINISHED).touch()


def _require_gpu(data: Path) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"Training needs a GPU and this machine has none: prepare the text with `--until prepare`, copy {data} to "
            "a machine with a GPU and run the same command there, or try the recipe with `--toy`."
        )
    if importlib.util.find_spec("fla") is None and not any((data / "wheels").glob("fla_core-*.whl")):
        raise UnsupportedError(
            "Training within minutes needs fla's kernels: `pip install --no-deps fla-core einops`, or `pip download "
            f"--no-deps fla-core einops -d {data / 'wheels'}` where nothing can be installed."
        )


def _evaluate(work: WorkDirectory, sizes: evaluate.EvaluationSizes) -> None:
    evaluate.write(evaluate.evaluate(work.model, work.directory, evaluate.KV_FORMATS, sizes), work.directory)
    log_progress(f"the tables are in {work.evaluation.with_suffix('.md')}")


class TrainingStoppedError(OneboxError):
    """Training exited with a code of its own, and printed the reason already."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("The recipe stopped in training; the same command resumes it.")
        self.exit_code = exit_code
