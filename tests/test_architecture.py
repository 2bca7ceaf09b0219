"""docs/architecture.md leads to the code: every link resolves, and what a row names is defined in the file it links."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)\)")
PLACE = re.compile(r"`([A-Za-z_.0-9]+)` in \[[^\]]+\]\(([^)]+)\)")


def defined_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`; of a JavaScript module what it exports."""
    if path.suffix == ".js":
        return set(re.findall(r"(?m)^export (?:async )?(?:class|function\*?|const) (\w+)", path.read_text()))
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def places() -> list[tuple[str, str]]:
    return PLACE.findall(PAGE.read_text())


@pytest.mark.parametrize("link", sorted(set(LINK.findall(PAGE.read_text()))))
def test_every_link_leads_somewhere(link):
    assert (PAGE.parent / link).exists()


@pytest.mark.parametrize(("name", "link"), places(), ids=[name for name, _ in places()])
def test_what_a_row_names_is_defined_in_the_file_that_it_links(name, link):
    assert name in defined_in(PAGE.parent / link)


def test_the_questions_that_a_newcomer_asks_are_answered():
    page = PAGE.read_text()
    for question in (
        "a draft is accepted",
        "a prefix is stored",
        "a stop string is cut",
        "an INT4 weight is decoded",
        "a request is refused for its length",
    ):
        assert question in page
    assert len(places()) >= 14
