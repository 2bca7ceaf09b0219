"""The trainer learns, follows its schedule, and recovers from a diverged loss and from memory that is short."""

import math

import torch

from onebox.spec.model import spec_from_config
from recipes.pocket.config import TOY
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.feed import ToyFeed
from recipes.pocket.training.network import TrainingNetwork, draw_weights
from recipes.pocket.training.schedule import LEARNING_RATE, RunClock
from recipes.pocket.training.trainer import BatchShape, LossTally, RunMonitor, Trainer, warm_up

SPEC = spec_from_config(TOY)
CPU = torch.device("cpu")


def toy_trainer() -> Trainer:
    shape = BatchShape(tokens=128, lengths=(32, 64))
    return Trainer(TrainingNetwork(SPEC, plain_delta_rule), draw_weights(SPEC), ToyFeed(SPEC.vocab_size), shape, CPU)


def test_a_few_steps_make_the_loss_smaller():
    trainer = toy_trainer()
    before = trainer.loss(32).item()
    for _ in range(12):
        trainer.step(32, LEARNING_RATE)
    assert trainer.loss(32).item() < before - 0.1


def test_a_text_model_with_no_share_of_the_rate_stays_as_it_is():
    trainer = toy_trainer()
    before = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.step(32, LEARNING_RATE, text_share=0.0)
    assert all(torch.equal(trainer.weights[name], weight) for name, weight in before.items())


def test_every_weight_gets_a_gradient():
    trainer = toy_trainer()
    trainer.loss(32).backward()
    without = [name for name, weight in trainer.weights.items() if weight.grad is None or not weight.grad.any()]
    assert not without


def test_a_diverged_run_restores_the_last_good_weights_and_halves_the_rate(capsys):
    trainer = toy_trainer()
    monitor = RunMonitor(trainer, RunClock(1), None)
    kept = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.step(32, LEARNING_RATE)
    trainer.tally.sums.fill_(float("nan"))
    monitor.step(0.5, 32, LEARNING_RATE)
    assert all(torch.equal(trainer.weights[name], weight) for name, weight in kept.items())
    assert monitor.rate_factor == 0.5
    assert "restored the last good weights" in capsys.readouterr().out


def test_out_of_memory_halves_the_step(monkeypatch):
    trainer = toy_trainer()
    real = Trainer.loss

    def loss(self, length):
        if self.shape.tokens > 64:
            raise torch.OutOfMemoryError
        return real(self, length)

    monkeypatch.setattr(Trainer, "loss", loss)
    assert warm_up(trainer, RunClock(1)).shape.tokens == 64


def test_losses_are_counted_by_kind():
    tally = LossTally(("a", "b"), CPU)
    tally.count(torch.tensor([0, 1, 1]), *(torch.tensor([1.0, 2.0, 4.0]) * scale for scale in (1, 2, 3)))
    mean, line = tally.read()
    assert math.isclose(mean, 7 / 3, rel_tol=1e-6)
    assert line == "a 1.00/2.00/3.00 b 3.00/6.00/9.00"
