"""docs/cli.md is what the commands say of themselves."""

from pathlib import Path

from typer.main import get_command

from onebox.cli.main import app
from onebox.cli.reference import command_reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == command_reference(), (
        "docs/cli.md differs from the commands: run `.venv/bin/python -m onebox.cli.reference > docs/cli.md`"
    )


def test_every_visible_option_of_every_command_is_on_the_page():
    text = command_reference()
    commands = [("onebox", get_command(app))]
    num_options = 0
    for name, command in commands:
        assert f"\n## {name}\n" in text
        commands += [(f"{name} {word}", child) for word, child in getattr(command, "commands", {}).items()]
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                num_options += 1
                assert all(f"`{word}`" in section for word in (*parameter.opts, *parameter.secondary_opts)), name
    assert num_options > 100


def test_ignored_flags_are_not_advertised():
    assert "--trust-remote-code" not in command_reference()
