"""Builds a checkpoint from a recipe and its sources: plan, check, stream, finish.

The output grows in `OUT.partial` beside its final place and is renamed to `OUT` when it is whole, so whatever stops a
build, `OUT` is either absent or complete. Shards that a stopped build finished are kept and not written again.
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
from onebox.spec.modules import ModuleClass

__all__ = ["BuildPlan", "plan_build", "run_build"]

DEFAULT_SHARD_BYTES = 2 << 30
_MAX_WRITERS = 4
_PLAN_NAME = "onebox_build.json"
# What the file system may need beside the data itself.
_DISK_MARGIN_BYTES = 64 << 20
_NOT_COPIED = {"config.json", INDEX_NAME, MANIFEST_NAME}
# Some tools describe the quantisation in a file of its own, a few of them only there. It stays true in a native build.
_OWN_DESCRIPTIONS = {"quantization_config.json", "hf_quant_config.json"}
_MAX_SIDE_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class BuildPlan:
    """All that a build will do, known before a byte is written."""

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
        """Bytes that each module class will take."""
        result: dict[ModuleClass, int] = {}
        for unit in self.units:
            result[unit.module_class] = result.get(unit.module_class, 0) + unit.nbytes
        return result


def plan_build(recipe: Recipe, sources: BuildSources, shard_bytes: int = DEFAULT_SHARD_BYTES) -> BuildPlan:
    """Chooses, settles and cuts into shards. Refuses sources of different models and targets that cannot be had."""
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
    """Identifies recipe and sources: a stopped build goes on only if both are what they were."""
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
    """Carries the plan out into `out`. Goes on where an equal build stopped; `restart` throws its work away instead."""
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
    """The manifest of `out` if it already is this build. A directory that holds anything else is left alone."""
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
    """The directory the output grows in, made or taken over from an equal build that stopped."""
    staging = out.with_name(out.name + ".partial")
    if restart and staging.exists():
        shutil.rmtree(staging)
    marker = staging / _PLAN_NAME
    if staging.exists():
        known = json.loads(marker.read_text()) if marker.exists() else {}
        if known.get("fingerprint") != plan.fingerprint:
            raise WriteError(
                f"{staging} holds an unfinished build of another recipe or of sources that have changed since: "
                "finish that one, or pass --restart to throw it away."
            )
    _check_disk(plan, staging)
    staging.mkdir(parents=True, exist_ok=True)
    write_json(marker, {"fingerprint": plan.fingerprint})
    return staging


def _check_disk(plan: BuildPlan, staging: Path) -> None:
    missing = sum(shard.nbytes for shard in plan.shards if read_record(staging, shard) is None)
    require_disk("The build", staging, missing + _DISK_MARGIN_BYTES)


def _write_shards(plan: BuildPlan, staging: Path, on_bytes: Callable[[int], None]) -> dict[str, TensorRecord]:
    """Writes the shards that are not there yet, a few at a time; a failure stops the others at their next piece."""
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
    """Another shard failed, or the user stopped the build: not an error of its own."""


def _finish(plan: BuildPlan, staging: Path, records: dict[str, TensorRecord]) -> Manifest:
    """Side files, index, manifest, config: the small files that make shards a checkpoint."""
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
    """Tokenizer, templates, processors, licence: what a checkpoint carries beside its weights."""
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
            f"The disk is full at {where}: finished shards are kept in {out}.partial; free some space and run the same "
            "command again to go on."
        )
    return WriteError(f"{where} cannot be written: {error.strerror}; what was in {out} before is untouched.")
