"""Launch choices that change a kernel's speed and never a bit of its result, by GPU.

How many groups of weights a warp asks for at once, how many registers it may have, whether it lets the next kernel
start early: what is best depends on the GPU. A table of each GPU that was measured ships in
`kernels/tuned/<name>.json`; `onebox tune` writes one for another GPU into the user's cache, which is read first.
Without a table the kernels' own defaults hold.
"""

import json
import os
import re
from functools import cache
from pathlib import Path

import torch

__all__ = ["Choice", "choices", "choose", "set_choices", "table_name", "user_table"]

Choice = dict[str, int]
"""A kernel's launch options by name: `UNROLL`, `maxnreg`, `PREFETCH`, `num_warps`, and `dependent` (`dependent.py`)."""

_SHIPPED = Path(__file__).parent.parent / "tuned"
_set: dict[str, Choice] = {}


def choose(kernel: str, default: Choice) -> Choice:
    """The options in `default` as they are best for `kernel` on this GPU."""
    chosen = _set.get(kernel) or _table().get(kernel, {})
    return {name: chosen.get(name, value) for name, value in default.items()}


def choices() -> dict[str, Choice]:
    """What is chosen for this GPU beyond the defaults."""
    return {**_table(), **_set}


def set_choices(values: dict[str, Choice]) -> None:
    """Chooses for this process, before anything else; what was set before is forgotten. For tuning."""
    _set.clear()
    _set.update(values)


def table_name(gpu: str) -> str:
    """The file name of a GPU's table, without its folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def user_table(gpu: str) -> Path:
    """Where `onebox tune` keeps the table of a GPU."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "onebox" / "tuned" / table_name(gpu)


@cache
def _table() -> dict[str, Choice]:
    if not torch.cuda.is_available():
        return {}
    gpu = torch.cuda.get_device_name()
    for path in (user_table(gpu), _SHIPPED / table_name(gpu)):
        if path.is_file():
            read: dict[str, dict[str, Choice]] = json.loads(path.read_text())
            return read["choices"]
    return {}
