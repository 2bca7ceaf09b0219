"""What a build is made of, as one digest per input: onebox's version, the recipe, and every file that is read.

Two builds of equal inputs write equal bytes. Small files are hashed whole; of a shard the header, the size and samples
of its data are, because reading 200 GB to learn that nothing changed would take as long as the build. `stamps` hold the
shards' times of change, for edits that the samples miss.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import onebox
from onebox.checkpoint.manifest import MANIFEST_NAME
from onebox.checkpoint.origin import ORIGIN_NAME
from onebox.checkpoint.recipe import BuildSource, BuildSources, Recipe
from onebox.checkpoint.source import INDEX_NAME
from onebox.spec.errors import UnreadableError

__all__ = ["build_inputs", "difference", "fingerprint", "sampled_digest", "side_files", "stamps", "whole_digest"]

_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_NOT_COPIED = {"config.json", INDEX_NAME, MANIFEST_NAME, ORIGIN_NAME}
# Some tools describe the quantisation in a separate file, a few only there. It remains valid in a native build.
_OWN_DESCRIPTIONS = {"quantization_config.json", "hf_quant_config.json"}
_MAX_SIDE_FILE_BYTES = 64 << 20
_NAMED_INPUTS = {
    "onebox": "version of onebox",
    "recipe": "recipe",
    "shard_bytes": "--shard-gib",
    "draft_vocab": "draft vocabulary",
    "calibration": "calibration",
    "calibration revision": "revision of the calibration",
    "calibration text": "calibration text",
    "auto-round": "version of auto-round",
    "torch": "version of torch",
    "device": "kind of device",
}
"""The inputs that are no files, and how a sentence names them."""


def side_files(base: BuildSource, *, is_native: bool) -> list[Path]:
    """The base's files that a build copies: tokenizer, templates, processors, licence; its description if native."""
    left_behind = _NOT_COPIED if is_native else _NOT_COPIED | _OWN_DESCRIPTIONS
    paths = sorted(base.checkpoint.directory.iterdir())
    return [path for path in paths if path.name not in left_behind and path.is_file() and _is_side_file(path)]


def _is_side_file(path: Path) -> bool:
    is_weights = path.suffix in {".safetensors", ".bin", ".pt", ".gguf"} or path.name.endswith(".index.json")
    is_unfinished = path.suffix in {".part", ".journal", ".tmp"}
    return not is_weights and not is_unfinished and path.stat().st_size <= _MAX_SIDE_FILE_BYTES


def build_inputs(recipe: Recipe, sources: BuildSources, shard_bytes: int, copied: list[Path]) -> dict[str, str]:
    """A digest, or the value itself where it is short, of each input by name; `copied` are the base's side files."""
    inputs = {"onebox": onebox.__version__, "recipe": json.dumps(recipe.texts), "shard_bytes": str(shard_bytes)}
    for source in sources.all():
        directory = source.checkpoint.directory
        names = {"config.json", *(name for name in _OWN_DESCRIPTIONS if (directory / name).exists())}
        small = {directory / name for name in names} | set(copied if source is sources.base else [])
        inputs |= {f"{source.role}/{path.name}": whole_digest(path) for path in sorted(small)}
        inputs |= {name: sampled_digest(path) for name, path in _named_shards(source)}
    return inputs


def _named_shards(source: BuildSource) -> Iterator[tuple[str, Path]]:
    """The source's shards, each with a name of its own also where two directories have files of one name."""
    for number, path in enumerate(source.checkpoint.shards):
        is_first = all(other.name != path.name for other in source.checkpoint.shards[:number])
        yield f"{source.role}/{path.name}" if is_first else f"{source.role}/{path.name} of {path.parent.name}", path


def fingerprint(inputs: dict[str, str]) -> str:
    """One digest over all inputs."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def stamps(sources: BuildSources) -> dict[str, int]:
    """The time of the last change of each shard, in nanoseconds."""
    return {name: path.stat().st_mtime_ns for source in sources.all() for name, path in _named_shards(source)}


def difference(before: dict[str, str], after: dict[str, str]) -> str:
    """The first input that differs, as the end of a sentence; empty if none does."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            if name in _NAMED_INPUTS:
                return f"another {_NAMED_INPUTS[name]}"
            role, _, file = name.partition("/")
            how = "without" if name not in after else "with" if name not in before else "with another"
            return f"a {role} checkpoint {how} {file}"
    return ""


def whole_digest(path: Path) -> str:
    """Of all bytes of a file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None


def sampled_digest(path: Path) -> str:
    """Of a shard's size, its header and some of its bytes."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = min(size, 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little"))
            digest.update(f"{size} ".encode() + os.pread(file.fileno(), header_bytes, 0))
            step = max(_SAMPLE_BYTES, (size - header_bytes) // _SAMPLES)
            for begin in range(header_bytes, size, step):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, begin))
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, max(header_bytes, size - _SAMPLE_BYTES)))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()
