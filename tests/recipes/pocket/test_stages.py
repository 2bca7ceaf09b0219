"""The recipe's command: stages run in order, finished ones are skipped, interrupted ones resume."""

import json
from pathlib import Path

import pytest
import torch

import onebox
from onebox.spec.errors import UnsupportedError
from recipes.pocket import __main__ as command
from recipes.pocket.stages import STAGES, RecipeStage, WorkDirectory, missed_claims, pocket_stages, run_stages


class Fakes:
    """Stages that write their outputs and remember that they ran."""

    def __init__(self, root: Path) -> None:
        self.ran: list[str] = []
        self.root = root
        self.failing: str | None = None

    def recipe(self) -> list[RecipeStage]:
        return [self._stage(name) for name in STAGES]

    def _stage(self, name: str) -> RecipeStage:
        def run() -> None:
            self.ran.append(name)
            (self.root / name).mkdir(exist_ok=True)
            (self.root / name / "half").touch()
            if name == self.failing:
                raise KeyboardInterrupt
            (self.root / name / "done").touch()

        return RecipeStage(name, (self.root / name / "done",), run, resume_from=self.root / name)


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def test_all_stages_run_once_in_order(fakes):
    assert run_stages(fakes.recipe()) == list(STAGES)
    assert run_stages(fakes.recipe()) == []
    assert fakes.ran == list(STAGES)


def test_an_interrupted_recipe_resumes_with_the_interrupted_stage(fakes):
    fakes.failing = "train"
    with pytest.raises(KeyboardInterrupt):
        run_stages(fakes.recipe())
    fakes.failing = None
    assert (fakes.root / "train" / "half").exists()
    assert run_stages(fakes.recipe()) == ["train", "see", "export", "evaluate"]


def test_running_a_stage_again_deletes_the_outputs_of_later_stages(fakes):
    run_stages(fakes.recipe())
    fakes.failing = "train"
    with pytest.raises(KeyboardInterrupt):
        run_stages(fakes.recipe(), again_from="train")
    assert (fakes.root / "prepare" / "done").exists()
    assert not (fakes.root / "export" / "done").exists()
    assert not (fakes.root / "evaluate" / "done").exists()


def test_a_checkpoint_is_deleted_only_when_its_stage_or_an_earlier_one_restarts(fakes):
    run_stages(fakes.recipe())
    mark = fakes.root / "train" / "of an earlier run"
    mark.touch()
    (fakes.root / "train" / "done").unlink()
    run_stages(fakes.recipe())
    assert mark.exists()
    run_stages(fakes.recipe(), again_from="prepare")
    assert not mark.exists()


def test_until_stops_there_and_later_stages_are_no_longer_finished(fakes):
    run_stages(fakes.recipe())
    assert run_stages(fakes.recipe(), again_from="prepare", until="train") == ["prepare", "train"]
    assert run_stages(fakes.recipe()) == ["see", "export", "evaluate"]


def test_a_stage_this_machine_cannot_run_is_refused_before_any_file_changes(fakes):
    run_stages(fakes.recipe())

    def refuse() -> None:
        raise UnsupportedError("no")

    recipe = fakes.recipe()
    recipe[1] = RecipeStage("train", recipe[1].outputs, recipe[1].run, refuse)
    with pytest.raises(UnsupportedError):
        run_stages(recipe, again_from="prepare")
    assert all((fakes.root / name / "done").exists() for name in STAGES)


def test_without_a_gpu_the_real_recipe_is_refused_and_downloads_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--work", str(tmp_path / "work"), "--packages", str(tmp_path / "packages")]
    assert command.main(arguments) == 1
    assert "Training needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_text_model_to_start_from_replaces_its_training(tmp_path):
    work = WorkDirectory(tmp_path)
    names = [stage.name for stage in pocket_stages(work, tmp_path / "packages", 1.0, 1.0, start=tmp_path / "model")]
    assert names == [name for name in STAGES if name != "train"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes", "0"],
        ["--from", "bake"],
        ["--from", "export", "--until", "train"],
        ["--until", "x"],
        ["--start", "model", "--toy"],
        ["--start", "model", "--from", "train"],
    ],
)
def test_a_wrong_argument_is_named(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_toy_recipe_leaves_a_model_that_runs_and_its_tables(tmp_path, capsys):
    arguments = ["--toy", "--work", str(tmp_path), "--minutes", "0.03"]
    assert command.main(arguments) == 0
    work = WorkDirectory(tmp_path / "toy")
    with onebox.LLM(work.model) as llm:
        assert len(llm.generate(["abc"], onebox.SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert "### Requirements" in (work.directory / "evaluation.md").read_text()
    found = json.loads(work.evaluation.read_text())
    assert {"invoice", "code", "key at 256"} <= {task["name"] for task in found["tasks"]}
    assert missed_claims(work)  # a toy reaches nothing
    capsys.readouterr()
    assert command.main(arguments) == 0
    said = capsys.readouterr().err
    assert all(f"{name} is already finished" in said for name in STAGES)
