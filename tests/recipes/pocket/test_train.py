"""The trainer learns, keeps to its clock, and leaves a checkpoint that is read back as it was."""

import math

import pytest
import torch

from onebox.model.load import load_weights
from onebox.spec.errors import MismatchError
from onebox.spec.model import spec_from_config
from onebox.text.generation import GenerationDefaults
from recipes.pocket import train
from recipes.pocket.config import TOY, num_parameters, pocket_config
from recipes.pocket.export import LARGEST_FILE_BYTES, export, largest_difference, read_weights, write_checkpoint
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.feed import ToyFeed
from recipes.pocket.training.network import Network, Places, draw_weights, token_losses
from recipes.pocket.training.optimizer import Optimizer, orthogonalised

SPEC = spec_from_config(TOY)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toy_trainer() -> train.Trainer:
    plan = train.Plan(tokens=128, lengths=(32, 64))
    return train.Trainer(Network(SPEC, plain_delta_rule), draw_weights(SPEC), ToyFeed(SPEC.vocab_size), plan, CPU)


def test_the_pocket_model_fits_into_38_megabytes_of_bf16():
    assert 2 * num_parameters(spec_from_config(pocket_config(8166))) <= 38e6


def test_a_few_steps_make_the_loss_smaller():
    trainer = toy_trainer()
    before = trainer.loss(32).item()
    for _ in range(12):
        trainer.step(32, train.LEARNING_RATE)
    assert trainer.loss(32).item() < before - 0.1


def test_every_weight_gets_a_gradient():
    trainer = toy_trainer()
    trainer.loss(32).backward()
    without = [name for name, weight in trainer.weights.items() if weight.grad is None or not weight.grad.any()]
    assert not without


def test_sequences_of_a_batch_do_not_see_each_other():
    network, weights = Network(SPEC, plain_delta_rule), draw_weights(SPEC)
    tokens = torch.randint(SPEC.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    both, _ = network.hidden(weights, tokens.flatten(), Places.of(SPEC, 2, 20, CPU))
    alone, _ = network.hidden(weights, tokens[1], Places.of(SPEC, 1, 20, CPU))
    torch.testing.assert_close(both[20:], alone)


def test_token_losses_are_cross_entropies():
    hidden, head = torch.randn(5, 8), torch.randn(11, 8)
    labels = torch.tensor([0, 10, 3, 3, 7])
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    torch.testing.assert_close(token_losses(hidden, head, labels), expected)


def test_orthogonalised_matrices_have_singular_values_about_one():
    matrices = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_forgotten_moments_do_not_move_weights():
    weights = {name: weight.requires_grad_() for name, weight in draw_weights(SPEC).items()}
    optimizer = Optimizer(SPEC, weights)
    for scale in (1.0, 0.0):
        for weight in weights.values():
            weight.grad = torch.full_like(weight, scale)
        if scale == 0.0:
            optimizer.forget()
            before = {name: weight.detach().clone() for name, weight in weights.items()}
        optimizer.step(1e-3)
    norm = "model.language_model.norm.weight"
    assert torch.equal(weights[norm], before[norm])


def test_learning_rate_rises_stays_and_falls_to_nothing():
    assert train.learning_rate(0.0) == 0.0
    assert train.learning_rate(0.3) == train.LEARNING_RATE
    assert 0 < train.learning_rate(0.9) < train.LEARNING_RATE
    assert train.learning_rate(1.0) == 0.0


def test_a_lost_run_goes_back_to_the_last_good_weights_and_on_with_half_the_rate(capsys):
    trainer = toy_trainer()
    report = train.Report(trainer, train.Clock(1), None)
    kept = {name: weight.detach().clone() for name, weight in trainer.weights.items()}
    trainer.step(32, train.LEARNING_RATE)
    trainer.tally.sums.fill_(float("nan"))
    report.step(0.5, 32, train.LEARNING_RATE)
    assert all(torch.equal(trainer.weights[name], weight) for name, weight in kept.items())
    assert report.caution == 0.5
    assert "back to the last good weights" in capsys.readouterr().out


def test_out_of_memory_halves_the_step(monkeypatch):
    trainer = toy_trainer()
    real = train.Trainer.loss

    def loss(self, length):
        if self.plan.tokens > 64:
            raise torch.OutOfMemoryError
        return real(self, length)

    monkeypatch.setattr(train.Trainer, "loss", loss)
    assert train.warm_up(trainer, train.Clock(1)).plan.tokens == 64


def test_toy_run_leaves_a_checkpoint_that_equals_the_reference(tmp_path, capsys):
    train.main(["--toy", "--minutes", "0.05", "--out", str(tmp_path)])
    assert largest_difference(tmp_path, num_tokens=70) < 1e-3
    assert "loss" in capsys.readouterr().out


def test_a_written_checkpoint_reads_back_rounded_and_in_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.pocket.export.LARGEST_FILE_BYTES", 60_000)
    weights = draw_weights(SPEC)
    write_checkpoint(tmp_path, TOY, weights)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 100_000 < LARGEST_FILE_BYTES for file in files)
    _, back = read_weights(tmp_path)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight.bfloat16().float()) for name, weight in weights.items())


def test_the_artefact_is_one_file_with_configs_and_a_card(tmp_path):
    trained, out, data = (tmp_path / name for name in ("trained", "out", "data"))
    write_checkpoint(trained, TOY, draw_weights(SPEC))
    out.mkdir()
    (out / "generation_config.json").write_text('{"eos_token_id": [104, 102], "temperature": 1.0}')
    data.mkdir()
    (data / "index.json").write_text('{"handbook-hu": {"language": "hu", "licence": "GPL-2+", "tokens": 1234}}')
    export(trained, out, data)
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert load_weights(out).spec == SPEC
    defaults = GenerationDefaults.load(out)
    assert defaults.eos_token_ids == (104, 102)
    assert defaults.temperature < 0.5
    assert "| handbook-hu | hu | GPL-2+ | 1,234 |" in (out / "README.md").read_text()


def test_weights_that_the_reference_computes_otherwise_are_refused(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, TOY, draw_weights(SPEC))
    monkeypatch.setattr("recipes.pocket.export.plain_delta_rule", lambda *parts: torch.zeros_like(parts[2]))
    with pytest.raises(MismatchError, match="logits"):
        export(tmp_path, tmp_path)


def test_losses_are_counted_by_kind():
    tally = train.Tally(("a", "b"), CPU)
    tally.count(torch.tensor([0, 1, 1]), *(torch.tensor([1.0, 2.0, 4.0]) * scale for scale in (1, 2, 3)))
    mean, line = tally.read()
    assert math.isclose(mean, 7 / 3, rel_tol=1e-6)
    assert line == "a 1.00/2.00/3.00 b 3.00/6.00/9.00"
