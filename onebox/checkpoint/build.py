"""Builds a checkpoint from a recipe and its sources: plan, check, write shards, write index and manifest.

The output is written to `OUT.partial` and renamed to `OUT` when complete, so `OUT` is either absent or complete, even
if a build is interrupted. Shards that an interrupted build has finished are not written again.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onebox
from onebox.checkpoint import inputs as inputs_of_build
from onebox.checkpoint.calibrated import Calibration
from onebox.checkpoint.convert import Unit, make_units
from onebox.checkpoint.describe import describe, is_native, settle
from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.draft_vocab import DRAFT_VOCAB_FILE, chosen_draft_vocab, draft_vocab_unit
from onebox.checkpoint.hybrid import HYBRID_KEY
from onebox.checkpoint.inputs import build_inputs, side_files, stamps
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
from onebox.checkpoint.match import check_same_model
from onebox.checkpoint.output import (
    MARKER_NAME,
    build_lock,
    discard,
    is_empty,
    output_directory,
    read_marker,
    staging_of,
    sync_directory,
    write_marker,
)
from onebox.checkpoint.recipe import BuildSources, ModuleChoice, Recipe, choose
from onebox.checkpoint.shard import Shard, read_record, record_name, split_shards, write_shard
from onebox.checkpoint.source import INDEX_NAME
from onebox.checkpoint.verify import changed_files
from onebox.spec.draft_vocab import D2T_TENSOR, DRAFT_VOCAB_KEY
from onebox.spec.errors import MismatchError, UnreadableError, WriteError
from onebox.spec.modules import ModuleClass

__all__ = ["BuildPlan", "can_resume", "finished_build", "output_bytes", "plan_build", "run_build"]

DEFAULT_SHARD_BYTES = 2 << 30
_MAX_WRITERS = 4
# Space that the file system may need in addition to the data.
_DISK_MARGIN_BYTES = 64 << 20
_CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class BuildPlan:
    """Everything a build will write, computed before the first byte is written."""

    recipe: Recipe
    sources: BuildSources
    choices: list[ModuleChoice]
    shards: list[Shard]
    config: dict[str, Any]
    is_native: bool
    side_files: list[Path]
    """The base's files that are copied."""
    inputs: dict[str, str]
    """A digest of each input by name (`inputs.py`)."""
    stamps: dict[str, int]
    """When each shard of the sources was last changed."""
    draft_vocab: tuple[int, ...] = ()
    """The tokens that the MTP head drafts from, as listed in the output; empty: it lists none."""
    calibration: Calibration | None = None

    @property
    def fingerprint(self) -> str:
        """Identifies recipe and sources."""
        return inputs_of_build.fingerprint(self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def units(self) -> list[Unit]:
        return [unit for shard in self.shards for unit in shard.units]

    @property
    def class_bytes(self) -> dict[ModuleClass, int]:
        """Output bytes per module class."""
        result: dict[ModuleClass, int] = {}
        for unit in self.units:
            result[unit.module_class] = result.get(unit.module_class, 0) + unit.nbytes
        return result


def plan_build(
    recipe: Recipe,
    sources: BuildSources,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    draft_vocab: Sequence[int] | None = None,
    calibration: Calibration | None = None,
) -> BuildPlan:
    """Selects the source and format of each module and splits the output into shards.

    Rejects sources of different models and conversions that are not possible. `draft_vocab` are the tokens that the MTP
    head drafts from; None: as in its source, empty: no list.
    """
    check_same_model(sources.all())
    if sources.mtp and not any(sources.mtp.binding.of_class(*(kind for kind in ModuleClass if kind.in_mtp))):
        raise MismatchError(
            f"{sources.mtp.checkpoint.directory} holds no MTP head (mtp.*) to graft: name another source."
        )
    chosen = choose(recipe, sources)
    native = is_native(chosen, sources.base)
    choices = settle(chosen, native=native)
    listed = chosen_draft_vocab(draft_vocab, choices)
    units = make_units(choices, relabel=not native, calibration=calibration)
    shards = split_shards(units, shard_bytes)
    if listed:
        shards.append(Shard(DRAFT_VOCAB_FILE, (draft_vocab_unit(listed),)))
    config = _with_draft_vocab(_config(choices, sources, native=native), len(listed))
    copied = side_files(sources.base, is_native=native)
    inputs = build_inputs(recipe, sources, shard_bytes, copied) | (calibration.inputs if calibration else {})
    if draft_vocab is not None:
        inputs["draft_vocab"] = hashlib.sha256(repr(listed).encode()).hexdigest()
    return BuildPlan(
        recipe, sources, choices, shards, config, native, copied, inputs, stamps(sources), listed, calibration
    )


def _with_draft_vocab(config: dict[str, Any], size: int) -> dict[str, Any]:
    """The config with the size of the list, beside the MTP head's number of layers; 0: with none."""
    if "text_config" in config:
        return {**config, "text_config": _with_draft_vocab(config["text_config"], size)}
    own = {key: value for key, value in config.items() if key != DRAFT_VOCAB_KEY}
    return {**own, DRAFT_VOCAB_KEY: size} if size else own


def _config(choices: list[ModuleChoice], sources: BuildSources, *, native: bool) -> dict[str, Any]:
    config = dict(sources.base.checkpoint.config)
    config.pop("quantization_config", None)
    config.pop(HYBRID_KEY, None)
    if any(choice.module.module_class.in_mtp for choice in choices) and "text_config" in config:
        config["text_config"] = {**config["text_config"], "mtp_num_hidden_layers": 1}
    quantization = describe(choices, sources.base, native=native)
    return {**config, "quantization_config": quantization} if quantization else config


def run_build(
    plan: BuildPlan, out: Path, *, restart: bool = False, on_bytes: Callable[[int], None] = lambda _: None
) -> Manifest:
    """Writes the planned checkpoint to `out`. Resumes an interrupted build of the same plan; `restart` discards it."""
    try:
        out = output_directory(out)
        # Before the lock too: a complete build may lie where nothing can be written.
        done = finished_build(plan, out)
        if done is None:
            with build_lock(out):
                done = finished_build(plan, out)
                if done is None:
                    return _build(plan, out, restart=restart, on_bytes=on_bytes)
        on_bytes(plan.nbytes)
        return done
    except OSError as error:
        raise _write_error(error, out) from error


def _build(plan: BuildPlan, out: Path, *, restart: bool, on_bytes: Callable[[int], None]) -> Manifest:
    staging = staging_of(out)
    manifest = None if restart else _complete(plan, staging)
    if manifest is None:
        _prepare(plan, staging, restart=restart)
        records = _write_shards(plan, staging, on_bytes)
        manifest = _finish(plan, staging, records)
    else:
        on_bytes(plan.nbytes)
    _remove_traces(plan, staging)
    staging.rename(out)
    sync_directory(out.parent)
    return manifest


def finished_build(plan: BuildPlan, out: Path) -> Manifest | None:
    """The manifest of `out` if this build is already complete. Raises `WriteError` if `out` holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST_NAME).exists():
        raise WriteError(f"{out} already exists and is not this build: choose another --out, or remove it first.")
    manifest = read_manifest(out)
    if manifest.fingerprint != plan.fingerprint:
        other = inputs_of_build.difference(manifest.inputs, plan.inputs) if manifest.inputs else "another recipe"
        raise WriteError(
            f"{out} already exists and is not this build, which has {other}: choose another --out, or remove it first."
        )
    built_ns = (out / MANIFEST_NAME).stat().st_mtime_ns
    newer = next((name for name, changed_ns in plan.stamps.items() if changed_ns > built_ns), None)
    if newer:
        raise WriteError(
            f"{out} already exists and is not this build: {newer} was written after it; choose another --out, or "
            "remove it first."
        )
    problems = changed_files(out, manifest)
    if problems:
        raise WriteError(f"{out} is this build, but has been changed: {problems[0].message}")
    return manifest


def _complete(plan: BuildPlan, staging: Path) -> Manifest | None:
    """The manifest of `staging` if an earlier run wrote all of this build and was stopped before the last rename."""
    with suppress(UnreadableError):
        if (staging / _CONFIG_NAME).exists() and (staging / MANIFEST_NAME).exists():
            manifest = read_manifest(staging)
            left = {problem.tensor for problem in changed_files(staging, manifest)} - _traces(plan, staging)
            return manifest if manifest.fingerprint == plan.fingerprint and not left else None
    return None


def _prepare(plan: BuildPlan, staging: Path, *, restart: bool) -> None:
    """Makes `staging` the directory of this build, new or from an interrupted run of the same plan."""
    if staging.exists():
        marker = read_marker(staging)
        if restart or marker == {}:
            discard(staging)
        elif marker != _marker(plan) and not is_empty(staging):
            raise WriteError(
                f"{staging} holds an unfinished build of another recipe or of sources that have changed since"
                f"{_named_difference(marker, plan)}: finish that one, or pass --restart to discard it."
            )
    _check_disk(plan, staging)
    staging.mkdir(parents=True, exist_ok=True)
    write_marker(staging, _marker(plan))


def _marker(plan: BuildPlan) -> dict[str, Any]:
    return {"inputs": plan.inputs, "stamps": plan.stamps}


def _named_difference(marker: dict[str, Any] | None, plan: BuildPlan) -> str:
    known = (marker or {}).get("inputs")
    other = inputs_of_build.difference(known, plan.inputs) if isinstance(known, dict) else ""
    return f" (this one has {other})" if other else ""


def _check_disk(plan: BuildPlan, staging: Path) -> None:
    missing = sum(shard.nbytes for shard in plan.shards if read_record(staging, shard) is None)
    require_disk("The build", staging, missing + _DISK_MARGIN_BYTES)


def _write_shards(plan: BuildPlan, staging: Path, on_bytes: Callable[[int], None]) -> dict[str, TensorRecord]:
    """Writes the missing shards, a few in parallel; a failure stops the others at their next chunk."""
    stop = threading.Event()

    def count(nbytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        on_bytes(nbytes)

    def one(shard: Shard) -> dict[str, TensorRecord]:
        known = read_record(staging, shard)
        if known is None:
            return write_shard(staging, shard, count)
        count(shard.nbytes)
        return known

    with ThreadPoolExecutor(min(_MAX_WRITERS, os.cpu_count() or 1)) as pool:
        written = [pool.submit(one, shard) for shard in plan.shards]
        try:
            records = [future.result() for future in as_completed(written)]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    by_name = {name: record for part in records for name, record in part.items()}
    return {tensor.name: by_name[tensor.name] for unit in plan.units for tensor in unit.tensors}


class _StoppedError(Exception):
    """Raised in a writer thread because another shard failed or the user interrupted the build."""


def _finish(plan: BuildPlan, staging: Path, records: dict[str, TensorRecord]) -> Manifest:
    """Writes side files, index, manifest and, last of all, config.json, without which nothing is a checkpoint."""
    if stamps(plan.sources) != plan.stamps:
        raise MismatchError(f"A shard of the sources changed while {staging} was written: run again with --restart.")
    contents = {path.name: _unchanged(plan, path) for path in plan.side_files}
    if len(plan.shards) > 1:
        # Without the draft vocabulary: tools skip a file that the index does not name, and vLLM stops at its tensor.
        weight_map = {name: record.file for name, record in records.items() if name != D2T_TENSOR}
        total = sum(shard.nbytes for shard in plan.shards if shard.name != DRAFT_VOCAB_FILE)
        contents[INDEX_NAME] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    config = json_bytes(plan.config)
    manifest = Manifest(
        onebox_version=onebox.__version__,
        fingerprint=plan.fingerprint,
        recipe=plan.recipe.texts,
        sources={source.role: source.checkpoint.directory.resolve().name for source in plan.sources.all()},
        tensors=records,
        inputs=plan.inputs,
        shards={
            shard.name: FileRecord(len(shard.header) + shard.nbytes, FileRecord.of(shard.header).sha256)
            for shard in plan.shards
        },
        files={name: FileRecord.of(content) for name, content in [*contents.items(), (_CONFIG_NAME, config)]},
        calibration=plan.calibration.report if plan.calibration else [],
    )
    for name, content in contents.items():
        write_bytes(staging / name, content)
    write_json(staging / MANIFEST_NAME, manifest.to_json())
    write_bytes(staging / _CONFIG_NAME, config)
    sync_directory(staging)
    return manifest


def _unchanged(plan: BuildPlan, path: Path) -> bytes:
    content = path.read_bytes()
    if FileRecord.of(content).sha256 != plan.inputs[f"{plan.sources.base.role}/{path.name}"]:
        raise MismatchError(f"{path} changed while the build was running: run again with --restart.")
    return content


def _traces(plan: BuildPlan, staging: Path) -> set[str]:
    """The names in `staging` that only an unfinished build has."""
    kept = {MANIFEST_NAME, INDEX_NAME, _CONFIG_NAME, *(path.name for path in plan.side_files)}
    kept |= {shard.name for shard in plan.shards}
    own = {MARKER_NAME, *map(record_name, plan.shards)}
    return {path.name for path in staging.iterdir() if path.name in own | {f"{name}.tmp" for name in kept | own}}


def _remove_traces(plan: BuildPlan, staging: Path) -> None:
    for name in _traces(plan, staging):
        (staging / name).unlink(missing_ok=True)
    sync_directory(staging)


def _write_error(error: OSError, out: Path) -> WriteError:
    where = error.filename or out
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return WriteError(
            f"The disk is full at {where}: finished shards remain in {out}.partial; free some space and run the "
            "same command again to resume."
        )
    return WriteError(f"{where} cannot be written: {error.strerror}; existing files in {out} are unchanged.")


def output_bytes(recipe: Recipe, sources: BuildSources) -> tuple[dict[str, Any], dict[ModuleClass, int]]:
    """The config and the bytes per class of a build, from headers alone: the sources' files need not be here."""
    chosen = choose(recipe, sources)
    native = is_native(chosen, sources.base)
    choices = settle(chosen, native=native)
    sizes: dict[ModuleClass, int] = {}
    for unit in make_units(choices, relabel=not native):
        sizes[unit.module_class] = sizes.get(unit.module_class, 0) + unit.nbytes
    return _config(choices, sources, native=native), sizes


def can_resume(plan: BuildPlan, out: Path) -> bool:
    """Whether what an unfinished build has left of `out` is of this plan, or nothing is left."""
    staging = staging_of(output_directory(out))
    if not staging.exists() or is_empty(staging):
        return True
    return read_marker(staging) in (_marker(plan), {}) or _complete(plan, staging) is not None
