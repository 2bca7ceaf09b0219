"""Loading: every tensor into its place once, in the kernels' layouts, with bounded memory; what is off is named.

The kernels' layouts are made by torch alone, so they are checked here on the CPU: a device that is called CUDA chooses
them, and a reader that stays on the CPU brings the tensors.
"""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.model.compiled.blocks import to_blocks
from onebox.model.linear import DecodeActivations
from onebox.model.load import LoadFormat, load_model, loading_order, model_without_weights
from onebox.spec.conversion import LoadConversion
from onebox.spec.errors import MismatchError, UnreadableError, UsageError
from onebox.spec.model import spec_from_config
from tests.model.opened import CPU, LAYER, opened, packed_model, tensors_in
from tests.synthetic import KINDS, random_weights, tiny_config, write_checkpoint

GPU = torch.device("cuda")
HEADS = LoadConversion.parse("int8", "int4")


@pytest.mark.parametrize("kind", [*KINDS, "fp8-sharded"])
def test_every_tensor_but_those_of_the_tower_and_of_activations_is_in_the_order_once(checkpoints, kind):
    checkpoint, binding = opened(checkpoints / kind)
    asked = [entry for group in loading_order(checkpoint.spec, binding) for entry in group]
    assert len({entry.name for entry in asked}) == len(asked)
    left_out = sum(entry.nbytes for entry in checkpoint.tensors.values()) - sum(entry.nbytes for entry in asked)
    known = [
        entry.nbytes
        for name, entry in checkpoint.tensors.items()
        if name.startswith("model.visual.") or name.endswith(("input_scale", "input_global_scale"))
    ]
    assert left_out == sum(known) > 0


@pytest.mark.parametrize("kind", ["bf16-fused-sharded", "autoround", "modelopt-mixed"])
def test_every_load_format_gives_the_same_model(checkpoints, kind):
    pytest.importorskip("fastsafetensors")
    models = [load_model(checkpoints / kind, CPU, torch.float32, LoadFormat.parse(name)) for name in LoadFormat]
    auto, staged, fast, dummy = (list(tensors_in(model)) for model in models)
    assert len(auto) > 50
    for one, two, three in zip(auto, staged, fast, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert [(tensor.shape, tensor.dtype) for tensor in dummy] == [(tensor.shape, tensor.dtype) for tensor in auto]


@pytest.mark.parametrize("kind", ["bf16-fused", "bf16-per-expert"])
def test_numbers_are_at_their_places(checkpoints, kind):
    """Where experts are stored does not change the model; its parts are the stored numbers."""
    weights = random_weights(spec_from_config(tiny_config()))
    model = load_model(checkpoints / kind, CPU, torch.float32)
    experts = model.stack.layers[0].plain.mixture.experts
    for index in range(4):
        gate, up, down = (
            weights[f"{LAYER}.mlp.experts.{index}.{part}.weight"].float()
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(experts.gate_up[index], to_blocks(torch.cat([gate, up]).T))
        assert torch.equal(experts.down[index], to_blocks(down.T))
    assert torch.equal(model.embedding, weights["model.language_model.embed_tokens.weight"].float())
    each_column = DecodeActivations(torch.eye(model.spec.hidden_size))
    assert torch.equal(model.lm_head.decode(each_column).T, weights["lm_head.weight"].float())


@pytest.fixture(scope="module")
def built_heads(checkpoints, tmp_path_factory):
    """The BF16 checkpoint with an INT8 LM head and an INT4 MTP layer, as `onebox build` writes it."""
    out = tmp_path_factory.mktemp("heads") / "out"
    recipe = Recipe(lm_head=TargetFormat.INT8, mtp=TargetFormat.INT4)
    run_build(plan_build(recipe, BuildSources(open_source("base", checkpoints / "bf16-fused"))), out)
    return out


def check_same_tensors(one, two):
    pairs = list(zip(tensors_in(one), tensors_in(two), strict=True))
    assert len(pairs) > 50
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_heads_converted_while_loading_are_those_of_a_build(checkpoints, built_heads):
    """As a CPU computes with them, and in the layouts of the kernels."""
    base = checkpoints / "bf16-fused"
    on_cpu = [load_model(base, CPU, torch.float32, conversion=HEADS), load_model(built_heads, CPU, torch.float32)]
    check_same_tensors(*on_cpu)
    check_same_tensors(packed_model(base, HEADS), packed_model(built_heads))
    plain = load_model(base, CPU, torch.float32)
    each_column = DecodeActivations(torch.eye(plain.spec.hidden_size))
    assert not torch.equal(plain.lm_head.decode(each_column), on_cpu[0].lm_head.decode(each_column))


@pytest.mark.parametrize("name", ["safetensors", "fastsafetensors"])
def test_heads_are_converted_whatever_reads_them(checkpoints, built_heads, name):
    if name == "fastsafetensors":
        pytest.importorskip("fastsafetensors")
    base, load_format = checkpoints / "bf16-fused-sharded", LoadFormat.parse(name)
    model = load_model(base, CPU, torch.float32, load_format, conversion=HEADS)
    check_same_tensors(model, load_model(built_heads, CPU, torch.float32))


def test_kernels_are_compiled_for_the_formats_after_loading(checkpoints, built_heads):
    """Without weights: the same shapes and dtypes as those of a build."""
    models = [
        model_without_weights(checkpoints / "bf16-fused", torch.bfloat16, LoadFormat.AUTO, conversion=HEADS),
        model_without_weights(built_heads, torch.bfloat16, LoadFormat.AUTO),
    ]
    assert pickle.dumps(models[0]) == pickle.dumps(models[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16-fused", "bf16-per-expert", "autoround", "nvfp4-llmc"])
@pytest.mark.parametrize("mtp", ["int4", "fp8"])
def test_a_gpu_converts_to_the_bits_of_a_build(checkpoints, tmp_path, kind, mtp):
    """Rounded on the CPU in both, and brought to the GPU by different ways."""
    recipe = Recipe(lm_head=TargetFormat.INT8, mtp=TargetFormat(mtp))
    run_build(plan_build(recipe, BuildSources(open_source("base", checkpoints / kind))), tmp_path / "out")
    conversion = LoadConversion.parse("int8", mtp)
    check_same_tensors(load_model(checkpoints / kind, GPU, conversion=conversion), load_model(tmp_path / "out", GPU))


def test_absent_and_leftover_tensors_are_errors_by_name(tmp_path):
    absent, leftover = f"{LAYER}.input_layernorm.weight", "model.language_model.surprise"
    write_checkpoint(tmp_path / "absent", "fp8", change=lambda tensors: tensors.pop(absent))
    write_checkpoint(tmp_path / "left", "fp8", change=lambda tensors: tensors.update({leftover: torch.ones(3)}))
    with pytest.raises(MismatchError, match=f"^{absent} is missing"):
        load_model(tmp_path / "absent", CPU)
    with pytest.raises(MismatchError, match=f"^{leftover} belongs to no module"):
        load_model(tmp_path / "left", CPU)


def test_a_bound_tensor_that_no_layer_takes_is_an_error_by_name(checkpoints):
    checkpoint, binding = opened(checkpoints / "fp8")
    spec = dataclasses.replace(checkpoint.spec, tie_word_embeddings=True)
    with pytest.raises(MismatchError, match=r"^lm_head\.weight belongs to no layer"):
        loading_order(spec, binding)


def test_a_truncated_file_is_named(tmp_path):
    directory = write_checkpoint(tmp_path / "model", "fp8")
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(UnreadableError, match=r"model\.safetensors is not a whole safetensors file: it is truncated"):
        load_model(directory, CPU)


def test_an_unknown_load_format_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="tensorizer is not known: use auto, safetensors, fastsafetensors, dummy"):
        LoadFormat.parse("tensorizer")


MEASURE = """
import sys, torch
from pathlib import Path
from onebox.model.load import LoadFormat, load_model

def peak_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

load_model(Path(sys.argv[1]), torch.device("cpu"), torch.float32)
before = peak_bytes()
model = load_model(Path(sys.argv[2]), torch.device("cpu"), torch.float32)
print(peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about memory")
def test_loading_takes_the_model_one_buffer_and_one_group_of_memory(checkpoints, tmp_path):
    """float32 tensors are their own final layout here: whatever is beyond their size is the price of loading."""
    from onebox.checkpoint.header import write_header
    from onebox.spec.modules import modules
    from onebox.spec.weights import StoredTensor

    config = tiny_config(hidden_size=1024, num_experts=32, moe_intermediate_size=256, vocab_size=8192)
    config.pop("vision_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = [
        (module.plain_tensor, StoredTensor("F32", module.shape), 4 * module.numel)
        for module in modules(spec_from_config(config))
    ]
    total = sum(nbytes for *_, nbytes in tensors)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(write_header(tensors, {}))
        file.truncate(file.tell() + total)  # a hole: zeros that take no room on the disk
    command = [sys.executable, "-c", MEASURE, str(checkpoints / "bf16-fused"), str(tmp_path)]
    beyond = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) - total
    staging, group, margin = 128 << 20, 64 << 20, 48 << 20
    assert total > 2 * (staging + group + margin), "a second copy would be told from the buffer"
    assert beyond <= staging + group + margin


@pytest.mark.gpu
def test_loading_to_a_gpu_leaves_nothing_beside_the_model(checkpoints):
    load_model(checkpoints / "autoround", GPU)
    before = torch.cuda.memory_allocated()
    model = load_model(checkpoints / "autoround", GPU)
    # The allocator hands out blocks of 512 bytes, and sometimes a little more.
    held = sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors_in(model))
    assert torch.cuda.memory_allocated() - before <= 1.05 * held


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "autoround", "nvfp4-llmc"])
def test_fastsafetensors_gives_the_same_model_on_a_gpu(checkpoints, kind):
    pytest.importorskip("fastsafetensors")
    staged, fast = (
        load_model(checkpoints / kind, GPU, load_format=LoadFormat.parse(name))
        for name in ("safetensors", "fastsafetensors")
    )
    for one, two in zip(tensors_in(staged), tensors_in(fast), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
