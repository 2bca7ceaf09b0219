"""Grouped options: typer sees one option per field, the command gets the groups."""

import ast
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import onebox.cli
from onebox.cli.options import grouped, option_group

MOST_PARAMETERS = 10


@option_group("Where")
class Place:
    host: Annotated[str, typer.Option(help="Address.")] = "localhost"
    is_open: Annotated[bool, typer.Option("--open")] = False


@option_group("How many")
class Amount:
    count: Annotated[int, typer.Option(min=1, envvar="TEST_COUNT")]


ELSEWHERE = Place(host="example.org")


@pytest.fixture
def seen() -> list[object]:
    return []


@pytest.fixture
def app(seen):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @grouped
    def plain(place: Place, amount: Amount, name: Annotated[str, typer.Argument()] = "none") -> None:
        """Does it."""
        seen.append((place, amount, name))

    @app.command()
    @grouped
    def elsewhere(place: Place = ELSEWHERE) -> None:
        seen.append(place)

    return app


def invoke(app, *words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})


def test_the_command_gets_its_groups_and_its_own_parameters(app, seen):
    assert invoke(app, "plain", "x", "--host", "h", "--open", "--count", "3").exit_code == 0
    assert seen == [(Place("h", is_open=True), Amount(3), "x")]


def test_a_field_without_default_is_a_required_option(app, seen):
    assert invoke(app, "plain").exit_code == 2
    assert invoke(app, "plain", "--count", "1").exit_code == 0
    assert seen == [(Place(), Amount(1), "none")]


def test_a_default_of_the_parameter_replaces_the_fields_defaults(app, seen):
    assert invoke(app, "elsewhere").exit_code == 0
    assert seen == [ELSEWHERE]


def test_limits_and_environment_variables_of_fields_hold(app, seen):
    assert invoke(app, "plain", "--count", "0").exit_code == 2
    assert CliRunner().invoke(app, ["plain"], env={"TEST_COUNT": "5"}).exit_code == 0
    assert seen == [(Place(), Amount(5), "none")]


def test_help_lists_each_group_under_its_heading(app):
    shown = invoke(app, "plain", "--help").output
    for text in ("Does it.", "Where", "How many", "--host", "Address.", "localhost", "--count"):
        assert text in shown


def test_no_function_of_the_command_line_takes_more_than_ten_parameters():
    for path in sorted(Path(onebox.cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                assert count <= MOST_PARAMETERS, f"{path.name}: {node.name} takes {count} parameters; group them"
