"""Launch options that change a kernel's speed and never a bit of its result, by GPU.

The number of groups of weights in flight per warp, the register limit, whether the next kernel may start early: the
best values depend on the GPU and on the shapes. A kernel with such options declares a `Tunable` in its file. Tables of
the measured GPUs ship in `kernels/tuned/<gpu>.json`; `onebox tune` writes one into the user's cache, which has
precedence. Without an entry the kernel's own defaults apply.
"""

import contextlib
import json
import re
from functools import cache
from pathlib import Path

from onebox.kernels.common.target import gpu_name
from onebox.spec.cache import user_cache_directory

__all__ = [
    "MODES",
    "WEIGHT_LOADS",
    "LaunchOptions",
    "Tunable",
    "known_options",
    "launched",
    "set_options",
    "shipped_table",
    "table_name",
    "tunables",
    "user_table",
]

LaunchOptions = dict[str, int]
"""By name: `dependent` (see `dependent.py`), and constexprs or compile options such as `UNROLL` and `maxnreg`."""

MODES: tuple[LaunchOptions, ...] = ({"dependent": 0}, {"dependent": 1}, {"dependent": 2})
"""The modes of a dependent launch: candidates for every tunable kernel."""
WEIGHT_LOADS: tuple[LaunchOptions, ...] = (
    *MODES,
    {"PREFETCH": 0},
    {"PREFETCH": 1},
    *(
        {"UNROLL": unroll, "maxnreg": registers}
        for unroll, registers in ((2, 96), (4, 96), (2, 128), (4, 128), (8, 128), (8, 168), (12, 255))
    ),
)
"""Candidates for a kernel that streams integer weights: also the groups in flight and the register limit."""

_SHIPPED = Path(__file__).parent.parent / "tuned"
_tunables: dict[str, "Tunable"] = {}
_launched: dict[str, "Tunable"] = {}
_set: dict[str, LaunchOptions] = {}


class Tunable:
    """A kernel with launch options that are looked up by its name and the shape of the launch."""

    def __init__(self, name: str, tried: tuple[LaunchOptions, ...] = MODES) -> None:
        """`tried` are the candidates that `onebox tune` measures, in order."""
        if name in _tunables:
            raise ValueError(f"Two kernels are tuned under the name {name}.")
        _tunables[name] = self
        self.name = name
        self.tried = tried
        self._found: dict[tuple[object, ...], tuple[str, LaunchOptions]] = {}
        """Table keys and options by shape and defaults: a step asks for the same ones hundreds of times."""

    def options(self, shape: object, default: LaunchOptions) -> LaunchOptions:
        """The options of `default` with their values for this shape on this GPU. The caller must not change them."""
        asked = (shape, *default.items())
        if asked not in self._found:
            key = f"{self.name}_{shape}"
            chosen = _set.get(key) or _table().get(key, {})
            self._found[asked] = key, {name: chosen.get(name, value) for name, value in default.items()}
        key, options = self._found[asked]
        _launched[key] = self
        return options

    def forget(self) -> None:
        """Looks options up anew from now on."""
        self._found.clear()


def tunables() -> dict[str, Tunable]:
    """All tunables declared in the kernel modules imported so far, by name."""
    return dict(_tunables)


def launched(*, forget: bool = False) -> dict[str, Tunable]:
    """The kernels launched in this process, by table key (name and shape); `forget` clears the list after this call."""
    found = dict(_launched)
    if forget:
        _launched.clear()
    return found


def known_options() -> dict[str, LaunchOptions]:
    """The options of this GPU that replace defaults, by table key."""
    return {**_table(), **_set}


def set_options(values: dict[str, LaunchOptions]) -> None:
    """Sets options for this process that override every table and any set before. For tuning."""
    _set.clear()
    _set.update(values)
    for tunable in _tunables.values():
        tunable.forget()


def table_name(gpu: str) -> str:
    """The file name of a GPU's table, without its folder."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def shipped_table(gpu: str) -> Path:
    """Path of the table that ships for a GPU; it may not exist."""
    return _SHIPPED / table_name(gpu)


def user_table(gpu: str) -> Path:
    """Path of the table that `onebox tune` writes for a GPU."""
    return user_cache_directory() / "tuned" / table_name(gpu)


@cache
def _table() -> dict[str, LaunchOptions]:
    """The shipped entries, overridden by the user's."""
    gpu = gpu_name()
    if gpu is None:
        return {}
    found: dict[str, LaunchOptions] = {}
    paths = [shipped_table(gpu)]
    with contextlib.suppress(RuntimeError):  # no home
        paths.append(user_table(gpu))
    for path in paths:
        if path.is_file():
            found.update(json.loads(path.read_text())["options"])
    return found
