"""Weights converted while they are loaded: what a build would have written, bit for bit, without writing it."""

from pathlib import Path

import pytest
import torch

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.conversion import convert_binding
from onebox.checkpoint.converting import Converter, converted_order
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.staging import StagedReader, place_of
from onebox.checkpoint.tensors import load
from onebox.checkpoint.weights import weight_tensors
from onebox.planner.presets import named_preset
from onebox.spec.conversion import LoadConversion
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from tests.synthetic import fuse, tiny_config, write_checkpoint

CPU = torch.device("cpu")
BOTH = LoadConversion.parse("int8", "int4")


def built(base: Path, out: Path, mtp: TargetFormat = TargetFormat.INT4) -> Path:
    recipe = Recipe(lm_head=TargetFormat.INT8, mtp=mtp)
    run_build(plan_build(recipe, BuildSources(open_source("base", base))), out)
    return out


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    is_alike = one.dtype == two.dtype and one.shape == two.shape
    return is_alike and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", ["bf16-fused", "bf16-per-expert", "autoround", "gptq", "nvfp4-llmc"])
@pytest.mark.parametrize("mtp", [TargetFormat.INT4, TargetFormat.FP8])
def test_every_tensor_is_the_one_that_a_build_writes(checkpoints, tmp_path, kind, mtp):
    conversion = LoadConversion.parse("int8", mtp.value)
    binding, converted = convert_binding(bind(open_checkpoint(checkpoints / kind)), conversion)
    written = open_checkpoint(built(checkpoints / kind, tmp_path / "out", mtp)).tensors
    modules = [bound for bound in binding.modules.values() if bound.module.module_class in conversion.formats]
    groups = [list(weight_tensors(bound).values()) for bound in modules]
    with (
        StagedReader(converted_order(groups, converted), CPU) as reader,
        Converter(reader.read, converted, groups, CPU) as converter,
    ):
        for entry in (entry for group in groups for entry in group):
            assert written[entry.name].stored == entry.stored
            assert same_bits(converter.read(entry), load(written[entry.name])), entry.name
    assert len(converted) == sum(len(group) for group in groups) > 40


def test_slabs_are_read_one_by_one(tmp_path, monkeypatch):
    """The head is never in memory as it is stored: each slab is read, rounded and dropped."""
    monkeypatch.setattr("onebox.checkpoint.rounding._SLAB_BYTES", 1)  # slabs of one block of rows
    base = write_checkpoint(tmp_path / "base", "bf16-fused")
    expected = load(open_checkpoint(built(base, tmp_path / "out")).tensors["lm_head.weight_packed"])
    binding, converted = convert_binding(bind(open_checkpoint(base)), LoadConversion.parse("int8"))
    entry = binding.modules["lm_head"].tensors["weight_packed"]
    sizes: list[int] = []

    def read(slab):
        sizes.append(slab.nbytes)
        return load(slab)

    with Converter(read, converted, [[entry]], CPU) as converter:
        assert same_bits(converter.read(entry), expected)
    assert sizes == [2 * 128 * 256] * 4
    assert len(converted_order([[entry]], converted)[0]) == 4


def test_fused_experts_of_the_head_are_converted_too(tmp_path):
    from safetensors.torch import load_file, save_file

    from onebox.spec.model import spec_from_config

    base = write_checkpoint(tmp_path / "base", "bf16-per-expert")
    save_file(fuse(spec_from_config(tiny_config()), load_file(base / "model.safetensors")), base / "model.safetensors")
    binding, converted = convert_binding(bind(open_checkpoint(base)), BOTH)
    written = open_checkpoint(built(base, tmp_path / "out")).tensors
    name = "mtp.layers.0.mlp.experts.3.down_proj.weight_packed"
    entry = binding.modules[name.rpartition(".")[0]].tensors["weight_packed"]
    with Converter(load, converted, [[entry]], CPU) as converter:
        assert same_bits(converter.read(entry), load(written[name]))


def test_bytes_are_counted_as_they_are_after_loading(checkpoints, tmp_path):
    """From headers, and predicted for a model by name."""
    base = checkpoints / "bf16-per-expert"
    found = inspect_checkpoint(base, conversion=BOTH).class_bytes
    assert found == inspect_checkpoint(built(base, tmp_path / "out")).class_bytes
    assert found != inspect_checkpoint(base).class_bytes
    predicted = named_preset("bf16").weight_bytes(inspect_checkpoint(base).spec, BOTH)
    for kind in BOTH.formats:
        assert predicted[kind] == found[kind], kind


def test_what_has_the_format_already_is_left_alone(checkpoints, tmp_path):
    out = built(checkpoints / "bf16-fused", tmp_path / "out")
    assert convert_binding(bind(open_checkpoint(out)), BOTH)[1] == {}


@pytest.mark.parametrize(
    ("kind", "conversion", "error", "words"),
    [
        ("fp8", ("keep", "int4"), UnsupportedError, r"--mtp-format int4 .* mtp\.layers\.0\.\S+ is stored as fp8"),
        ("modelopt-mixed", ("int8", "keep"), UnsupportedError, "--lm-head int8 .* lm_head is stored as nvfp4"),
        ("nvfp4-modelopt", ("keep", "int4"), UsageError, "--mtp-format int4 has nothing to act on"),
    ],
)
def test_what_is_quantised_otherwise_or_absent_is_refused(checkpoints, kind, conversion, error, words):
    with pytest.raises(error, match=words):
        convert_binding(bind(open_checkpoint(checkpoints / kind)), LoadConversion.parse(*conversion))


def test_a_tied_head_has_none_of_its_own(tmp_path):
    base = write_checkpoint(tmp_path / "tied", "bf16-fused", config={**tiny_config(), "tie_word_embeddings": True})
    with pytest.raises(UsageError, match="--lm-head int8 has nothing to act on: the checkpoint has no lm head of its"):
        convert_binding(bind(open_checkpoint(base)), LoadConversion.parse("int8"))


def test_unknown_formats_are_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="--lm-head int4 is not known while loading: give keep or int8"):
        LoadConversion.parse("int4")
    with pytest.raises(UsageError, match=r"--mtp-format nvfp4 .* give keep, int4 or fp8"):
        LoadConversion.parse("keep", "nvfp4")


def test_a_nan_is_refused_with_the_modules_name(tmp_path):
    def spoil(tensors):
        tensors["lm_head.weight"][5, 5] = float("nan")

    base = write_checkpoint(tmp_path / "base", "bf16-fused", change=spoil)
    binding, converted = convert_binding(bind(open_checkpoint(base)), LoadConversion.parse("int8"))
    entry = binding.modules["lm_head"].tensors["weight_packed"]
    with Converter(load, converted, [[entry]], CPU) as converter, pytest.raises(UnsupportedError, match="lm_head"):
        converter.read(entry)


def test_a_tensor_is_made_once_and_torch_keeps_its_threads(tmp_path):
    base = write_checkpoint(tmp_path / "base", "bf16-fused")
    binding, converted = convert_binding(bind(open_checkpoint(base)), LoadConversion.parse("int8"))
    entry = binding.modules["lm_head"].tensors["weight_packed"]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Converter(load, converted, [[entry]], CPU) as converter:
            converter.read(entry)
            with pytest.raises(MismatchError, match="asked for twice"):
                converter.read(entry)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_slabs_are_loaded_to_the_host_for_every_device(checkpoints):
    """They are rounded there, as a build rounds them; only the new tensors go to the device."""
    binding, converted = convert_binding(bind(open_checkpoint(checkpoints / "bf16-fused")), BOTH)
    order = converted_order([list(bound.tensors.values()) for bound in binding.modules.values()], converted)
    places = {entry.name: place_of(entry, torch.device("cuda")).type for group in order for entry in group}
    assert {place for name, place in places.items() if name.startswith("lm_head.weight[")} == {"cpu"}
    assert places["model.language_model.embed_tokens.weight"] == "cuda"
