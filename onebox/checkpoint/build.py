"""Builds a checkpoint from a recipe and its sources: plan, check, write shards, write index and manifest.

The output is written to `OUT.partial` and renamed to `OUT` when complete, so `OUT` is either absent or complete, even
if a build is interrupted. Shards that an interrupted build has finished are not written again.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onebox
from onebox.checkpoint.convert import Unit, make_units
from onebox.checkpoint.describe import describe, is_native, settle
from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorRecord, read_manifest, write_json
from onebox.checkpoint.match import check_same_model
from onebox.checkpoint.recipe import BuildSources, ModuleChoice, Recipe, choose
from onebox.checkpoint.shard import Shard, read_record, split_shards, write_shard
from onebox.checkpoint.source import INDEX_NAME
from onebox.spec.errors import MismatchError, WriteError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["BuildPlan", "can_resume", "output_bytes", "plan_build", "run_build"]

DEFAULT_SHARD_BYTES = 2 << 30
_MAX_WRITERS = 4
_PLAN_NAME = "onebox_build.json"
# Space that the file system may need in addition to the data.
_DISK_MARGIN_BYTES = 64 << 20
_NOT_COPIED = {"config.json", INDEX_NAME, MANIFEST_NAME}
# Some tools describe the quantisation in a separate file, a few only there. It remains valid in a native build.
_OWN_DESCRIPTIONS = {"quantization_config.json", "hf_quant_config.json"}
_MAX_SIDE_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class BuildPlan:
    """Everything a build will write, computed before the first byte is written."""

    recipe: Recipe
    sources: BuildSources
    choices: list[ModuleChoice]
    shards: list[Shard]
    config: dict[str, Any]
    is_native: bool
    fingerprint: str

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


def plan_build(recipe: Recipe, sources: BuildSources, shard_bytes: int = DEFAULT_SHARD_BYTES) -> BuildPlan:
    """Selects the source and format of each module and splits the output into shards.

    Rejects sources of different models and conversions that are not possible.
    """
    for other in sources.all()[1:]:
        check_same_model(sources.base, other)
    if sources.mtp and not any(sources.mtp.binding.of_class(*(kind for kind in ModuleClass if kind.in_mtp))):
        raise MismatchError(
            f"{sources.mtp.checkpoint.directory} holds no MTP head (mtp.*) to graft: name another source."
        )
    chosen = choose(recipe, sources)
    native = is_native(chosen, sources.base)
    choices = settle(chosen, native=native)
    shards = split_shards(make_units(choices, relabel=not native), shard_bytes)
    config = _config(choices, sources, native=native)
    return BuildPlan(recipe, sources, choices, shards, config, native, _fingerprint(recipe, sources, shard_bytes))


def _config(choices: list[ModuleChoice], sources: BuildSources, *, native: bool) -> dict[str, Any]:
    config = dict(sources.base.checkpoint.config)
    config.pop("quantization_config", None)
    if any(choice.module.module_class.in_mtp for choice in choices) and "text_config" in config:
        config["text_config"] = {**config["text_config"], "mtp_num_hidden_layers": 1}
    quantization = describe(choices, sources.base, native=native)
    return {**config, "quantization_config": quantization} if quantization else config


def _fingerprint(recipe: Recipe, sources: BuildSources, shard_bytes: int) -> str:
    """Identifies recipe and sources: an interrupted build is resumed only if both are unchanged."""
    files = [
        (source.role, shard.name, stat.st_size, stat.st_mtime_ns)
        for source in sources.all()
        for shard in source.checkpoint.shards
        for stat in [shard.stat()]
    ]
    text = json.dumps([onebox.__version__, asdict(recipe), shard_bytes, files])
    return hashlib.sha256(text.encode()).hexdigest()


def run_build(
    plan: BuildPlan, out: Path, *, restart: bool = False, on_bytes: Callable[[int], None] = lambda _: None
) -> Manifest:
    """Writes the planned checkpoint to `out`. Resumes an interrupted build of the same plan; `restart` discards it."""
    try:
        done = _finished(plan, out)
        if done:
            on_bytes(plan.nbytes)
            return done
        staging = _staging(plan, out, restart=restart)
        records = _write_shards(plan, staging, on_bytes)
        manifest = _finish(plan, staging, records)
        staging.rename(out)
        return manifest
    except OSError as error:
        raise _write_error(error, out) from error


def _finished(plan: BuildPlan, out: Path) -> Manifest | None:
    """The manifest of `out` if this build is already complete. Raises `WriteError` if `out` holds anything else."""
    if not out.exists():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    if (out / MANIFEST_NAME).exists():
        manifest = read_manifest(out)
        if manifest.fingerprint == plan.fingerprint:
            return manifest
    raise WriteError(f"{out} already exists and is not this build: choose another --out, or remove it first.")


def _staging(plan: BuildPlan, out: Path, *, restart: bool) -> Path:
    """The directory the output is written to, new or from an interrupted build of the same plan."""
    staging = out.with_name(out.name + ".partial")
    if restart and staging.exists():
        shutil.rmtree(staging)
    marker = staging / _PLAN_NAME
    if staging.exists():
        known = json.loads(marker.read_text()) if marker.exists() else {}
        if known.get("fingerprint") != plan.fingerprint:
            raise WriteError(
                f"{staging} holds an unfinished build of another recipe or of sources that have changed since: "
                "finish that one, or pass --restart to discard it."
            )
    _check_disk(plan, staging)
    staging.mkdir(parents=True, exist_ok=True)
    write_json(marker, {"fingerprint": plan.fingerprint})
    return staging


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
    """Writes side files, index, manifest and config.json, and removes the build's own records."""
    base = plan.sources.base.checkpoint.directory
    left_behind = _NOT_COPIED if plan.is_native else _NOT_COPIED | _OWN_DESCRIPTIONS
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in left_behind and _is_side_file(path):
            shutil.copy2(path, staging / path.name)
    if len(plan.shards) > 1:
        weight_map = {name: record.file for name, record in records.items()}
        write_json(staging / INDEX_NAME, {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map})
    manifest = Manifest(
        onebox_version=onebox.__version__,
        fingerprint=plan.fingerprint,
        recipe={key: str(value) for key, value in asdict(plan.recipe).items()},
        sources={source.role: source.checkpoint.directory.resolve().name for source in plan.sources.all()},
        tensors=records,
    )
    write_json(staging / MANIFEST_NAME, manifest.to_json())
    write_json(staging / "config.json", plan.config)
    for shard in plan.shards:
        (staging / f"{shard.name}.json").unlink(missing_ok=True)
    (staging / _PLAN_NAME).unlink(missing_ok=True)
    _sync_directory(staging)
    return manifest


def _is_side_file(path: Path) -> bool:
    """Whether a file is not weights: tokenizer, templates, processors, licence."""
    is_weights = path.suffix in {".safetensors", ".bin", ".pt", ".gguf"} or path.name.endswith(".index.json")
    return not is_weights and path.stat().st_size <= _MAX_SIDE_FILE_BYTES


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(error: OSError, out: Path) -> WriteError:
    where = error.filename or out
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return WriteError(
            f"The disk is full at {where}: finished shards remain in {out}.partial; free some space and run the "
            "same command again to resume."
        )
    return WriteError(f"{where} cannot be written: {error.strerror}; existing files in {out} are unchanged.")


def output_bytes(recipe: Recipe, sources: BuildSources) -> tuple[ModelSpec, dict[ModuleClass, int]]:
    """The model's shape and the bytes per class of a build, from headers alone: the sources' files need not be here."""
    chosen = choose(recipe, sources)
    native = is_native(chosen, sources.base)
    sizes: dict[ModuleClass, int] = {}
    for unit in make_units(settle(chosen, native=native), relabel=not native):
        sizes[unit.module_class] = sizes.get(unit.module_class, 0) + unit.nbytes
    return sources.base.checkpoint.spec, sizes


def can_resume(plan: BuildPlan, out: Path) -> bool:
    """Whether what an unfinished build has left of `out` is of this plan, or nothing is left."""
    staging = out.with_name(out.name + ".partial")
    if not staging.exists():
        return True
    marker = staging / _PLAN_NAME
    known = json.loads(marker.read_text()) if marker.exists() else {}
    return bool(known.get("fingerprint") == plan.fingerprint)
