"""Weights of any format arrive as float32 under their plain names; what is off is named before a weight is read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from onebox.model.random import random_weights
from onebox.model.reference import Cache, forward
from onebox.model.reference_weights import load_weights
from onebox.spec.errors import DoesNotFitError, MismatchError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, fused_experts, modules
from tests.model.oracle import TINY, TOWER, tiny_config, tiny_model, transformers_model
from tests.synthetic import KINDS

SPEC = spec_from_config(TINY)
WEIGHTS = random_weights(SPEC)
Q_PROJ = "model.language_model.layers.3.self_attn.q_proj.weight"


def save(directory, weights, config=TINY):
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def test_plain_dtypes_become_float32(tmp_path):
    weights = dict(WEIGHTS)
    weights[Q_PROJ] = weights[Q_PROJ].to(torch.float16)
    weights["lm_head.weight"] = weights["lm_head.weight"].float()
    save(tmp_path, weights)
    loaded = load_weights(tmp_path)
    assert loaded.spec == SPEC
    assert loaded.weights.keys() == weights.keys()
    assert all(torch.equal(loaded.weights[name], tensor.float()) for name, tensor in weights.items())
    assert loaded.num_skipped_vision_tensors == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_arrives_as_nearly_the_same_model(checkpoints, kind):
    """All kinds are roundings of one model; the coarsest, E2M1, errs by at most a sixth of a group's largest number."""
    expected = dict(load_weights(checkpoints / "bf16-per-expert").weights)
    loaded = load_weights(checkpoints / kind)
    found = dict(loaded.weights)
    for fused in fused_experts(loaded.spec):
        if fused.tensor in found:
            stacked = found.pop(fused.tensor).chunk(len(fused.parts), dim=1)
            for part, rows in zip(fused.parts, stacked, strict=True):
                found |= {f"{fused.experts_name}.{i}.{part}.weight": expert for i, expert in enumerate(rows)}
    mtp = {name for name in expected if name.startswith("mtp.")}
    assert found.keys() == expected.keys() - (mtp if kind == "nvfp4-modelopt" else set())
    for name, weight in found.items():
        error = (weight - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= (0 if kind.startswith("bf16") else 1 / 6), name


def test_quantised_numbers_are_those_that_the_bits_mean(checkpoints):
    from onebox.formats import dequantize_fp8_block
    from tests.checkpoint.building import all_tensors

    raw = all_tensors(checkpoints / "fp8")
    name = "model.language_model.layers.0.mlp.shared_expert.gate_proj"
    expected = dequantize_fp8_block(raw[f"{name}.weight"], raw[f"{name}.weight_scale_inv"])
    assert torch.equal(load_weights(checkpoints / "fp8").weights[f"{name}.weight"], expected)


def test_a_fatal_problem_of_the_checkpoint_is_told_before_a_weight_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("onebox.model.reference_weights.read_weight", lambda *_, **__: pytest.fail("a weight was read"))
    save(tmp_path, {**WEIGHTS, "model.surprise": torch.zeros(2)})
    with pytest.raises(MismatchError, match=r"model\.surprise belongs to no module"):
        load_weights(tmp_path)
    save(tmp_path, {name: tensor for name, tensor in WEIGHTS.items() if "norm" not in name})
    with pytest.raises(MismatchError, match=r"is missing.* more problems: `onebox inspect"):
        load_weights(tmp_path)


def test_vision_tensors_are_known_and_left_on_disk(tmp_path):
    config = tiny_config(vision_config=TOWER)
    spec = spec_from_config(config)
    vision = {m.plain_tensor: torch.zeros(m.shape) for m in modules(spec) if m.module_class is ModuleClass.VISION}
    save(tmp_path, {**WEIGHTS, **vision}, config)
    loaded = load_weights(tmp_path)
    assert loaded.num_skipped_vision_tensors == len(vision) == 21
    assert loaded.weights.keys() == WEIGHTS.keys()


def test_files_that_transformers_wrote_are_read_whole(tmp_path):
    config = tiny_config({"mtp_num_hidden_layers": 0}, vision_config=TOWER)
    spec, weights = tiny_model(tiny_config({"mtp_num_hidden_layers": 0}))
    transformers_model(config, weights).save_pretrained(tmp_path)
    loaded = load_weights(tmp_path)
    assert loaded.num_skipped_vision_tensors == 21
    read, ours = (forward(spec, w, torch.arange(70), Cache.empty(spec)) for w in (loaded.weights, weights))
    assert torch.equal(read, ours)


def test_weights_that_do_not_fit_are_refused_with_both_numbers(tmp_path, monkeypatch):
    save(tmp_path, WEIGHTS)
    monkeypatch.setattr("onebox.model.reference_weights.available_memory_bytes", lambda: 1000)
    with pytest.raises(DoesNotFitError, match=r"GB as float32 and 0\.0 GB of memory are free"):
        load_weights(tmp_path)
