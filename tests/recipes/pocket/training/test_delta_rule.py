"""The delta rule that is trained is the reference's, and so are its gradients."""

import pytest
import torch

from onebox.model import reference
from onebox.spec.model import spec_from_config
from recipes.pocket.config import TOY
from recipes.pocket.training import delta_rule as delta
from recipes.pocket.training.delta_rule import _random_inputs, choose_delta_rule, largest_error, plain_delta_rule

SPEC = spec_from_config(TOY)
CPU = torch.device("cpu")


def recurrent(query, key, value, log_decay, write):
    """Token by token, one sequence after the other."""
    repeats = value.shape[2] // key.shape[2]
    rows = []
    for row in range(value.shape[0]):
        q = query[row].repeat_interleave(repeats, 1) * key.shape[-1] ** -0.5
        k = key[row].repeat_interleave(repeats, 1)
        matrices = torch.zeros(value.shape[2], key.shape[-1], value.shape[-1])
        outputs = []
        for t in range(value.shape[1]):
            at = slice(t, t + 1)
            out, matrices = reference.recurrent_delta_rule(
                q[at], k[at], value[row, at], log_decay[row, at], write[row, at], matrices
            )
            outputs.append(out)
        rows.append(torch.cat(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("length", [1, 63, 65])
def test_plain_rule_and_its_gradients_are_those_of_the_recurrence(length):
    inputs = _random_inputs(SPEC, CPU, length)
    ours, theirs = ([part.clone().requires_grad_() for part in inputs] for _ in range(2))
    output, expected = plain_delta_rule(*ours), recurrent(*theirs)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    pairs = zip(
        torch.autograd.grad(output, ours, direction), torch.autograd.grad(expected, theirs, direction), strict=True
    )
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)


def test_a_rule_with_wrong_gradients_has_a_large_error():
    def detached_decay(query, key, value, log_decay, write):
        return plain_delta_rule(query, key, value, log_decay.detach() + 0 * log_decay, write)

    assert largest_error(plain_delta_rule, SPEC, CPU, length=65) < 0.02
    assert largest_error(detached_decay, SPEC, CPU, length=65) > 0.5


def test_without_a_gpu_the_plain_rule_is_chosen(tmp_path):
    rule, _ = choose_delta_rule(SPEC, CPU, tmp_path)
    assert rule is plain_delta_rule


class Tuner:
    """A kernel with six variants."""

    def __init__(self):
        self.configs = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("right", [[3], [0], [0, 1, 2, 3, 4, 5], None])
def test_variants_are_tried_until_one_is_right(right, monkeypatch, tmp_path):
    """On a GPU, where all but the `right` variants fail in one way or another."""
    tuner, tried = Tuner(), []

    def error(rule, spec, device):
        tried.append(list(tuner.configs))
        if len(tried) % 2 and tuner.configs != right:
            raise RuntimeError("out of registers")
        return 0.001 if tuner.configs == right else 0.5

    monkeypatch.setattr(delta, "_tuners", lambda: [tuner])
    monkeypatch.setattr(delta, "fused_delta_rule", lambda _: recurrent)
    monkeypatch.setattr(delta, "largest_error", error)
    rule, words = choose_delta_rule(SPEC, torch.device("cuda"), tmp_path)
    assert rule is (plain_delta_rule if right is None else recurrent)
    assert tried[-1] == (right or [0, 1, 2, 3, 4, 5])
    assert words.startswith("plain" if right is None else "fused")


def test_without_fla_the_plain_rule_is_chosen_and_the_reason_given(monkeypatch, tmp_path):
    monkeypatch.setattr(delta.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    rule, words = choose_delta_rule(SPEC, torch.device("cuda"), tmp_path)
    assert rule is plain_delta_rule
    assert "fla" in words
