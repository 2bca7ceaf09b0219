"""The commands of docs/published.md and docs/troubleshooting.md: all are understood, and those that can, run.

A line that names what it needs in a comment (network, GPU, a server that keeps running) is parsed by its command and
not run. All others of docs/published.md run in the page's order, in a directory with small checkpoints under the names
that the page uses, against a small server, and with loads of about one second.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from onebox.cli.main import app
from tests.bench.faulty import EXTRA_FIELDS, faulty

DOCS = Path(__file__).parent.parent / "docs"
NEEDS = {"network", "GPU", "serves"}
REFUSED = "exit 1"
CHECKPOINTS = {"int4": "autoround", "fp8": "fp8", "bf16": "bf16-fused", "nvfp4": "nvfp4-llmc"}
SHORTER = {"--duration": "1", "--rate": "20"}
COMPARING, UNTOLD = ("onebox eval", "onebox bench compare"), 4
"""Of one second, and of a server that knows nothing, no difference can be told; that is an exit code of its own."""


def block_lines(page):
    """(command, what it needs) of each line of a code block."""
    blocks = re.findall(r"^```\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    for line in "".join(blocks).splitlines():
        command, _, comment = line.partition(" # ")
        yield command.strip(), set(filter(None, comment.split(", ")))


def inline_commands(page):
    """Commands in the text, between backticks."""
    text = re.sub(r"^```\n.*?^```", "", (DOCS / page).read_text(), flags=re.S | re.M)
    for command in re.findall(r"`(onebox [^`]+)`", text):
        yield " ".join(command.split())


def found_command(words):
    """The command that the words name, and the words after its name."""
    found, rest = get_command(app), words
    while rest and rest[0] in getattr(found, "commands", {}):
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


def parse(command):
    """Parses a command line as the command would, without running it."""
    found, words = found_command(shlex.split(command)[1:])
    assert not getattr(found, "commands", {}), f"{command}: no command"
    found.make_context(found.name, words)


def unknown_flags(command):
    """Flags of a line, perhaps without the values that it needs, which its command does not have."""
    found, words = found_command(command.split()[1:])
    options = {name for option in found.params for name in (*option.opts, *option.secondary_opts)} | {"--version"}
    flags = [word for word in words if word.startswith("--") and word != "--"]
    is_named = not getattr(found, "commands", {}) or found.name == "bench" or flags == ["--version"]
    return [flag for flag in flags if flag not in options] if is_named else ["no command"]


PUBLISHED = list(block_lines("published.md"))


def test_every_line_of_the_page_is_a_command_and_says_what_it_needs_in_known_words():
    assert len(PUBLISHED) > 30
    for command, needs in PUBLISHED:
        assert command.startswith("onebox "), command
        assert needs <= NEEDS or needs == {REFUSED}, (command, needs)
    assert sum(not needs for _, needs in PUBLISHED) > 25


@pytest.mark.parametrize("command", [command for command, _ in PUBLISHED])
def test_a_command_of_the_page_is_understood(command):
    parse(command)


@pytest.mark.parametrize("page", ["published.md", "troubleshooting.md"])
def test_commands_in_the_text_exist_with_their_flags(page):
    wrong = {command: unknown for command in inline_commands(page) if (unknown := unknown_flags(command))}
    assert not wrong


def test_what_is_no_command_is_refused():
    """The checks above can fail: a wrong flag and a wrong command do."""
    for command in ("onebox inspect int4 --depth", "onebox fly", "onebox bench sweep --pp many --what 1"):
        with pytest.raises(BaseException, match=r"such|no command"):
            parse(command)
        assert unknown_flags(command)


def runnable(command, url):
    """The line as it is run here."""
    words = shlex.split(command)[1:]
    words = [url if word == "http://127.0.0.1:8000" else word for word in words]
    for place, word in enumerate(words):
        words[place] = SHORTER.get(words[place - 1], word)
    if words[0] == "bench" and words[1] in ("run", "load", "sweep"):
        words += ["--url", url]
    return words


def test_the_commands_that_need_no_gpu_run(run_cli, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, kind in CHECKPOINTS.items():
        (tmp_path / name).symlink_to(checkpoints / kind)
    (tmp_path / "own.jsonl").write_text('{"prompt": "What is the capital of Turkey?", "answer": "Ankara"}\n')
    failed = []
    with faulty(modalities=("text", "image"), answer_tokens=24, knows=EXTRA_FIELDS | {"response_format"}) as server:
        for command, needs in PUBLISHED:
            if needs & NEEDS:
                continue
            result = run_cli(*runnable(command, server.url))
            allowed = (0, UNTOLD) if command.startswith(COMPARING) else (int(REFUSED in needs),)
            if result.code not in allowed:
                failed.append(f"{command}: exit {result.code}: {result.err[-300:]}{result.out[-200:]}")
    assert not failed, "\n".join(failed)
    assert (tmp_path / "hybrid" / "onebox_manifest.json").is_file()
    assert "<html" in (tmp_path / "report.html").read_text()
