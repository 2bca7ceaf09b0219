"""`onebox inspect` over every kind of checkpoint, whole and spoilt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.shapes import SHAPES, named_spec
from onebox.spec.weights import PARTS, Geometry, Layout, StoredTensor, tensor_bytes
from tests.synthetic import KINDS, gptq_int4_asymmetric, tiny_config, write_checkpoint

EXPERT = "model.language_model.layers.1.mlp.experts.2.up_proj"
SHARED = "model.language_model.layers.0.mlp.shared_expert.gate_proj"
FORMATS_OF_EXPERTS = {
    "bf16-fused": "bf16",
    "bf16-per-expert": "bf16",
    "fp8": "fp8 [fp8-block (weight_scale_inv)]",
    "autoround": "int4 g128 [gptq]",
    "gptq": "int4 g128 [gptq]",
    "nvfp4-llmc": "nvfp4 g16 [nvfp4 (compressed-tensors)]",
    "nvfp4-modelopt": "nvfp4 g16 [nvfp4 (modelopt)]",
    "modelopt-mixed": "nvfp4 g16 [nvfp4 (modelopt)]",
    "packed-int3": "int3 g128 [pack-quantized]",
}


@pytest.mark.parametrize("sharded", ["", "-sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_servable_and_its_experts_format_is_told(checkpoints, kind, sharded):
    report = inspect_checkpoint(checkpoints / f"{kind}{sharded}", deep=True)
    assert report.is_servable, report.problems
    experts = next(row for row in report.rows if row.module_class is ModuleClass.EXPERTS)
    down = {"int4 g128 [pack-quantized]": 16} if kind == "packed-int3" else {}
    assert experts.formats == {FORMATS_OF_EXPERTS[kind]: 48 - sum(down.values()), **down}
    assert sum(row.nbytes for row in report.rows) == report.nbytes


def test_mtp_head_that_the_index_does_not_name_is_found_and_said(checkpoints):
    report = inspect_checkpoint(checkpoints / "autoround-sharded")
    assert report.mtp.is_present
    assert report.mtp.is_complete
    assert not report.mtp.is_indexed
    assert report.mtp.has_sound_values is None
    unindexed = {problem.tensor for problem in report.problems if problem.kind == "unindexed"}
    assert "mtp.fc.weight" in unindexed
    assert all(tensor.startswith("mtp.") for tensor in unindexed)
    assert report.is_servable


def test_absent_mtp_head_is_told_with_the_fix(checkpoints, run_cli):
    result = run_cli("inspect", checkpoints / "nvfp4-modelopt")
    assert result.code == 0
    assert "MTP head: missing" in result.out
    assert "--mtp-from" in result.out


def spoilt(tmp_path: Path, kind: str, change, **options) -> Path:
    return write_checkpoint(tmp_path / "spoilt", kind, change=change, **options)


SPOILS = {
    "missing norm": (
        "bf16-fused",
        lambda t: t.pop("model.language_model.layers.2.input_layernorm.weight"),
        "model.language_model.layers.2.input_layernorm.weight is missing",
    ),
    "missing fp8 scale": (
        "fp8",
        lambda t: t.pop(f"{SHARED}.weight_scale_inv"),
        f"{SHARED}.weight_scale_inv is missing: its fp8 weight cannot be read without it",
    ),
    "missing expert": ("autoround", lambda t: t.pop(f"{EXPERT}.qweight"), f"{EXPERT}.weight is missing"),
    "missing int4 scales": ("autoround", lambda t: t.pop(f"{EXPERT}.scales"), f"{EXPERT}.scales is missing"),
    "scale with too few groups": (
        "autoround",
        lambda t: t.update({f"{EXPERT}.scales": t[f"{EXPERT}.scales"][:1].contiguous()}),
        f"{EXPERT}.qzeros has shape",
    ),
    "unknown tensor": (
        "bf16-fused",
        lambda t: t.update({"model.language_model.layers.9.mlp.gate.weight": torch.zeros(4, 4)}),
        "model.language_model.layers.9.mlp.gate.weight belongs to no module",
    ),
    "quantised module that must be plain": (
        "autoround",
        lambda t: t.update({"model.language_model.layers.0.mlp.gate.qweight": torch.zeros(4, dtype=torch.int32)}),
        "model.language_model.layers.0.mlp.gate.qweight belongs to a module that onebox reads as plain",
    ),
    "wrong shape": (
        "bf16-per-expert",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].contiguous()}),
        "lm_head.weight has shape [511, 256] where [512, 256] is expected",
    ),
    "wrong shape of a norm": (
        "bf16-per-expert",
        lambda t: t.update({"mtp.norm.weight": torch.zeros(8)}),
        "mtp.norm.weight has shape [8] where [256] is expected",
    ),
    "fused experts of another size": (
        "bf16-fused",
        lambda t: t.update(
            {"model.language_model.layers.0.mlp.experts.down_proj": torch.zeros(3, 256, 128, dtype=torch.bfloat16)}
        ),
        "model.language_model.layers.0.mlp.experts.down_proj has shape [3, 256, 128]",
    ),
    "wrong dtype": (
        "fp8",
        lambda t: t.update({f"{SHARED}.weight_scale_inv": torch.ones(1, 2, dtype=torch.int32)}),
        f"{SHARED}.weight_scale_inv has dtype I32",
    ),
    "a dtype that is no format": (
        "bf16-fused",
        lambda t: t.update({f"{SHARED}.weight": torch.zeros(128, 256, dtype=torch.int64)}),
        f"{SHARED} is stored as .weight I64, which is not a format that onebox supports",
    ),
    "half an MTP head": ("fp8", lambda t: t.pop("mtp.fc.weight"), "mtp.fc.weight is missing"),
}


@pytest.mark.parametrize("case", SPOILS)
def test_a_spoilt_checkpoint_is_not_servable_and_the_tensor_is_named(tmp_path, run_cli, case):
    kind, change, words = SPOILS[case]
    directory = spoilt(tmp_path, kind, change)
    result = run_cli("inspect", directory)
    assert result.code == 1
    assert words in result.out
    assert "NOT servable" in result.out
    told = json.loads(run_cli("inspect", directory, "--json").out)
    assert not told["servable"]
    assert any(words in problem["message"] and problem["is_fatal"] for problem in told["problems"])


def test_negative_scales_of_integers_are_no_problem(tmp_path, run_cli):
    """AutoRound writes them: the largest weight of a group becomes the code -8, whatever its sign."""
    directory = spoilt(tmp_path, "autoround", lambda t: t[f"{EXPERT}.scales"].neg_())
    found = json.loads(run_cli("inspect", directory, "--deep", "--json").out)
    assert not [problem for problem in found["problems"] if problem["kind"] == "value"]


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


VALUE_SPOILS = {
    "NaN scale": (
        "autoround",
        lambda t: nan(t[f"{EXPERT}.scales"]),
        f"{EXPERT}.scales holds values that are not finite",
    ),
    "zero scale": (
        "fp8",
        lambda t: t[f"{SHARED}.weight_scale_inv"].zero_(),
        f"{SHARED}.weight_scale_inv holds scales that are not positive",
    ),
    "zero scale of integers": (
        "autoround",
        lambda t: t[f"{EXPERT}.scales"].zero_(),
        f"{EXPERT}.scales holds scales of zero",
    ),
    "negative global scale": (
        "nvfp4-llmc",
        lambda t: t[f"{EXPERT}.weight_global_scale"].neg_(),
        f"{EXPERT}.weight_global_scale holds scales that are not positive",
    ),
    "NaN in fp8": (
        "fp8",
        lambda t: t[f"{SHARED}.weight"].view(torch.uint8).view(-1)[7:8].fill_(0x7F),
        f"{SHARED}.weight holds values that are not finite",
    ),
    "infinite norm": (
        "bf16-fused",
        lambda t: t["mtp.norm.weight"].fill_(float("inf")),
        "mtp.norm.weight holds values that are not finite",
    ),
    "constant MTP projection": (
        "bf16-per-expert",
        lambda t: t["mtp.fc.weight"].fill_(0.5),
        "mtp.fc.weight is constant",
    ),
    "constant codes": ("autoround", lambda t: t[f"{EXPERT}.qweight"].fill_(7), f"{EXPERT}.qweight is constant"),
    "group index out of range": (
        "gptq",
        lambda t: t[f"{EXPERT}.g_idx"].fill_(9),
        f"{EXPERT}.g_idx holds group numbers outside its groups",
    ),
}


@pytest.mark.parametrize("case", VALUE_SPOILS)
def test_deep_inspection_finds_values_that_headers_cannot_show(tmp_path, case):
    kind, change, words = VALUE_SPOILS[case]
    directory = spoilt(tmp_path, kind, change)
    assert inspect_checkpoint(directory).is_servable, "headers alone cannot tell"
    report = inspect_checkpoint(directory, deep=True)
    assert next(problem.message for problem in report.problems if problem.is_fatal).startswith(words)
    assert (report.mtp.has_sound_values is False) == ("mtp" in words)


def test_asymmetric_int4_is_servable(tmp_path):
    def change(tensors):
        weight = torch.randn(128, 256)
        tensors.update({f"{EXPERT}.{suffix}": part for suffix, part in gptq_int4_asymmetric(weight).items()})

    assert inspect_checkpoint(spoilt(tmp_path, "autoround", change), deep=True).is_servable


def test_index_that_lies_is_told(tmp_path, run_cli):
    directory = write_checkpoint(tmp_path / "c", "fp8", shards=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    result = run_cli("inspect", directory)
    assert result.code == 1
    assert "model.norm.ghost is listed by" in result.out


def test_a_tensor_in_two_files_is_told(tmp_path, run_cli):
    directory = write_checkpoint(tmp_path / "c", "bf16-fused")
    (directory / "model-copy.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    result = run_cli("inspect", directory)
    assert result.code == 1
    assert "is in both model-copy.safetensors and model.safetensors" in result.out


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json holds a list"),
        (lambda d: (d / "model.safetensors").unlink(), "holds no .safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "model.safetensors is not a whole safetensors file"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_an_unreadable_checkpoint_is_one_sentence_and_exit_2(tmp_path, run_cli, spoil, words):
    directory = write_checkpoint(tmp_path / "c", "bf16-fused")
    spoil(directory)
    result = run_cli("inspect", directory)
    assert result.code == 2
    assert words in result.err
    assert result.out == ""


def test_a_path_that_is_no_directory_is_one_sentence(tmp_path, run_cli):
    (tmp_path / "file").write_text("")
    assert "does not exist" in run_cli("inspect", tmp_path / "absent").err
    assert "is a file" in run_cli("inspect", tmp_path / "file").err


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_type", "llama", "onebox runs 'qwen3_5_moe'"),
        ("frobnicate", 1, "the key frobnicate, which onebox does not know"),
    ],
)
def test_a_config_outside_the_family_is_refused_by_key(tmp_path, run_cli, key, value, words):
    directory = write_checkpoint(tmp_path / "c", "bf16-fused")
    config = {**tiny_config(), key: value}
    (directory / "config.json").write_text(json.dumps(config))
    result = run_cli("inspect", directory)
    assert result.code == 1
    assert words in result.err


def test_inspection_of_headers_never_imports_torch(checkpoints):
    code = (
        "import sys; from pathlib import Path\n"
        "import onebox.cli.main\n"
        "from onebox.checkpoint.inspect import inspect_checkpoint\n"
        f"assert inspect_checkpoint(Path({str(checkpoints / 'autoround')!r})).is_servable\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def full_size_autoround(directory: Path) -> None:
    """Intel's 122B layout at full size: true headers over sparse files, 67 GB that occupy nothing."""
    from onebox.checkpoint.header import write_header

    spec = named_spec("qwen3.5-122b-a10b")
    int4 = {ModuleClass.EXPERTS, ModuleClass.ATTENTION, ModuleClass.DELTA, ModuleClass.DELTA_GATES}
    tensors: list[tuple[str, StoredTensor, int]] = []
    for module in modules(spec):
        if module.module_class in int4 and module.is_matrix:
            rows, columns = module.shape
            geometry = Geometry(rows, columns, columns // 128, 4)
            for part in PARTS[Layout.GPTQ]:
                if part.required:
                    stored = StoredTensor(part.dtypes[0], part.shapes(geometry)[0])
                    tensors.append((f"{module.name}.{part.suffix}", stored, tensor_bytes(stored)))
        else:
            stored = StoredTensor("BF16", module.shape)
            tensors.append((module.plain_tensor, stored, tensor_bytes(stored)))
    directory.mkdir()
    for number in range(15):
        part = tensors[number::15]
        path = directory / f"model-{number:05}-of-00015.safetensors"
        header = write_header(part, {"format": "pt"})
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(len(header) + sum(size for _, _, size in part))
    (directory / "config.json").write_text(json.dumps(SHAPES["qwen3.5-122b-a10b"]))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (directory / name).write_text("{}")


def test_a_122b_checkpoint_is_looked_over_from_its_headers_alone(tmp_path):
    """The tensor count is what a user's tool printed for Intel's checkpoint: it determines what is INT4 there."""
    directory = tmp_path / "intel"
    full_size_autoround(directory)
    report = inspect_checkpoint(directory)
    assert report.is_servable
    assert report.num_tensors == 112_901
    assert report.nbytes > 70e9
    assert report.mtp.is_complete


def test_a_head_in_bf16_behind_quantised_experts_is_a_note_with_its_cost(checkpoints, tmp_path, run_cli):
    """The bytes, the projected speeds and the command; gone once that command has run."""
    shown = run_cli("inspect", checkpoints / "autoround")
    note = next(line for line in shown.out.splitlines() if line.startswith("note: The MTP head is stored in bf16."))
    assert "A step with 2 drafts reads" in note
    assert "tok/s instead of" in note
    assert "projected for dgx-spark at acceptance 0.9, 0.72" in note
    assert "`onebox build --base DIR --out NEW` quantises it" in note
    assert json.loads(run_cli("inspect", checkpoints / "autoround", "--json").out)["mtp"]["cost"] in note
    assert run_cli("build", "--base", checkpoints / "autoround", "--out", tmp_path / "new").code == 0
    for directory in (tmp_path / "new", checkpoints / "fp8", checkpoints / "bf16-fused"):
        assert json.loads(run_cli("inspect", directory, "--json").out)["mtp"]["cost"] is None, directory
