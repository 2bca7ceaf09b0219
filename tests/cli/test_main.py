"""The command line as a whole: help, wrong words, interruption, and the plan of a real directory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.fake import wait_until

VERBS = ("pull", "inspect", "build", "verify", "plan", "serve")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(run_cli, verb):
    result = run_cli(verb, "--help")
    assert result.code == 0
    assert "Usage: onebox" in result.out
    assert verb in result.out


def test_no_words_show_the_verbs(run_cli):
    result = run_cli()
    assert all(verb in result.out + result.err for verb in VERBS)


def test_the_version_is_told(run_cli):
    import onebox

    assert run_cli("--version").out.strip() == f"onebox {onebox.__version__}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["inspect", "--depp", "."], "--depp"),
        (["inspect"], "directory"),
        (["plan", "qwen3.5-122b-a10b", "--max-num-seqs", "many"], "'--max-num-seqs': it takes a whole number, such as"),
        (["serve", "--responses-bytes", "1MB"], "'--responses-bytes': it takes a whole number, such as"),
        (["serve", "--enable-sleep-mode"], "--idle-release seconds frees"),
        (["run", "qwen"], "`onebox serve dir` serves a model"),
        (["show", "qwen"], "`onebox inspect dir` shows"),
        (["help"], "`onebox --help` lists the commands"),
        (["build", "--base", "x"], "--out"),
    ],
)
def test_wrong_words_are_named_and_exit_2(run_cli, words, named):
    result = run_cli(*words)
    assert result.code == 2
    assert named in result.err.lower()
    assert "Traceback" not in result.err


def test_an_error_cannot_take_the_terminal_over(run_cli):
    result = run_cli("inspect", "absent\x1b[2J\x9b\u202e")
    assert result.code != 0
    assert "absent[2J" in result.err
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.err)


def test_ctrl_c_is_no_traceback(run_cli, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("onebox.checkpoint.inspect.inspect_checkpoint", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        result = run_cli("inspect", tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second Ctrl-C would print a traceback"
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.code, result.err.strip()) == (130, "onebox: stopped.")


def test_ctrl_c_inside_a_library_that_makes_another_error_of_it_is_no_traceback(run_cli, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("a module could not be initialized")  # noqa: B904 - as C code does

    monkeypatch.setattr("onebox.checkpoint.inspect.inspect_checkpoint", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        result = run_cli("inspect", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.code, result.err.strip()) == (130, "onebox: stopped.")


def test_ctrl_c_during_the_imports_is_silent():
    script = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from onebox.cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("count", [1, 3])
def test_ctrl_c_while_a_model_is_loaded_is_one_line_and_leaves_no_process(checkpoint, count):
    command = [sys.executable, "-m", "onebox.cli.main", "serve", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("config and tokenizer")
        wait_until(lambda: children(process.pid))
        left = children(process.pid)
        for _ in range(count):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert [*out.splitlines(), *err.splitlines()][-1] in ("Stopped.", "onebox: stopped.")
    assert "Traceback" not in err
    assert "warm-up" not in out, "Ctrl-C was noticed only after the start"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def children(pid):
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def test_a_directory_without_permission_is_a_sentence(run_cli, monkeypatch, tmp_path):
    """Root may read everything, so the kernel's refusal is played."""

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = run_cli("inspect", tmp_path)
    assert result.code == 2
    assert "cannot be listed: Permission denied" in result.err


@pytest.mark.parametrize("kind", ["autoround", "nvfp4-modelopt"])
def test_a_real_directory_is_planned_with_the_bytes_it_holds(run_cli, checkpoints, kind):
    inspected = json.loads(run_cli("inspect", checkpoints / kind, "--json").out)
    limits = ("--max-model-len", "4096", "--speculative-tokens", "0")
    planned = json.loads(run_cli("plan", checkpoints / kind, *limits, "--json").out)
    weights = next(part for part in planned["memory"]["parts"] if part["name"] == "weights")
    mtp = sum(row["bytes"] for row in inspected["classes"] if row["class"].startswith("mtp"))
    assert weights["bytes"] == inspected["bytes"] - mtp  # no drafts are planned, so the head stays on disk


def output_of(command, stdout, **variables):
    """(exit status, stderr) of a command whose standard output is `stdout`."""
    line = [sys.executable, "-m", "onebox", *command]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        line, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, check=False, timeout=120
    )
    return done.returncode, done.stderr


def test_a_closed_pipe_and_a_full_disk_are_no_tracebacks():
    reader, writer = os.pipe()
    os.close(reader)
    assert output_of(["version"], writer) == (0, "")
    os.close(writer)
    with Path("/dev/full").open("w") as full:
        status, said = output_of(["version"], full)
    assert (status, said) == (1, "onebox: the output could not be written: No space left on device.\n")


def test_a_terminal_without_unicode_gets_a_plan_in_ascii(tmp_path):
    with (tmp_path / "plan").open("wb") as file:
        assert output_of(["plan", "qwen3.5-122b-a10b"], file, PYTHONIOENCODING="ascii") == (0, "")
    text = (tmp_path / "plan").read_bytes().decode("ascii")
    assert "####" in text
    assert "?" not in text
