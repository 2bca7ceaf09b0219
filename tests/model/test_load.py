"""Loading: every tensor into its place once, in the kernels' layouts, with bounded memory; what is off is named.

The kernels' layouts are made by torch alone, so they are checked here on the CPU: a device that is called CUDA chooses
them, and a reader that stays on the CPU brings the tensors.
"""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from onebox.model.compiled.blocks import to_blocks
from onebox.model.linear import DecodeActivations
from onebox.model.load import LoadFormat, load_model, loading_order
from onebox.spec.errors import MismatchError, UnreadableError, UsageError
from onebox.spec.model import spec_from_config
from tests.model.opened import CPU, LAYER, opened, tensors_in
from tests.synthetic import KINDS, random_weights, tiny_config, write_checkpoint

GPU = torch.device("cuda")


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
