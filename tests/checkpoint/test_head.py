"""An MTP head that drafts in vain is told from the pocket model's trained one, whatever its format."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import onebox.pocket
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.pocket.builds import build
from tests.synthetic import write_checkpoint

MASTER = Path(onebox.pocket.__file__).parent / "model"
HIDDEN = 256


def seeded():
    return torch.Generator().manual_seed(5)


def noise(name, tensor):
    """As large as the trained matrices."""
    return torch.randn(tensor.shape, generator=seeded()) * tensor.float().std()


def initial(name, tensor):
    """As before training."""
    return torch.randn(tensor.shape, generator=seeded()) * 0.02


def shuffled(name, tensor):
    """The trained numbers in another order."""
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=seeded())].reshape(tensor.shape)


def of_another_model(name, tensor):
    """The same head for a model whose hidden dimensions have another order: as trained, and useless here."""
    order = torch.randperm(HIDDEN, generator=seeded())
    if name == "mtp.fc.weight":
        return tensor[order][:, torch.cat([order, HIDDEN + order])]
    reads = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "shared_expert_gate", "gate_up_proj")
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in reads:
        return tensor.index_select(-1, order)
    return tensor.index_select(-2, order)


def too_large(name, tensor):
    """FP8 numbers whose scales were lost."""
    return tensor.float() * 100 if "layers.0" in name else tensor


def only_experts(name, tensor):
    return noise(name, tensor) if "experts" in name else tensor


def with_head(target, change):
    """The pocket model's checkpoint with other matrices in its head."""
    shutil.copytree(MASTER, target)
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if name.startswith("mtp.") and tensors[name].ndim > 1:
            tensors[name] = change(name, tensors[name]).to(torch.bfloat16).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def complaint(report):
    found = [problem.message for problem in report.problems if problem.tensor == "mtp"]
    assert report.is_servable, "a head that drafts in vain is no obstacle"
    assert report.mtp.is_complete
    assert report.mtp.looks_trained == (not found)
    return found[0] if found else None


BAD = {
    noise: "all of its matrices look like random numbers",
    initial: "all of its matrices look like random numbers",
    shuffled: "all of its matrices look like random numbers",
    of_another_model: "mtp.fc is related to the embedding and the LM head by chance only",
    too_large: "times as large as those of the model's layers, and 9 other matrices are off by 8 or more",
}


def test_the_trained_head_looks_trained():
    report = inspect_checkpoint(MASTER, deep=True)
    assert complaint(report) is None
    assert "4 of 10 experts beside those of layers 3 and 7" in report.mtp.compared


@pytest.mark.parametrize("change", BAD, ids=lambda change: change.__name__)
def test_a_head_that_drafts_in_vain_is_told_with_the_reason_and_the_advice(tmp_path, change):
    found = complaint(inspect_checkpoint(with_head(tmp_path / "model", change), deep=True))
    assert BAD[change] in found
    assert "--mtp-from OTHER" in found
    assert "ngram" in found


def test_matrices_that_are_noise_are_named(tmp_path):
    found = complaint(inspect_checkpoint(with_head(tmp_path / "model", only_experts), deep=True))
    assert "experts' down_proj" in found
    assert "q_proj" not in found


@pytest.mark.parametrize(
    ("name", "change"), [("int4", of_another_model), ("fp8", shuffled), ("nvfp4-int8-head-nvfp4-mtp", shuffled)]
)
def test_every_format_is_judged_alike(tmp_path, name, change):
    build(name, MASTER, tmp_path / "trained")
    assert complaint(inspect_checkpoint(tmp_path / "trained", deep=True)) is None
    build(name, with_head(tmp_path / "changed", change), tmp_path / "built")
    assert BAD[change] in complaint(inspect_checkpoint(tmp_path / "built", deep=True))


def test_nothing_is_said_of_a_model_whose_own_layers_are_random(tmp_path):
    report = inspect_checkpoint(write_checkpoint(tmp_path / "model", "autoround"), deep=True)
    assert complaint(report) is None


def test_the_verdict_is_printed_and_not_without_deep(tmp_path, run_cli):
    directory = with_head(tmp_path / "model", noise)
    shown = run_cli("inspect", directory, "--deep")
    assert (
        "MTP head: present, complete, indexed, values finite and not constant, DRAFTS IN VAIN (see below)" in shown.out
    )
    assert "note: The MTP head will draft in vain" in shown.out
    assert "compared: attention, shared expert and 4 of 10 experts" in shown.out
    assert shown.code == 0
    assert "draft" not in run_cli("inspect", directory).out.replace("a draft pass", "")


def test_a_head_with_a_nan_is_complete_and_damaged(tmp_path, run_cli):
    def spoil(tensors):
        tensors["mtp.norm.weight"][3] = float("nan")

    directory = write_checkpoint(tmp_path / "model", "bf16-per-expert", change=spoil)
    shown = run_cli("inspect", directory, "--deep")
    assert "MTP head: present, complete, indexed, values DAMAGED (see below)" in shown.out
    assert "problem: mtp.norm.weight holds values that are not finite" in shown.out
    assert "INCOMPLETE" not in shown.out


def test_a_head_without_some_modules_is_incomplete_and_they_are_counted(tmp_path, run_cli):
    def spoil(tensors):
        del tensors["mtp.norm.weight"]
        del tensors["mtp.fc.weight"]

    shown = run_cli("inspect", write_checkpoint(tmp_path / "model", "bf16-per-expert", change=spoil), "--deep")
    assert "present, INCOMPLETE (2 of its modules are missing)" in shown.out
