"""Linears in the kernels' layouts hold the stored numbers; what has no kernel is refused by name."""

import pytest
import torch

from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import read_weight
from onebox.formats import dequantize_fp8_block
from onebox.formats.fragments import from_fragments
from onebox.model.linear import Fp8Linear, IntLinear, PlainLinear, make_linear
from onebox.spec.errors import MismatchError
from tests.model.opened import LAYER, opened


def dequantised(linear: IntLinear) -> torch.Tensor:
    codes = from_fragments(linear.tiles, linear.bits).float()
    if linear.bits == 8:
        return codes[: len(linear.scales)] * linear.scales[:, None].float()
    scales = linear.scales.t().float().repeat_interleave(128, dim=1)
    return codes[: len(scales)] * scales


INT4_LINEARS = [
    (f"{LAYER}.linear_attn.in_proj_qkv", f"{LAYER}.linear_attn.in_proj_z"),
    (f"{LAYER}.linear_attn.in_proj_b", f"{LAYER}.linear_attn.in_proj_a"),
    (f"{LAYER}.linear_attn.out_proj",),
]


@pytest.mark.parametrize("names", INT4_LINEARS, ids=["joined", "eight rows each", "one"])
@pytest.mark.parametrize("kind", ["autoround", "packed"])
def test_int4_linears_hold_the_stored_numbers(checkpoints, packed, kind, names):
    _, binding = opened(packed if kind == "packed" else checkpoints / kind)
    bounds = [binding.modules[name] for name in names]
    linear = make_linear(bounds, load)
    assert isinstance(linear, IntLinear)
    assert torch.equal(dequantised(linear), torch.cat([read_weight(bound) for bound in bounds]))


@pytest.mark.parametrize("names", [INT4_LINEARS[0], INT4_LINEARS[2]], ids=["joined", "one"])
def test_linears_of_three_bits_are_widened_to_int4_without_a_change(checkpoints, names):
    _, binding = opened(checkpoints / "packed-int3")
    bounds = [binding.modules[name] for name in names]
    linear = make_linear(bounds, load)
    assert isinstance(linear, IntLinear)
    assert linear.bits == 4
    assert torch.equal(dequantised(linear), torch.cat([read_weight(bound) for bound in bounds]))


def test_fp8_linears_hold_the_stored_numbers(checkpoints):
    _, binding = opened(checkpoints / "fp8")
    bounds = [binding.modules[f"{LAYER}.mlp.shared_expert.{part}"] for part in ("gate_proj", "up_proj")]
    linear = make_linear(bounds, load)
    assert isinstance(linear, Fp8Linear)
    expected = torch.cat([read_weight(bound) for bound in bounds])
    assert torch.equal(dequantize_fp8_block(linear.weight, linear.scale), expected)


def test_plain_linears_hold_the_stored_numbers_as_bf16(checkpoints):
    _, binding = opened(checkpoints / "bf16-fused")
    bounds = [binding.modules[f"{LAYER}.mlp.gate"], binding.modules[f"{LAYER}.mlp.shared_expert_gate"]]
    linear = make_linear(bounds, load)
    assert isinstance(linear, PlainLinear)
    assert linear.weight.dtype == torch.bfloat16
    assert torch.equal(linear.weight.float(), torch.cat([read_weight(bound) for bound in bounds]))


def test_a_weight_shape_that_is_not_the_models_is_refused_by_name(packed):
    _, binding = opened(packed)
    bounds = [binding.modules[f"{LAYER}.linear_attn.out_proj"]]
    lie = torch.tensor([256, 128])
    with pytest.raises(MismatchError, match=r"out_proj\.weight_shape says \[256, 128\] where the model has"):
        make_linear(bounds, lambda entry: lie if entry.name.endswith("shape") else load(entry))
