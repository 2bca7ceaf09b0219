"""The command line as a whole: help, wrong words, interruption, and the plan of a real directory."""

import json

import pytest

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
        (["plan", "qwen3.5-122b-a10b", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["build", "--base", "x"], "--out"),
    ],
)
def test_wrong_words_are_named_and_exit_2(run_cli, words, named):
    result = run_cli(*words)
    assert result.code == 2
    assert named in result.err.lower()
    assert "Traceback" not in result.err


def test_ctrl_c_is_no_traceback(run_cli, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("onebox.checkpoint.inspect.inspect_checkpoint", interrupted)
    result = run_cli("inspect", tmp_path)
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_directory_without_permission_is_a_sentence(run_cli, monkeypatch, tmp_path):
    """Root may read everything, so the kernel's refusal is played."""
    from pathlib import Path

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = run_cli("inspect", tmp_path)
    assert result.code == 2
    assert "cannot be listed: Permission denied" in result.err


@pytest.mark.parametrize("kind", ["autoround", "nvfp4-modelopt"])
def test_a_real_directory_is_planned_with_the_bytes_it_holds(run_cli, checkpoints, kind):
    inspected = json.loads(run_cli("inspect", checkpoints / kind, "--json").out)
    planned = json.loads(run_cli("plan", checkpoints / kind, "--max-model-len", "4096", "--json").out)
    weights = next(part for part in planned["memory"]["parts"] if part["name"] == "weights")
    mtp = sum(row["bytes"] for row in inspected["classes"] if row["class"].startswith("mtp"))
    assert weights["bytes"] == inspected["bytes"] - mtp  # no drafts are planned, so the head stays on disk
