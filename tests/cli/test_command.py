"""Help fits the terminal, in ASCII, with every option's whole name; completion and `python -m onebox` work."""

import os
import subprocess
import sys

import pytest
from typer.main import get_command

from onebox.cli.main import app
from onebox.cli.settings import SETTINGS_HELP


def all_commands():
    found = [((), get_command(app))]
    for words, command in found:
        found += [((*words, name), child) for name, child in getattr(command, "commands", {}).items()]
    return found


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_shows_whole_names_in_ascii_and_within_the_width(run_cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words, command in all_commands():
        text = run_cli(*words, "--help").out
        assert text.isascii(), [line for line in text.splitlines() if not line.isascii()]
        shown = set(text.replace(",", " ").split())
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert {*parameter.opts, *parameter.secondary_opts} <= shown, f"{words} at {columns}"
        # A name or a word of JSON that is wider than the terminal is not broken.
        long = [line for line in text.splitlines() if len(line) > columns]
        assert not long, words


def test_help_shows_no_types_of_python(run_cli):
    for words, _ in all_commands():
        text = run_cli(*words, "--help").out
        assert not any(word in text for word in ("list[", "<str>", "None]", "PosixPath", "<bool>")), words


def test_usage_names_arguments_as_the_list_below_it_does(run_cli):
    for words, command in all_commands():
        usage = " ".join(run_cli(*words, "--help").out.partition("\n\n")[0].split())
        for parameter in command.params:
            if parameter.param_type_name == "argument" and not parameter.hidden:
                assert (parameter.metavar or parameter.name.upper()) in usage, usage


def test_help_says_once_where_else_options_may_be_set(run_cli):
    for words in ((), ("serve",), ("plan",), ("warm",)):
        text = " ".join(run_cli(*words, "--help").out.split())
        assert text.count(SETTINGS_HELP) == 1


def test_the_version_has_a_command_that_names_what_matters(run_cli):
    lines = run_cli("version").out.splitlines()
    assert [line.split()[0] for line in lines] == ["onebox", "Python", "torch", "triton", "transformers"]


def run(*command, **environment):
    given = {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)


def test_the_package_is_the_program():
    done = run(sys.executable, "-m", "onebox", "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "onebox")


def test_the_shell_completes_commands_and_options():
    script = "import sys; sys.argv = ['onebox']; from onebox.cli.entry import main; main()"
    for words, wanted in (("onebox ser", "serve"), ("onebox serve --max-mo", "--max-model-len")):
        told = {"_ONEBOX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = run(sys.executable, "-c", script, **told)
        assert wanted in done.stdout.split(), done.stderr
