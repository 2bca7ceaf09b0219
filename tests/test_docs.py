"""Pages, docstrings and comments name only files that exist."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "onebox").rglob("*.md"))]
FOLDERS = ("onebox", "tests", "benchmarks", "recipes")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
DATED = "LOG.md"
"""Tells what was; the files of that day may be gone."""
# A path of ours: it ends in .py or .md. A URL, a wildcard, a placeholder or a longer name is none.
MENTION = re.compile(r"(?<![\w./*{}<>:~$-])((?:[\w.-]+/)*[\w-]+\.(?:py|md))(?![\w/*(-])")
NOT_OURS = {"README.md", "BENCHMARKS.md", "evaluation.md", "setup.py", "utils.py"}
"""Other projects' files, a file that a recipe writes, and a name that no file may have."""
NAMES = {path.name for path in (*PAGES, *SOURCES)}


def mentions(text: str) -> set[str]:
    return {name for name in MENTION.findall(text) if name.rpartition("/")[2] not in NOT_OURS}


def resolves(mention: str, path: Path) -> bool:
    """A bare name is some file's; a path leads there from the repository, `onebox/` or a folder above the mention."""
    if "/" not in mention:
        return mention in NAMES
    folders = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    return any((folder / mention).exists() for folder in (*folders, ROOT / "onebox"))


def prose(path: Path) -> Iterator[str]:
    """Comments and docstrings; other strings are data."""
    begins = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and before in begins):
            yield token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != DATED], ids=lambda path: path.name)
def test_a_page_names_only_files_that_exist(path):
    gone = sorted(name for name in mentions(path.read_text()) if not resolves(name, path))
    assert not gone, f"{path.relative_to(ROOT)} names {', '.join(gone)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_name_only_files_that_exist(path):
    found = {name for text in prose(path) for name in mentions(text)}
    gone = sorted(name for name in found if not resolves(name, path))
    assert not gone, f"{path.relative_to(ROOT)} names {', '.join(gone)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `engine/step.py` and docs/api.md.", {"engine/step.py", "docs/api.md"}),
        ("[a page](docs/bench.md#load)", {"docs/bench.md"}),
        ("https://example.org/docs/other.md, *.py, {name}.py, tests/<room>/test_<file>.py", set()),
    ],
)
def test_mentions_are_recognised(text, found):
    assert mentions(text) == found


def test_the_readme_names_every_exit_code():
    told = re.search(r"Exit codes: (.+?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    named = {int(code) for code in re.findall(r"(?:^|[;,] )(\d+) ", " ".join(told.split()))}
    helps = re.findall(r"Exit code: (.+?)\.(?:\s|$)", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    used = {int(code) for text in helps for code in re.findall(r"(?:^|, )(\d+) ", " ".join(text.split()))}
    assert used >= {0, 1, 2, 3, 4}
    assert named >= used | {70, 130}


def test_the_readme_calls_the_program_by_one_name():
    text = (ROOT / "README.md").read_text()
    assert "onebox serve" in text
    assert not re.findall(r"-m onebox|/bin/onebox", text)
