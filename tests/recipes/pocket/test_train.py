"""The training command resumes an interrupted run."""

import itertools

import torch

from recipes.pocket import train
from recipes.pocket.training.checkpoint import read_progress, read_weights
from recipes.pocket.training.schedule import RunClock
from recipes.pocket.training.trainer import RunMonitor, Trainer


def test_an_interrupted_run_resumes_with_its_weights_at_its_point_in_the_schedule(tmp_path, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(
        RunClock, "elapsed", property(lambda _: 0.05 * next(looks))
    )  # no matter how busy the machine is
    real, places = RunMonitor.step, []

    def stop_midway(self, progress, length, rate):
        real(self, progress, length, rate)
        places.append(progress)
        if progress > 0.3 and not resumed:
            raise KeyboardInterrupt

    resumed: list[bool] = []
    monkeypatch.setattr(RunMonitor, "step", stop_midway)
    arguments = ["--toy", "--minutes", "0.05", "--out", str(tmp_path)]
    assert train.main(arguments) == 130
    share = read_progress(tmp_path)
    assert 0.3 < share < 1
    _, stopped = read_weights(tmp_path)
    resumed.append(True)
    places.clear()
    began: dict[str, torch.Tensor] = {}
    build = Trainer.__init__

    def remember(self, network, weights, *rest):
        began.update({name: weight.clone() for name, weight in weights.items()})
        build(self, network, weights, *rest)

    monkeypatch.setattr(Trainer, "__init__", remember)
    assert train.main([*arguments, "--resume"]) == 0
    assert all(torch.equal(began[name], weight) for name, weight in stopped.items())
    assert min(places) >= share
    assert read_progress(tmp_path) == 1
    places.clear()
    assert train.main([*arguments, "--resume"]) == 0
    assert not places
