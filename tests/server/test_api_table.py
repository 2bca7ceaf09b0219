"""docs/api.md lists the paths that the application serves."""

from pathlib import Path

import pytest

from onebox.server.api_table import COMMAND, api_table, with_table

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_lists_every_path_of_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, api_table()) == page, f"docs/api.md differs from the code; run `{COMMAND}`"


def test_every_path_says_what_it_is(scripted):
    rows = [row.strip("| ").split(" | ") for row in api_table().splitlines()[2:]]
    assert all(len(row) == 2 for row in rows)
    paths = {path.strip("`").split()[1] for path, _ in rows}
    described = scripted("ok").request("GET", "/openapi.json").json()["paths"]
    assert described.keys() | {"/", "/docs", "/static/{name}", "/openapi.json"} == paths


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("# A page\n", "")
