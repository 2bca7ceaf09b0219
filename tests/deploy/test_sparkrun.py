"""The recipe for sparkrun: its command is one of ours, and sparkrun itself takes it (`make conformance-test`)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from typer.main import get_command

from onebox.cli.main import app

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "sparkrun" / "qwen3.5-122b-a10b.yaml"
SPARKRUN = ROOT / ".venv-conformance" / "sparkrun" / "bin" / "sparkrun"


def words_of(command):
    return shlex.split(command.replace("\\\n", " "))


def rendered():
    """The words of the recipe's command, with its defaults."""
    recipe = yaml.safe_load(RECIPE.read_text())
    return words_of(recipe["command"].format_map({**recipe["defaults"], "model": recipe["model"]}))


def test_the_recipes_command_is_one_that_serve_takes():
    recipe, (program, verb, *words) = yaml.safe_load(RECIPE.read_text()), rendered()
    assert (program, verb) == ("onebox", "serve")
    command = get_command(app).commands[verb]
    with command.make_context(verb, list(words)) as context:
        taken = context.params
    assert str(taken["model"]) == recipe["model"]
    assert {key: taken[key] for key in ("host", "port")} == {key: recipe["defaults"][key] for key in ("host", "port")}
    with pytest.raises(typer.BadParameter), command.make_context(verb, [*words, "--port", "none"]):
        pass


def sparkrun(home, *arguments):
    assert SPARKRUN.exists(), f"{SPARKRUN} is not there: `make conformance-test` makes it first"
    command = [str(SPARKRUN), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HOME": str(home)}
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.conformance
def test_sparkrun_takes_the_recipe_and_would_run_its_command(tmp_path):
    checked = sparkrun(tmp_path, "recipe", "validate", RECIPE)
    # A key that it does not know would be told as a suggestion.
    assert (checked.returncode, checked.stdout.strip()) == (0, f"Recipe '{RECIPE}' is valid.")
    tried = sparkrun(tmp_path, "run", RECIPE, "--hosts", "localhost", "--dry-run", "--no-auto-detect")
    assert tried.returncode == 0, tried.stderr
    assert "solo" in tried.stdout
    command = tried.stdout.partition("Serve command:")[2].partition("\n\n")[0]
    assert words_of(command) == rendered()


@pytest.mark.conformance
def test_sparkrun_refuses_a_recipe_without_a_model(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("".join(line for line in RECIPE.read_text().splitlines(True) if not line.startswith("model:")))
    assert sparkrun(tmp_path, "recipe", "validate", wrong).returncode == 1
