"""A drafter's directory is opened strictly: every tensor of its config in its shape, and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebox.checkpoint.bind import ProblemKind
from onebox.checkpoint.drafter import bind_drafter, is_drafter, open_drafter
from tests.drafters import small_drafter_config, write_drafter
from tests.synthetic import tiny_config

CONFIG = small_drafter_config(tiny_config())


@pytest.fixture
def directory(tmp_path):
    return write_drafter(tmp_path / "drafter", CONFIG)


def change(directory, **tensors):
    """Rewrites the shard with these tensors added or replaced; None removes one."""
    path = directory / "model.safetensors"
    kept = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(kept, path)
    return bind_drafter(open_drafter(directory)).problems


def test_a_whole_drafter_binds_every_tensor_once_without_problems(directory):
    checkpoint = open_drafter(directory)
    binding = bind_drafter(checkpoint)
    assert not binding.problems
    assert set(binding.modules) == {module.name for module in checkpoint.spec.modules()}
    assert {entry.name for bound in binding.modules.values() for entry in bound.tensors.values()} == set(
        checkpoint.tensors
    )
    assert is_drafter(directory)


@pytest.mark.parametrize(
    ("name", "tensor", "kind", "words"),
    [
        ("fc.weight", None, ProblemKind.MISSING, "fc.weight is missing"),
        ("layers.2.self_attn.q_norm.weight", None, ProblemKind.MISSING, "q_norm.weight is missing"),
        ("fc.weight", torch.zeros(256, 512), ProblemKind.MISSHAPEN, r"fc.weight has shape"),
        ("norm.weight", torch.zeros(255), ProblemKind.MISSHAPEN, "norm.weight has shape"),
        ("layers.3.mlp.up_proj.weight", torch.zeros(2, 2), ProblemKind.UNEXPECTED, "belongs to no module"),
        ("norm.weight_scale", torch.zeros(2), ProblemKind.UNEXPECTED, "belongs to a norm"),
        ("lm_head.weight", torch.zeros(2, 2), ProblemKind.UNEXPECTED, "the model's head"),
        ("embed_tokens.weight", torch.zeros(2, 2), ProblemKind.UNEXPECTED, "takes the model's"),
        ("d2t", torch.zeros(2), ProblemKind.UNEXPECTED, "draft vocabulary"),
        ("t2d", torch.zeros(2), ProblemKind.UNEXPECTED, "draft vocabulary"),
        ("layers.0.attention_conv.base_kernel", torch.zeros(2), ProblemKind.UNEXPECTED, "DFlash2"),
    ],
)
def test_missing_misshapen_and_other_tensors_are_named(directory, name, tensor, kind, words):
    (problem,) = change(directory, **{name: tensor})
    assert problem.is_fatal
    assert problem.kind is kind
    assert name.rpartition(".")[0] in problem.message or name in problem.message
    assert words in problem.message


def test_a_mask_embedding_of_its_own_is_refused(directory):
    (directory / "mask_embedding.pt").write_bytes(b"")
    (problem,) = bind_drafter(open_drafter(directory)).problems
    assert "mask_embedding.pt" in problem.message


def test_an_index_that_names_an_absent_tensor_is_a_problem(directory):
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"gone.weight": "model.safetensors"}})
    )
    assert any(
        problem.is_fatal and "gone.weight" in problem.message
        for problem in bind_drafter(open_drafter(directory)).problems
    )
