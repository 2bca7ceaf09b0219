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
    "sensors": set(),
    "formats": {"spec"},
    "kernels": {"spec", "formats"},
    "checkpoint": {"spec", "formats"},
    "model": {"spec", "formats", "kernels", "checkpoint"},
    "planner": {"spec"},
    "store": {"spec"},
    "engine": {"spec", "planner", "store", "model", "kernels"},
    "text": {"spec"},
    "quantize": {"spec", "formats", "checkpoint", "model", "text"},
    "pocket": {"spec", "checkpoint"},
    "server": {"spec", "sensors", "text", "engine"},
    "bench": {"spec", "sensors", "planner", "text"},
    "eval": {"spec", "planner", "text", "bench"},
    "report": {"spec", "planner", "bench", "eval"},
    "fleet": {"spec", "bench"},
    "lab": {"spec", "formats", "kernels", "model", "planner", "engine"},
    "setup": {"spec", "checkpoint", "planner", "engine"},
    "scaleout": {"spec", "planner", "checkpoint"},
    "cli": {
        "spec",
        "sensors",
        "formats",
        "kernels",
        "checkpoint",
        "model",
        "planner",
        "store",
        "engine",
        "text",
        "quantize",
        "pocket",
        "server",
        "bench",
        "eval",
        "report",
        "fleet",
        "lab",
        "setup",
        "scaleout",
    },
}
# Of these rooms only the named modules may be imported by the given room: the narrow doors.
DOORS = {
    ("server", "engine"): {"onebox.engine.api"},
    # The second is for commands that start an engine's process before they import anything of the engine.
    ("cli", "engine"): {"onebox.engine.api", "onebox.engine.remote.spawn"},
    ("setup", "engine"): {"onebox.engine.api"},
}
TORCH_FREE = {"spec", "sensors", "planner", "store", "bench", "eval", "report", "fleet", "scaleout"}
STDLIB_ONLY = {"spec", "sensors", "store"}


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


def offered(path: Path) -> list[str] | None:
    """The module's `__all__`; None where it has none."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return ast.literal_eval(node.value)
    return None


def top_level(path: Path) -> tuple[set[str], set[str]]:
    """(public classes and functions that a module defines, all names that it binds), at its top level."""
    defined, bound = set(), set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(node.name)
            defined |= set() if node.name.startswith("_") else {node.name}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        else:
            bound |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return defined, bound


def module_file(name: str) -> Path | None:
    """The file of a module of onebox; None where `name` is no module."""
    place = ROOT.parent.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((path for path in files if path.exists()), None)


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_writes_down_what_it_offers_and_has_it(path):
    defined, bound = top_level(path)
    names = offered(path)
    assert names is not None or not defined, f"{path} defines {sorted(defined)} and has no __all__"
    missing = set() if "__getattr__" in bound else set(names or ()) - bound
    assert not missing, f"{path}: __all__ names {sorted(missing)}, which are not there"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_takes_from_another_only_what_that_offers(path):
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        room, *_ = [*module.split(".")[1:], ""]
        if not module.startswith("onebox.") or room == room_of(path):
            continue
        for alias in node.names:
            if module_file(f"{module}.{alias.name}") is None:
                source = module_file(module)
                assert source is not None, f"{path} imports {module}, which is not there"
                assert alias.name in (offered(source) or ()), f"{path}: {module} does not offer {alias.name}"


def test_the_map_has_every_room_and_no_other():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ROOMS)
