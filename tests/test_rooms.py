"""The map of rooms (docs/architecture.md) holds: a room imports only what its row names."""

import ast
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import onebox

ROOT = Path(onebox.__file__).parent
# room -> rooms it may import. The order is the order of the floors: a room never imports one listed after it.
ROOMS: dict[str, set[str]] = {
    "spec": set(),
    "formats": {"spec"},
    "kernels": {"spec", "formats"},
    "checkpoint": {"spec", "formats"},
    "model": {"spec", "formats", "kernels", "checkpoint"},
    "planner": {"spec"},
    "engine": {"spec", "planner", "model", "kernels"},
    "text": {"spec"},
    "pocket": {"spec", "checkpoint"},
    "server": {"spec", "text", "engine"},
    "bench": {"spec", "planner", "text"},
    "eval": {"spec", "planner", "text", "bench"},
    "report": {"spec", "planner", "bench", "eval"},
    "lab": {"spec", "formats", "kernels", "model", "planner", "engine"},
    "scaleout": {"spec", "planner", "checkpoint"},
    "cli": {
        "spec",
        "formats",
        "kernels",
        "checkpoint",
        "model",
        "planner",
        "engine",
        "text",
        "pocket",
        "server",
        "bench",
        "eval",
        "report",
        "lab",
        "scaleout",
    },
}
# Of these rooms only the named modules may be imported by the given room: the narrow doors.
DOORS = {
    ("server", "engine"): {"onebox.engine.api"},
    ("cli", "engine"): {"onebox.engine.api"},
    ("lab", "engine"): {"onebox.engine.api", "onebox.engine.runner"},
}
TORCH_FREE = {"spec", "planner", "bench", "eval", "report"}
STDLIB_ONLY = {"spec"}


def source_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports; `from onebox.a import b` gives onebox.a.b so that doors can be told apart."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import; name the room"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_what_its_row_names(path):
    room = room_of(path)
    if room is None:
        return
    assert room in ROOMS, f"{room} is not on the map: add it to docs/architecture.md and to this test"
    for name in imports(path):
        top, *rest = name.split(".")
        if top != "onebox":
            assert room not in STDLIB_ONLY or top in __import__("sys").stdlib_module_names, f"{path} imports {name}"
            assert not (top == "torch" and room in TORCH_FREE), f"{path} imports torch"
            continue
        target = rest[0] if rest else room  # `import onebox` alone is the version, which every room may ask
        if target == room or target.startswith("__"):
            continue
        assert target in ROOMS[room], f"{path}: {room} may not import {target} ({name})"
        doors = DOORS.get((room, target))
        assert doors is None or any(name.startswith(door) for door in doors), f"{path} goes past the door: {name}"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_imports_nothing_that_stays_outside_the_wheel(path):
    outside = {"recipes", "benchmarks", "tests"}
    assert {name for name in imports(path) if name.split(".")[0] in outside} == set()


def test_the_wheel_holds_the_package_and_no_other_folder():
    options = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = options["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.parent.glob("*/*.py")} | {"recipes"}
    assert {name for name in folders if any(fnmatch(name, pattern) for pattern in patterns)} == {"onebox"}
    assert all(name.split(".")[0] == "onebox" for name in options["package-data"])


def test_rooms_are_listed_lowest_first():
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed), room


@pytest.mark.parametrize("room", [r for r in ROOMS if (ROOT / r / "__init__.py").exists()])
def test_what_a_room_offers_is_written_down_and_exists(room):
    module = __import__(f"onebox.{room}", fromlist=["*"])
    for name in getattr(module, "__all__", []):
        assert hasattr(module, name), f"onebox.{room}.__all__ names {name}, which is not there"
