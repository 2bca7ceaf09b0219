"""Builds a DFlash drafter in another format: its matrices in INT4 or FP8, its norms as they are.

The output is written beside its place and renamed when complete; `onebox verify` checks it against its manifest. A
drafter is written in seconds, so an interrupted build begins anew.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onebox
from onebox.checkpoint import inputs as inputs_of_build
from onebox.checkpoint.bind import Bound
from onebox.checkpoint.convert import OutputTensor, Unit
from onebox.checkpoint.describe import weight_scheme
from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.drafter import DrafterCheckpoint, bind_drafter, open_drafter
from onebox.checkpoint.inputs import fingerprint, sampled_digest, whole_digest
from onebox.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    json_bytes,
    read_manifest,
    write_bytes,
    write_json,
)
from onebox.checkpoint.output import (
    MARKER_NAME,
    build_lock,
    discard,
    output_directory,
    staging_of,
    sync_directory,
    write_marker,
)
from onebox.checkpoint.recipe import Action, TargetFormat, rounded_form, rounded_tensors
from onebox.checkpoint.rounding import TensorChunk, round_slab, slabs
from onebox.checkpoint.shard import Shard, record_name, write_shard
from onebox.checkpoint.tensors import to_bytes
from onebox.checkpoint.verify import changed_files
from onebox.checkpoint.weights import read_weight
from onebox.spec.errors import MismatchError, UsageError, WriteError
from onebox.spec.weights import Layout, Stored

__all__ = ["DRAFTER_FORMATS", "DrafterBuild", "plan_drafter_build", "run_drafter_build"]

DRAFTER_FORMATS = (TargetFormat.KEEP, TargetFormat.BF16, TargetFormat.FP8, TargetFormat.INT4)
"""The formats of a drafter's matrices."""
_ROLE = "drafter"
_COPIED = ("README.md", "LICENSE")


@dataclass(frozen=True)
class DrafterBuild:
    """Everything that the build of a drafter will write."""

    source: DrafterCheckpoint
    target: TargetFormat
    stored: dict[str, Stored]
    """The format of each module in the output."""
    shard: Shard
    config: dict[str, Any]
    inputs: dict[str, str]

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.inputs)


def plan_drafter_build(directory: Path, target: TargetFormat) -> DrafterBuild:
    """The build of the drafter in `directory`; a conversion that is not possible, or a broken drafter, is refused."""
    if target not in DRAFTER_FORMATS:
        raise UsageError(f"--drafter {target}: a drafter can be {', '.join(DRAFTER_FORMATS)}.")
    source = open_drafter(directory)
    binding = bind_drafter(source)
    fatal = [problem.message for problem in binding.problems if problem.is_fatal]
    if fatal:
        more = f" ({len(fatal)} problems in all: run `onebox inspect {directory}`)" if len(fatal) > 1 else ""
        raise MismatchError(f"The drafter {directory} is not complete: {fatal[0]}{more}")
    stored = {name: _output_form(bound, target) for name, bound in binding.modules.items()}
    units = tuple(_unit(bound, stored[name]) for name, bound in binding.modules.items())
    return DrafterBuild(
        source, target, stored, Shard("model.safetensors", units), _config(source, stored), _inputs(source, target)
    )


def run_drafter_build(plan: DrafterBuild, out: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Manifest:
    """Writes the planned drafter to `out`, or finds that it is there already."""
    out = output_directory(out)
    with build_lock(out):
        done = _finished(plan, out)
        if done is not None:
            on_bytes(plan.nbytes)
            return done
        staging = staging_of(out)
        if staging.exists():
            discard(staging)
        require_disk("The build", staging, plan.nbytes)
        staging.mkdir(parents=True, exist_ok=True)
        write_marker(staging, {})
        records = write_shard(staging, plan.shard, on_bytes)
        manifest = _finish(plan, staging, records)
        if out.exists():
            out.rmdir()
        staging.rename(out)
        sync_directory(out.parent)
        return manifest


def _output_form(bound: Bound, target: TargetFormat) -> Stored:
    is_kept = target is TargetFormat.KEEP or bound.stored.format.value == target.value
    if is_kept or not bound.module.is_matrix or (target is TargetFormat.BF16 and bound.is_plain):
        return bound.stored
    return rounded_form(target, bound)


def _unit(bound: Bound, stored: Stored) -> Unit:
    module = bound.module
    if stored == bound.stored:
        moved = tuple(OutputTensor(entry.name, entry.stored, entry) for entry in bound.tensors.values())
        return Unit(moved, Action.MOVE, module.module_class, _ROLE)
    rounded = rounded_tensors(stored, *module.shape)
    outputs = tuple(OutputTensor(f"{module.name}.{suffix}", tensor) for suffix, tensor in rounded.items())
    return Unit(outputs, Action.QUANTIZE, module.module_class, _ROLE, partial(_round, bound, stored))


def _round(bound: Bound, stored: Stored) -> Iterator[TensorChunk]:
    """The bytes of `rounded_tensors`: codes and scales slab by slab, then the shape of an integer matrix."""
    import torch

    for slab in slabs(bound):
        codes, scales = round_slab(read_weight(slab), stored)
        yield 0, to_bytes(codes)
        yield 1, to_bytes(scales)
    if stored.layout is Layout.PACKED:
        yield 2, to_bytes(torch.tensor(bound.module.shape, dtype=torch.int64))


def _config(source: DrafterCheckpoint, stored: dict[str, Stored]) -> dict[str, Any]:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    ways = sorted({way for way in stored.values() if way.layout is not Layout.PLAIN}, key=str)
    if not ways:
        return config
    if all(way.layout in (Layout.PACKED, Layout.FP8_BLOCK) for way in ways):
        names = {way: [name for name, each in stored.items() if each == way] for way in ways}
        groups = {
            f"group_{number}": {"targets": names[way] if len(ways) > 1 else ["Linear"], **weight_scheme(way)}
            for number, way in enumerate(ways)
        }
        formats = {group["format"] for group in groups.values()}
        described = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
        return {**config, "quantization_config": described}
    return dict(source.config)


def _inputs(source: DrafterCheckpoint, target: TargetFormat) -> dict[str, str]:
    inputs = {"onebox": onebox.__version__, "recipe": json.dumps({_ROLE: target.value})}
    small = [source.directory / "config.json", *_side_files(source)]
    inputs |= {f"{_ROLE}/{path.name}": whole_digest(path) for path in small}
    return inputs | {f"{_ROLE}/{path.name}": sampled_digest(path) for path in source.shards}


def _side_files(source: DrafterCheckpoint) -> list[Path]:
    return [path for path in (source.directory / name for name in _COPIED) if path.is_file()]


def _finished(plan: DrafterBuild, out: Path) -> Manifest | None:
    """The manifest of `out` if this build is there; anything else there is refused."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    other = "something that no build of onebox wrote"
    if (out / MANIFEST_NAME).exists():
        manifest = read_manifest(out)
        if manifest.fingerprint == plan.fingerprint and not changed_files(out, manifest):
            return manifest
        other = f"a build with {inputs_of_build.difference(manifest.inputs, plan.inputs) or 'changed files'}"
    raise WriteError(f"{out} already exists and holds {other}: choose another --out, or remove it first.")


def _finish(plan: DrafterBuild, staging: Path, records: dict[str, TensorRecord]) -> Manifest:
    contents = {path.name: path.read_bytes() for path in _side_files(plan.source)}
    contents["config.json"] = json_bytes(plan.config)
    header = plan.shard.header
    manifest = Manifest(
        onebox_version=onebox.__version__,
        fingerprint=plan.fingerprint,
        recipe={_ROLE: plan.target.value},
        sources={_ROLE: plan.source.directory.resolve().name},
        tensors=records,
        inputs=plan.inputs,
        shards={plan.shard.name: FileRecord(len(header) + plan.nbytes, FileRecord.of(header).sha256)},
        files={name: FileRecord.of(content) for name, content in contents.items()},
    )
    for name, content in contents.items():
        write_bytes(staging / name, content)
    write_json(staging / MANIFEST_NAME, manifest.to_json())
    (staging / record_name(plan.shard)).unlink(missing_ok=True)
    (staging / MARKER_NAME).unlink(missing_ok=True)
    sync_directory(staging)
    return manifest
