"""Experts in the kernels' layouts hold the stored numbers and compute what the same experts in float32 do.

Nothing here needs a GPU: `read` decides where tensors lie, and on the host the kernels' twins run.
"""

from pathlib import Path

import pytest
import torch

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import read_weight
from onebox.formats import quantize_fp8_block, quantize_fp8_rows
from onebox.formats.expert_tiles import tile_bits, unpack_down, unpack_gate_up
from onebox.kernels.experts.cases import draw_routing
from onebox.model import experts as experts_module
from onebox.model.cpu import CpuExperts
from onebox.model.experts import (
    ExpertOf,
    Fp8Experts,
    IntExperts,
    Nvfp4Experts,
    PlainExperts,
    make_experts,
    plain_expert,
    stack,
)
from onebox.model.linear import DecodeActivations
from onebox.spec.errors import UnsupportedError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import Module, ModuleClass
from onebox.spec.weights import Layout, Stored, WeightFormat
from tests.model.opened import LAYER, opened
from tests.synthetic import (
    fp8_block,
    fp8_tensor,
    gptq_int4_asymmetric,
    nvfp4_llmc,
    nvfp4_modelopt,
    quantised,
    random_weights,
    tiny_config,
    write_checkpoint,
)

EXPERTS, HIDDEN, INNER = 3, 144, 80
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def fp8_half_block(weight):
    codes, scale = quantize_fp8_block(weight)
    return {"weight": codes, "weight_scale": (scale * 64).to(torch.float16)}  # half's small numbers are coarse


def fp8_row(weight):
    codes, scale = quantize_fp8_rows(weight, torch.bfloat16)
    return {"weight": codes, "weight_scale": scale}


FORMATS = {
    "fp8 block inverse": (Layout.FP8_BLOCK_INV, WeightFormat.FP8, fp8_block),
    "fp8 block of half scales": (Layout.FP8_BLOCK, WeightFormat.FP8, fp8_half_block),
    "fp8 row": (Layout.FP8_ROW, WeightFormat.FP8, fp8_row),
    "fp8 tensor": (Layout.FP8_TENSOR, WeightFormat.FP8, fp8_tensor),
    "nvfp4 divides": (Layout.NVFP4_DIVIDES, WeightFormat.NVFP4, nvfp4_llmc),
    "nvfp4 multiplies": (Layout.NVFP4_MULTIPLIES, WeightFormat.NVFP4, nvfp4_modelopt),
}


class Shelf:
    """Experts in memory, under the names a checkpoint would give them."""

    def __init__(self, names: list[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.bounds: dict[tuple[int, str], Bound] = {}
        draw = torch.Generator().manual_seed(0)
        for index in range(EXPERTS):
            for part, shape in SHAPES.items():
                # Every matrix has a size of its own, so that a scale in the wrong place is seen.
                weight = torch.randn(shape, generator=draw) * (len(self.bounds) + 1) / 20
                self._add(index, part, weight, *FORMATS[names[len(self.bounds) % len(names)]])

    def _add(self, index, part, weight, layout, weight_format, quantise) -> None:
        name, entries = f"experts.{index}.{part}", {}
        for suffix, tensor in quantise(weight).items():
            self.tensors[f"{name}.{suffix}"] = tensor
            entries[suffix] = TensorEntry(f"{name}.{suffix}", "", tuple(tensor.shape), Path(), 0, tensor.nbytes)
        module = Module(name, ModuleClass.EXPERTS, tuple(weight.shape), True, f"{name}.weight")
        group = 16 if weight_format is WeightFormat.NVFP4 else 0
        self.bounds[index, part] = Bound(module, Stored(weight_format, layout, group), entries)

    def make(self):
        return make_experts(lambda *key: self.bounds[key], EXPERTS, self.read)

    def plain(self):
        """The same as float32 numbers, as a CPU runs them."""
        each = (plain_expert(lambda *key: self.bounds[key], i, self.read, 1, torch.float32) for i in range(EXPERTS))
        return CpuExperts(*stack(((gate_up.mT, down.mT) for gate_up, down in each), EXPERTS))

    def read(self, entry: TensorEntry) -> torch.Tensor:
        return self.tensors[entry.name].clone()


def run(experts, form: str):
    """What five rows become, by `decode` or by `prefill`."""
    draw = torch.Generator().manual_seed(1)
    ids, weights = draw_routing(5, 2, EXPERTS, draw)
    x = torch.randn(5, HIDDEN, generator=draw)
    return experts.decode(DecodeActivations(x), ids, weights) if form == "decode" else experts.prefill(x, ids, weights)


@pytest.mark.parametrize(("form", "tolerance"), [("decode", 2e-5), ("prefill", 2e-2)])
@pytest.mark.parametrize("name", FORMATS)
def test_stored_experts_are_those_of_the_checkpoint(name, form, tolerance):
    shelf = Shelf([name])
    expected = run(shelf.plain(), form)
    found = run(shelf.make(), form)
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.parametrize("name", FORMATS)
def test_experts_stay_in_the_bytes_they_are_stored_in(name):
    experts = Shelf([name]).make()
    assert isinstance(experts, Nvfp4Experts if "nvfp4" in name else Fp8Experts)
    numbers = EXPERTS * 3 * INNER * HIDDEN
    assert experts.gate_up.nbytes + experts.down.nbytes == (numbers // 2 if "nvfp4" in name else numbers)


def test_experts_of_several_formats_become_plain():
    shelf = Shelf(["fp8 block inverse", "nvfp4 divides", "fp8 row", "fp8 tensor"])
    experts = shelf.make()
    assert isinstance(experts, PlainExperts)
    expected = run(shelf.plain(), "decode")
    found = run(experts, "decode")
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-2


def experts_of(binding: Binding, layer: str = LAYER) -> ExpertOf:
    return lambda index, part: binding.modules[f"{layer}.mlp.experts.{index}.{part}"]


@pytest.mark.parametrize("batch", [1, 3, 100], ids=lambda size: f"{size} at a time")
@pytest.mark.parametrize("kind", ["autoround", "gptq", "packed", "packed-int3"])
def test_integer_experts_hold_the_stored_numbers(checkpoints, packed, monkeypatch, kind, batch):
    checkpoint, binding = opened(packed if kind == "packed" else checkpoints / kind)
    expert = experts_of(binding)
    stored_bytes = sum(expert(0, part).nbytes for part in experts_module.EXPERT_PARTS)
    monkeypatch.setattr(experts_module, "_BATCH_BYTES", batch * stored_bytes)
    made = make_experts(expert, checkpoint.spec.num_experts, load)
    assert isinstance(made, IntExperts)
    assert tile_bits(made.gate_up) == (3 if kind == "packed-int3" else 4)
    assert tile_bits(made.down) == 4
    for unpacked, parts in (
        (unpack_gate_up(made.gate_up, made.gate_up_scale), ("gate_proj", "up_proj")),
        (unpack_down(made.down, made.down_scale), ("down_proj",)),
    ):
        codes, scales = unpacked
        found = codes.float() * scales.float().repeat_interleave(128, dim=2)
        for index in range(checkpoint.spec.num_experts):
            assert torch.equal(found[index], torch.cat([read_weight(expert(index, part)) for part in parts]))


def test_zero_points_are_refused_by_name(tmp_path):
    spec = spec_from_config(tiny_config())
    asymmetric = quantised(spec, random_weights(spec), {ModuleClass.EXPERTS}, gptq_int4_asymmetric)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: asymmetric[name] for name in tensors if name in asymmetric}

    checkpoint, binding = opened(write_checkpoint(tmp_path / "model", "gptq", change=change))
    with pytest.raises(UnsupportedError, match=r"experts\.0\.gate_proj is stored as int4 .* symmetric INT4"):
        make_experts(experts_of(binding), checkpoint.spec.num_experts, load)


def test_columns_in_an_order_of_their_own_are_refused_by_name(tmp_path):
    def reorder(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{LAYER}.mlp.experts.2.gate_proj.g_idx"
        tensors[name] = tensors[name].flip(0)

    checkpoint, binding = opened(write_checkpoint(tmp_path / "model", "gptq", change=reorder))
    with pytest.raises(UnsupportedError, match=r"experts\.0\.gate_proj is stored as int4"):
        make_experts(experts_of(binding), checkpoint.spec.num_experts, load)
