"""One name, one class: a public class is found by its name alone."""

import ast
from collections import defaultdict
from pathlib import Path

import onebox

ROOT = Path(onebox.__file__).parent


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 100
    shared = [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]
    assert not shared, "rename all but one of each:\n" + "\n".join(shared)
