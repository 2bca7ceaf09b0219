"""Loading: every tensor into its place once, in the kernels' layouts, with bounded memory; what is off is named.

The kernels' layouts are made by torch alone, so they are checked here on the CPU: a device that is called CUDA chooses
them, and a reader that stays on the CPU brings the tensors.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onebox.checkpoint.bind import Binding, bind
from onebox.checkpoint.source import Checkpoint, open_checkpoint
from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import read_weight
from onebox.formats import dequantize_fp8_block, gptq_to_packed
from onebox.formats.expert_tiles import unpack_down, unpack_gate_up
from onebox.formats.fragments import from_fragments
from onebox.model import experts as experts_module
from onebox.model.build import build_model
from onebox.model.compiled.blocks import to_blocks
from onebox.model.compiled.linear import CompiledLinear
from onebox.model.dummy import HYBRID, DummyParts
from onebox.model.experts import ExpertOf, Int4Experts, make_experts
from onebox.model.linear import DecodeRows, Fp8Linear, IntLinear, PlainLinear, make_linear
from onebox.model.load import LoadFormat, load_model, loading_order
from onebox.spec.errors import MismatchError, UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass
from tests.synthetic import KINDS, gptq_int4_asymmetric, quantised, random_weights, tiny_config, write_checkpoint

CPU = torch.device("cpu")
GPU = torch.device("cuda")
LAYER = "model.language_model.layers.0"


def tensors_in(part: object) -> Iterator[torch.Tensor]:
    """All tensors of a model, in the order of its fields."""
    if isinstance(part, torch.Tensor):
        yield part.to_dense() if part.is_mkldnn else part
    elif isinstance(part, tuple | list):
        for item in part:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from tensors_in(getattr(part, field.name))


def opened(directory: Path) -> tuple[Checkpoint, Binding]:
    checkpoint = open_checkpoint(directory)
    return checkpoint, bind(checkpoint)


def experts_of(binding: Binding, layer: str = LAYER) -> ExpertOf:
    return lambda index, part: binding.modules[f"{layer}.mlp.experts.{index}.{part}"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """An INT4 checkpoint as compressed-tensors packs it."""

    def repack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            words, scales = gptq_to_packed(tensors.pop(name)), tensors.pop(f"{stem}.scales").t()
            del tensors[f"{stem}.qzeros"]
            shape = torch.tensor([words.shape[0], words.shape[1] * 8])
            tensors |= {f"{stem}.weight_packed": words, f"{stem}.weight_scale": scales, f"{stem}.weight_shape": shape}

    return write_checkpoint(tmp_path_factory.mktemp("packed") / "model", "autoround", change=repack)


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
    each_column = DecodeRows(torch.eye(model.spec.hidden_size))
    assert torch.equal(model.lm_head.decode(each_column).T, weights["lm_head.weight"].float())


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


@pytest.mark.parametrize("batch", [1, 3, 100], ids=lambda size: f"{size} at a time")
@pytest.mark.parametrize("kind", ["autoround", "gptq", "packed"])
def test_int4_experts_hold_the_stored_numbers(checkpoints, packed, monkeypatch, kind, batch):
    checkpoint, binding = opened(packed if kind == "packed" else checkpoints / kind)
    expert = experts_of(binding)
    stored_bytes = sum(expert(0, part).nbytes for part in experts_module.EXPERT_PARTS)
    monkeypatch.setattr(experts_module, "_BATCH_BYTES", batch * stored_bytes)
    made = make_experts(expert, checkpoint.spec.num_experts, load)
    assert isinstance(made, Int4Experts)
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


def test_a_weight_shape_that_is_not_the_models_is_refused_by_name(packed):
    _, binding = opened(packed)
    bounds = [binding.modules[f"{LAYER}.linear_attn.out_proj"]]
    lie = torch.tensor([256, 128])
    with pytest.raises(MismatchError, match=r"out_proj\.weight_shape says \[256, 128\] where the model has"):
        make_linear(bounds, lambda entry: lie if entry.name.endswith("shape") else load(entry))


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


def test_dummy_weights_need_no_file_but_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    model = load_model(tmp_path, CPU, torch.float32, LoadFormat.DUMMY)
    assert model.mtp is not None
    spreads = [float(tensor.std()) for tensor in tensors_in(model.stack) if tensor.numel() > 1000]
    assert all(0.015 < spread < 0.025 for spread in spreads)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnreadableError, match=r"config\.json"):
        load_model(tmp_path, CPU, torch.float32, LoadFormat.DUMMY)


class CpuDummy(DummyParts):
    """What is drawn for a GPU, drawn here."""

    def __init__(self, spec) -> None:
        super().__init__(spec, HYBRID, CPU)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 192, "moe_intermediate_size": 64}], ids=["tiles", "no tiles"])
def test_dummy_weights_are_hybrid_where_their_sizes_have_tiles(sizes):
    spec = spec_from_config(tiny_config(**sizes, mtp_num_hidden_layers=0))
    model = build_model(spec, CpuDummy(spec), torch.float32)
    assert model.mtp is None
    mixture = model.stack.layers[0].mixture
    assert isinstance(mixture.experts, Int4Experts) == (not sizes)
    assert isinstance(mixture.shared_gate_up, Fp8Linear)
    assert isinstance(model.lm_head, CompiledLinear if sizes else IntLinear)


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
