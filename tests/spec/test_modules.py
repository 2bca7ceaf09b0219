"""The list of modules against counts that others published, and against transformers' own model."""

import pytest
import torch
from transformers import Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, fused_experts, modules
from onebox.spec.shapes import named_spec
from tests.synthetic import tiny_config


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        # The 35B figure is printed in a log of another tool; tensors: BF16 files.
        ("qwen3.5-35b-a3b", 35_951_822_704, 1_811),
        ("qwen3.5-122b-a10b", 125_086_497_008, 1_949),
    ],
)
def test_parameters_and_tensors_add_up_to_the_published_counts(name, parameters, tensors):
    spec = named_spec(name)
    listed = list(modules(spec))
    assert sum(module.numel for module in listed) == parameters
    single = [module for module in listed if module.module_class is not ModuleClass.EXPERTS]
    fused = [item for item in fused_experts(spec) if not item.module_class.in_mtp]
    assert len(single) + len(fused) == tensors


def test_mtp_head_of_the_122b_has_the_published_tensors_and_bytes():
    head = [module for module in modules(named_spec("qwen3.5-122b-a10b")) if module.module_class.in_mtp]
    assert len(head) == 785
    assert 2 * sum(module.numel for module in head) == 5_047_358_464


def test_names_and_shapes_are_those_of_transformers_own_model():
    with torch.device("meta"):
        theirs = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**tiny_config())).state_dict()
    spec = spec_from_config(tiny_config())
    ours = {m.plain_tensor: m.shape for m in modules(spec) if m.module_class not in {ModuleClass.EXPERTS}}
    ours = {name: shape for name, shape in ours.items() if not name.startswith("mtp.")}
    ours |= {item.tensor: item.shape for item in fused_experts(spec) if not item.module_class.in_mtp}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


def test_a_tied_model_has_no_head_of_its_own():
    spec = spec_from_config({**tiny_config(), "tie_word_embeddings": True})
    assert not any(module.module_class is ModuleClass.LM_HEAD for module in modules(spec))


def test_names_are_unique():
    names = [module.plain_tensor for module in modules(named_spec("qwen3.5-35b-a3b"))]
    assert len(names) == len(set(names))
