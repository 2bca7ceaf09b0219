"""Targets of single layers' experts as text, `0-3,44-47=int4`, and as a table of how sensitive each layer is."""

import json
import math
import re
from pathlib import Path

from onebox.checkpoint.recipe import FORMATS, LayerTarget, TargetFormat
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["parse_layer_target"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = re.compile(r"(\d+) of (.+)")


def parse_layer_target(text: str) -> LayerTarget:
    """From the value of `--expert-layers`: layers, counted from 0, and their format.

    Layers are numbers and ranges, `0-3,44-47=int4`, or the first of a sensitivity file, `8 of FILE=int4`: a JSON
    object of a number for each layer, of which the largest are taken.
    """
    layers, found, name = text.rpartition("=")
    if not found or name not in FORMATS:
        raise UsageError(
            f"--expert-layers {text!r} is not understood: give layers and a format, as in 0-3,44-47=int4, or a number "
            f"of the most sensitive layers of a file, as in '8 of sensitivity.json=int4'. {_formats()}"
        )
    most = _MOST.fullmatch(layers.strip())
    chosen = _most_sensitive(int(most.group(1)), Path(most.group(2))) if most else _ranges(layers)
    return LayerTarget(chosen, TargetFormat(name))


def _formats() -> str:
    return f"Formats are {', '.join(FORMATS)}."


def _ranges(text: str) -> tuple[int, ...]:
    layers: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        if last < first:
            raise UsageError(f"--expert-layers has {part!r} where a layer or a range such as 0-3 is expected.")
        layers += range(first, last + 1)
    return tuple(layers)


def _most_sensitive(count: int, path: Path) -> tuple[int, ...]:
    """The `count` layers with the largest numbers, in order; of equal ones the first."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        numbers = {int(layer): float(number) for layer, number in table.items()}
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError, TypeError):
        raise UsageError(
            f'{path} is no sensitivity file: a JSON object of a number for each layer, {{"0": 0.012, "1": ...}}.'
        ) from None
    if not 1 <= count <= len(numbers):
        raise UsageError(f"--expert-layers asks for {count} layers of {path}, which has {len(numbers)}.")
    return tuple(sorted(sorted(numbers, key=lambda layer: (-numbers[layer], layer))[:count]))
