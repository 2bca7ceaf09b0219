"""`onebox verify`: every file, every header field and every tensor of a build belongs to its manifest."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.manifest import MANIFEST_NAME, read_manifest
from onebox.checkpoint.recipe import BuildSources, Recipe, open_source
from onebox.checkpoint.source import INDEX_NAME
from onebox.checkpoint.verify import verify_checkpoint
from tests.checkpoint.building import sources
from tests.synthetic import write_checkpoint


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A sharded build with every kind of side file; copies of it are spoilt."""
    root = tmp_path_factory.mktemp("verify")
    base = write_checkpoint(root / "base", "autoround")
    for name in ("chat_template.jinja", "tokenizer_config.json", "preprocessor_config.json", "merges.txt", "LICENSE"):
        (base / name).write_text(json.dumps({"of": name}))
    run_build(plan_build(Recipe(), BuildSources(open_source("base", base)), 2_000_000), root / "built")
    return root / "built"


@pytest.fixture
def out(built, tmp_path) -> Path:
    copy = tmp_path / "out"
    copy.mkdir()
    for path in built.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def differences(directory: Path) -> dict[str, str]:
    return {problem.tensor: problem.kind.value for problem in verify_checkpoint(directory)}


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the header of a shard in its own length, so that no byte of data moves."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    raw = json.dumps(header, separators=(",", ":")).encode()
    assert len(raw) <= length
    path.write_bytes(content[:8] + raw.ljust(length) + content[8 + length :])
    with safe_open(path, "pt") as file:
        list(file.keys())  # still a file that safetensors opens


def first_shard(directory: Path) -> Path:
    return min(directory.glob("model-*.safetensors"))


def test_a_build_is_as_built(out, run_cli):
    assert verify_checkpoint(out) == []
    result = run_cli("verify", out)
    assert result.code == 0
    num_files = len(list(out.iterdir())) - 1
    assert f"all tensors, headers and {num_files} files match the manifest" in result.out


def test_every_file_has_its_record(out):
    manifest = read_manifest(out)
    names = {path.name for path in out.iterdir()} - {MANIFEST_NAME}
    assert {*manifest.files, *manifest.shards} == names
    assert {"chat_template.jinja", "config.json", INDEX_NAME, "LICENSE"} <= set(manifest.files)


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json", "generation_config.json"])
def test_one_flipped_bit_in_any_side_file_is_found(out, name, run_cli):
    content = bytearray((out / name).read_bytes())
    content[len(content) // 2] ^= 1
    (out / name).write_bytes(content)
    assert differences(out) == {name: "value"}
    result = run_cli("verify", out)
    assert result.code == 1
    assert f"{name} has changed since the build" in result.out


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["text_config"]["rope_parameters"].update(rope_theta=10_000_000),
        lambda config: config["text_config"].update(num_experts_per_tok=4),
        lambda config: config["quantization_config"].update(group_size=64),
        lambda config: config.update(unknown_key=1),
    ],
)
def test_an_edited_config_is_found(out, change):
    """Also one that could not be opened any more: verify needs no config."""
    edit_json(out / "config.json", change)
    assert differences(out) == {"config.json": "value"}


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "tokenizer.json", "LICENSE"])
def test_a_deleted_file_is_named(out, name):
    (out / name).unlink()
    assert differences(out) == {name: "missing"}


def test_a_wrong_index_is_found(out):
    def point_elsewhere(index: dict[str, Any]) -> None:
        name = next(iter(index["weight_map"]))
        index["weight_map"][name] = max(index["weight_map"].values())

    edit_json(out / INDEX_NAME, point_elsewhere)
    assert differences(out) == {INDEX_NAME: "value"}


def test_a_changed_dtype_in_a_header_is_found(out):
    shard = first_shard(out)
    name = next(name for name, record in read_manifest(out).tensors.items() if record.dtype == "BF16")
    edit_header(shard, lambda header: header[name].update(dtype="F16"))
    assert differences(out) == {name: "misshapen"}
    assert "was written as BF16" in verify_checkpoint(out)[0].message


def test_a_changed_shape_in_a_header_is_found(out):
    shard = first_shard(out)
    name, record = next((n, r) for n, r in read_manifest(out).tensors.items() if len(r.shape) == 2)
    edit_header(shard, lambda header: header[name].update(shape=list(reversed(record.shape))))
    assert differences(out) == {name: "misshapen"}


def test_any_other_change_of_a_header_is_found(out):
    """Metadata, the order of the entries: no tensor is declared otherwise."""
    shard = first_shard(out)
    edit_header(shard, lambda header: header["__metadata__"].update(format="tf"))
    assert differences(out) == {shard.name: "value"}


def test_two_tensors_that_change_places_are_found(out):
    tensors = read_manifest(out).tensors
    shard = first_shard(out)
    same: dict[tuple[object, ...], list[str]] = {}
    for name, record in tensors.items():
        if record.file == shard.name:
            same.setdefault((record.dtype, record.shape), []).append(name)
    one, two = next(names for names in same.values() if len(names) > 1)[:2]

    def swap(header: dict[str, Any]) -> None:
        header[one], header[two] = header[two], header[one]

    edit_header(shard, swap)
    assert {one, two} <= differences(out).keys()


def test_extra_files_and_directories_are_named(out):
    (out / "notes.txt").write_text("")
    (out / "assets").mkdir()
    save_file({"extra": next(iter(load_file(first_shard(out)).values()))}, out / "extra.safetensors")
    assert differences(out) == dict.fromkeys(("notes.txt", "assets", "extra.safetensors"), "unexpected")


def test_a_missing_or_cut_shard_is_one_problem_not_one_for_each_tensor(out):
    shards = sorted(out.glob("model-*.safetensors"))
    shards[0].unlink()
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    assert differences(out) == {shards[0].name: "missing", shards[1].name: "value"}


def test_an_edited_manifest_is_refused(out, run_cli):
    edit_json(out / MANIFEST_NAME, lambda manifest: manifest["sources"].update(base="somewhere else"))
    result = run_cli("verify", out)
    assert result.code == 2
    assert "edited or damaged" in result.err


# --- manifests of earlier builds ----------------------------------------------------------------------------------


@pytest.fixture
def old(out) -> Path:
    """The same build with the manifest that builds had before: the tensors' bytes and nothing else."""
    value = json.loads((out / MANIFEST_NAME).read_text())
    kept = {key: value[key] for key in ("onebox_version", "fingerprint", "recipe", "sources")}
    fields = ("file", "nbytes", "sha256", "action", "origin")
    tensors = {name: {key: record[key] for key in fields} for name, record in value["tensors"].items()}
    (out / MANIFEST_NAME).write_text(json.dumps({"manifest_version": 1, **kept, "tensors": tensors}))
    return out


def test_an_earlier_manifest_is_verified_as_far_as_it_goes_and_says_what_it_cannot_prove(old, run_cli):
    result = run_cli("verify", old)
    assert result.code == 0
    assert "all tensors match the manifest" in result.out
    note = next(line for line in result.out.splitlines() if line.startswith("note:"))
    for name in ("dtypes and shapes", "config.json", "chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert name in note, name


def test_what_an_earlier_manifest_holds_is_still_found(old):
    shard = first_shard(old)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert list(differences(old).values()) == ["value"]
    edit_json(old / INDEX_NAME, lambda index: index["weight_map"].popitem())
    assert differences(old)[INDEX_NAME] == "index"
    (old / INDEX_NAME).unlink()
    assert differences(old)[INDEX_NAME] == "missing"
    save_file({"extra": next(iter(load_file(shard).values()))}, old / "extra.safetensors")
    assert differences(old)["extra.safetensors"] == "unexpected"


def test_a_manifest_of_a_later_version_is_refused(out, run_cli):
    edit_json(out / MANIFEST_NAME, lambda manifest: manifest.update(manifest_version=3))
    result = run_cli("verify", out)
    assert result.code == 2
    assert "version 3" in result.err


def test_verify_names_the_tensor_that_changed(checkpoints, tmp_path, run_cli):
    out = tmp_path / "out"
    run_build(plan_build(Recipe(), sources(checkpoints, "fp8")), out)
    assert run_cli("verify", out).code == 0
    path = out / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run_cli("verify", out)
    assert result.code == 1
    assert "has changed since the build" in result.out
    assert "1 of" in result.out


def test_verify_finds_missing_and_extra_tensors(checkpoints, tmp_path):
    out = tmp_path / "out"
    run_build(plan_build(Recipe(), sources(checkpoints, "fp8")), out)
    tensors = load_file(out / "model.safetensors")
    tensors["extra"] = tensors.pop("lm_head.weight")
    save_file(tensors, out / "model.safetensors")
    kinds = {problem.tensor: problem.kind.value for problem in verify_checkpoint(out)}
    assert kinds == {"lm_head.weight": "missing", "extra": "unexpected"}


def test_verify_of_a_checkpoint_that_onebox_did_not_build_is_a_sentence(checkpoints, run_cli):
    result = run_cli("verify", checkpoints / "fp8")
    assert result.code == 2
    assert "onebox inspect --deep" in result.err
