"""The recipe by one command: stages run in order, what is done is skipped, what was stopped goes on."""

import itertools
import json
from pathlib import Path

import pytest
import torch

import onebox
from onebox.spec.errors import MismatchError, UnsupportedError
from recipes.pocket import __main__ as command
from recipes.pocket import train
from recipes.pocket.export import read_weights
from recipes.pocket.stages import STAGES, Stage, Work, missed, run_stages
from recipes.pocket.training.clock import PROGRESS, Clock, progress_of


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fakes:
    """Stages that write their outputs and remember that they ran."""

    def __init__(self, root: Path) -> None:
        self.ran: list[str] = []
        self.root = root
        self.failing: str | None = None

    def recipe(self) -> list[Stage]:
        return [self._stage(name) for name in STAGES]

    def _stage(self, name: str) -> Stage:
        def run() -> None:
            self.ran.append(name)
            (self.root / name).mkdir(exist_ok=True)
            (self.root / name / "half").touch()
            if name == self.failing:
                raise KeyboardInterrupt
            (self.root / name / "done").touch()

        return Stage(name, (self.root / name / "done",), run, halfway=self.root / name)


@pytest.fixture
def fakes(tmp_path) -> Fakes:
    return Fakes(tmp_path)


def test_all_stages_run_once_in_order(fakes):
    assert run_stages(fakes.recipe()) == list(STAGES)
    assert run_stages(fakes.recipe()) == []
    assert fakes.ran == list(STAGES)


def test_a_stopped_recipe_goes_on_with_the_stage_that_was_stopped(fakes):
    fakes.failing = "train"
    with pytest.raises(KeyboardInterrupt):
        run_stages(fakes.recipe())
    fakes.failing = None
    assert (fakes.root / "train" / "half").exists()
    assert run_stages(fakes.recipe()) == ["train", "export", "evaluate"]


def test_a_stage_that_is_done_again_takes_what_follows_with_it(fakes):
    run_stages(fakes.recipe())
    fakes.failing = "train"
    with pytest.raises(KeyboardInterrupt):
        run_stages(fakes.recipe(), again_from="train")
    assert (fakes.root / "prepare" / "done").exists()
    assert not (fakes.root / "export" / "done").exists()
    assert not (fakes.root / "evaluate" / "done").exists()


def test_halfway_work_is_thrown_away_only_when_its_stage_or_one_before_it_begins_anew(fakes):
    run_stages(fakes.recipe())
    mark = fakes.root / "train" / "of an earlier run"
    mark.touch()
    (fakes.root / "train" / "done").unlink()
    run_stages(fakes.recipe())
    assert mark.exists()
    run_stages(fakes.recipe(), again_from="prepare")
    assert not mark.exists()


def test_until_stops_there_and_what_came_after_is_no_longer_taken_for_done(fakes):
    run_stages(fakes.recipe())
    assert run_stages(fakes.recipe(), again_from="prepare", until="train") == ["prepare", "train"]
    assert run_stages(fakes.recipe()) == ["export", "evaluate"]


def test_what_a_machine_cannot_do_is_refused_before_anything_is_touched(fakes):
    run_stages(fakes.recipe())

    def refuse() -> None:
        raise UnsupportedError("no")

    recipe = fakes.recipe()
    recipe[1] = Stage("train", recipe[1].outputs, recipe[1].run, refuse)
    with pytest.raises(UnsupportedError):
        run_stages(recipe, again_from="prepare")
    assert all((fakes.root / name / "done").exists() for name in STAGES)


def test_without_a_gpu_the_real_recipe_says_so_and_downloads_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--work", str(tmp_path / "work"), "--packages", str(tmp_path / "packages")]
    assert command.main(arguments) == 1
    assert "Training needs a GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--minutes", "0"], ["--from", "bake"], ["--from", "export", "--until", "train"], ["--until", "x"]]
)
def test_a_wrong_argument_is_named(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_toy_recipe_leaves_a_model_that_runs_and_its_tables(tmp_path, capsys):
    arguments = ["--toy", "--work", str(tmp_path), "--minutes", "0.03"]
    assert command.main(arguments) == 0
    work = Work(tmp_path / "toy")
    with onebox.LLM(work.model) as llm:
        assert len(llm.generate(["abc"], onebox.SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert "### What must hold" in (work.directory / "evaluation.md").read_text()
    found = json.loads(work.evaluation.read_text())
    assert {"invoice", "code", "key at 256"} <= {task["name"] for task in found["tasks"]}
    assert missed(work)  # a toy reaches nothing
    capsys.readouterr()
    assert command.main(arguments) == 0
    said = capsys.readouterr().err
    assert all(f"{name} is done already" in said for name in STAGES)


def test_a_stopped_training_run_goes_on_from_its_weights_and_its_place_in_the_schedule(tmp_path, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(Clock, "elapsed", property(lambda _: 0.05 * next(looks)))  # no matter how busy the machine is
    real, places = train.Report.step, []

    def stop_midway(self, progress, length, rate):
        real(self, progress, length, rate)
        places.append(progress)
        if progress > 0.3 and not resumed:
            raise KeyboardInterrupt

    resumed: list[bool] = []
    monkeypatch.setattr(train.Report, "step", stop_midway)
    arguments = ["--toy", "--minutes", "0.05", "--out", str(tmp_path)]
    assert train.main(arguments) == 130
    share = progress_of(tmp_path)
    assert 0.3 < share < 1
    _, stopped = read_weights(tmp_path)
    resumed.append(True)
    places.clear()
    began: dict[str, torch.Tensor] = {}
    build = train.Trainer.__init__

    def remember(self, network, weights, *rest):
        began.update({name: weight.clone() for name, weight in weights.items()})
        build(self, network, weights, *rest)

    monkeypatch.setattr(train.Trainer, "__init__", remember)
    assert train.main([*arguments, "--resume"]) == 0
    assert all(torch.equal(began[name], weight) for name, weight in stopped.items())
    assert min(places) >= share
    assert progress_of(tmp_path) == 1
    places.clear()
    assert train.main([*arguments, "--resume"]) == 0
    assert not places


def test_a_resumed_clock_takes_only_the_rest_of_the_time():
    clock = Clock(10, done=0.75)
    clock.began -= 30
    clock.first_step = 0.0
    # 2.5 minutes are left, 12 seconds of them for the last checkpoint.
    assert clock.progress == pytest.approx(0.75 + 0.25 * 30 / 138, abs=1e-3)


def test_progress_that_cannot_be_read_is_a_sentence(tmp_path):
    assert progress_of(tmp_path) == 0
    (tmp_path / PROGRESS).write_text('{"progress": "far"}')
    with pytest.raises(MismatchError, match="how far the run has come"):
        progress_of(tmp_path)
