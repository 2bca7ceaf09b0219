"""Compiled layers against plain ones under the same weights."""

import pytest
import torch

from onebox.model import compiled
from onebox.model.layers.compiled import CompiledLayer
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from tests.model.test_cpu_rows import CPU, PROMPT, SHORT, Company, Sequence, tokens_of


def steps(model: Qwen35, kv: str) -> torch.Tensor:
    """Hidden states of some steps, among them drafts that are not kept."""
    company, own, other = Company(model, kv), Sequence(1), Sequence(4)
    company.prefill((own, PROMPT[:SHORT]), (other, tokens_of(3, 5)))
    found = [
        company.step((other, tokens_of(5, 2), 1), (own, tokens_of(8, 4), 2)),
        company.step((own, tokens_of(9, 3), 3), (other, tokens_of(6, 1), 1)),
        company.step((own, tokens_of(7, 1), 1), (other, tokens_of(2, 3), 0)),
    ]
    return torch.cat([part for step in found for part in step])


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@torch.inference_mode()
def test_compiled_layers_compute_what_the_kernels_twins_do(checkpoints, kv, monkeypatch):
    fast = load_model(checkpoints / "bf16-fused", CPU, torch.float32)
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    plain = load_model(checkpoints / "bf16-fused", CPU, torch.float32)
    assert all(isinstance(layer, CompiledLayer) for layer in fast.stack.layers)
    assert not any(isinstance(layer, CompiledLayer) for layer in plain.stack.layers)
    found, expected = steps(fast, kv), steps(plain, kv)
    # Keys and values are rounded to the pages' format, where a last bit of float32 now and then becomes one of theirs.
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-3
