"""The benchmark's own gate: silent where answers are the same, and not where they are not."""

import pytest
import torch

from onebox.lab import gate
from onebox.model.dummy import dummy_model
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.model import spec_from_config
from tests.synthetic import tiny_config


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(gate, "_PROMPT_TOKENS", (5, 70))
    monkeypatch.setattr(gate, "_ANSWER_TOKENS", 8)


@pytest.fixture(scope="module")
def model():
    return dummy_model(spec_from_config(tiny_config()), {}, torch.device("cpu"), torch.float32)


def test_a_model_whose_answers_never_change_passes(model):
    assert not gate.find_differences(model)


def test_an_answer_that_depends_on_its_company_is_found(model, monkeypatch):
    start_logits = Qwen35.start_logits

    def disturbed(self, hidden):
        return start_logits(self, hidden + (0.5 if len(hidden) > 1 else 0.0))

    monkeypatch.setattr(Qwen35, "start_logits", disturbed)
    found = gate.find_differences(model)
    assert found
    assert "in company, with 0 drafts" in found[0]
