"""`onebox quantize` on the command line."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A line that says something, and then something else.\n" * 60)
    return path


def arguments(checkpoint: Path, text: Path, out: Path) -> tuple[str | Path, ...]:
    sizes = ("--num-sequences", "4", "--sequence-tokens", "32", "--num-steps", "1", "--batch-tokens", "32")
    formats = ("--expert-layers", "1=int4")  # one layer's experts: enough to see, and soon done
    return ("quantize", "--base", checkpoint, *formats, "--data", text, "--out", out, *sizes)


def test_the_plan_is_said_before_and_the_report_after(run_cli, checkpoint, text, tmp_path):
    planned = run_cli(*arguments(checkpoint, text, tmp_path / "out"), "--dry-run")
    assert planned.code == 0
    assert "Calibration on 4 sequences of 32 tokens, 8 more held out; 1 steps over 5 blocks on cpu." in planned.out
    assert "GB of memory (streams" in planned.out
    assert not (tmp_path / "out").exists()
    done = run_cli(*arguments(checkpoint, text, tmp_path / "out"))
    assert done.code == 0
    assert "matrices calibrated; rounded to nearest:" in done.out
    assert run_cli("verify", tmp_path / "out").code == 0


def test_less_text_than_asked_for_is_said(run_cli, checkpoint, text, tmp_path):
    given = (*arguments(checkpoint, text, tmp_path / "out"), "--num-sequences", "1000", "--dry-run")
    assert "(the text has no more; 1,000 were asked for)" in run_cli(*given).out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--device", "tpu"), "'tpu' is not one of auto, cpu, cuda"),
        (("--num-steps", "0"), "--num-steps 0 is too small"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(run_cli, checkpoint, text, tmp_path, more, words):
    result = run_cli(*arguments(checkpoint, text, tmp_path / "out"), *more)
    assert result.code == 2
    assert words in result.err


def test_without_the_library_the_command_says_what_to_install(run_cli, checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_round", None)
    result = run_cli(*arguments(checkpoint, text, tmp_path / "out"))
    assert result.code == 1
    assert "pip install 'onebox[quantize]'" in result.err
