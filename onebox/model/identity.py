"""What decides a model's bits, as digests: its weights, and the code that computes with them.

Two engines with equal values compute equal states, so one may continue from what the other stored.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onebox.checkpoint.manifest import MANIFEST_NAME
from onebox.model.load import LoadFormat
from onebox.spec.conversion import LoadConversion

__all__ = ["code_identity", "weights_identity"]

_ROOT = Path(__file__).parent.parent
_ROOMS = ("formats", "kernels", "model")
_FILES = (
    "checkpoint/conversion.py",
    "checkpoint/convert.py",
    "checkpoint/converting.py",
    "checkpoint/rounding.py",
    "checkpoint/tensors.py",
    "checkpoint/values.py",
    "checkpoint/weights.py",
    "engine/batch.py",
    "engine/images.py",
    "engine/prefill.py",
    "engine/prompts.py",
)
"""Beyond these rooms, what converts weights while they are loaded and what lays prompts out for the model."""
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


def code_identity() -> str:
    """A digest of the sources that decide what a prompt's state is."""
    rooms = [path for room in _ROOMS for path in (_ROOT / room).rglob("*.py")]
    files = [path for name in _FILES if (path := _ROOT / name).is_file()]
    digest = hashlib.sha256()
    for path in sorted((*rooms, *files)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def weights_identity(
    directory: Path, load_format: LoadFormat, overrides: Mapping[str, Any], conversion: LoadConversion
) -> str:
    """A digest of the weights as they are loaded: configuration, manifest, and of every shard its header and samples.

    Reads a few kilobytes of each shard. A checkpoint without a manifest is told from others by its headers, sizes and
    samples: weights that were trained further differ in all samples.
    """
    digest = hashlib.sha256()
    settings = {"overrides": overrides, "conversion": repr(conversion), "is_dummy": load_format is LoadFormat.DUMMY}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name in ("config.json", MANIFEST_NAME):
        path = directory / name
        digest.update(path.read_bytes() if path.is_file() else b"absent")
    if load_format is not LoadFormat.DUMMY:
        for path in sorted(directory.glob("*.safetensors")):
            digest.update(path.name.encode())
            for part in _shard_parts(path):
                digest.update(part)
    return digest.hexdigest()


def _shard_parts(path: Path) -> Iterable[bytes]:
    """A shard's size, its header, and samples that are spread evenly over it."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        length = file.read(8)
        yield length
        yield file.read(min(int.from_bytes(length, "little"), size))
        for place in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * place // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
