"""A build that is killed, or whose disk is full, looks unfinished and goes on where it was."""

import errno
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from onebox.checkpoint.build import BuildPlan, plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import Recipe
from onebox.checkpoint.verify import verify_checkpoint
from onebox.spec.errors import DoesNotFitError, UnreadableError, WriteError
from tests.checkpoint.building import HYBRID, build, same_bits, sources


def build_and_die(plan: BuildPlan, out: Path, limit: int) -> int:
    """Builds in another process, which is killed after so many bytes; gives the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        done = [0]

        def on_bytes(count: int) -> None:
            done[0] += count
            if done[0] >= limit:
                os.kill(os.getpid(), signal.SIGKILL)

        signal.alarm(60)
        try:
            run_build(plan, out, on_bytes=on_bytes)
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_a_build_killed_at_any_point_looks_unfinished_and_goes_on(checkpoints, tmp_path):
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    plan = plan_build(HYBRID, sources(checkpoints, "autoround", fp8="fp8"), 500_000)
    finished: dict[str, int] = {}
    for limit in (1, plan.nbytes // 3, plan.nbytes // 2, plan.nbytes - 1):
        assert build_and_die(plan, out, limit) == signal.SIGKILL
        assert not out.exists()
        with pytest.raises(UnreadableError):
            inspect_checkpoint(partial)  # no config.json yet: nobody can take it for a checkpoint
        for path in partial.glob("*.safetensors"):
            load_file(path)  # whole under its final name
        for name, written in finished.items():
            assert (partial / name).stat().st_mtime_ns == written, "a finished shard was written again"
        finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert finished
    made = build(checkpoints, out, HYBRID, "autoround", shard_bytes=500_000, fp8="fp8")
    assert not partial.exists()
    whole = build(checkpoints, tmp_path / "whole", HYBRID, "autoround", shard_bytes=500_000, fp8="fp8")
    assert made.keys() == whole.keys()
    assert all(same_bits(made[name], tensor) for name, tensor in whole.items())
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_an_unfinished_build_of_another_recipe_is_not_mixed_in(checkpoints, tmp_path):
    out = tmp_path / "out"
    plan = plan_build(HYBRID, sources(checkpoints, "autoround", fp8="fp8"), 500_000)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(plan, out, on_bytes=stop)
    other = plan_build(Recipe(), sources(checkpoints, "autoround"), 500_000)
    with pytest.raises(WriteError, match="--restart"):
        run_build(other, out)
    run_build(other, out, restart=True)
    assert verify_checkpoint(out) == []


def test_an_existing_directory_is_left_alone(checkpoints, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(WriteError, match="already exists and is not this build"):
        run_build(plan_build(Recipe(), sources(checkpoints, "autoround")), out)
    assert (out / "precious.txt").read_text() == "mine"
    assert not (tmp_path / "out.partial").exists()


def test_building_again_finds_the_work_done(checkpoints, tmp_path):
    plan = plan_build(Recipe(), sources(checkpoints, "fp8"))
    first = run_build(plan, tmp_path / "out")
    written = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert run_build(plan, tmp_path / "out") == first
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == written


def test_a_disk_without_room_is_refused_with_the_numbers(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"needs 0\.07 GB .* 0\.00 GB are free"):
        run_build(plan_build(Recipe(), sources(checkpoints, "fp8")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_midway_keeps_what_is_finished(checkpoints, tmp_path):
    """The kernel itself refuses the write: a limit on file size stands in for a full disk."""
    out = tmp_path / "out"
    plan = plan_build(Recipe(), sources(checkpoints, "fp8"), 500_000)
    largest = max(shard.nbytes for shard in plan.shards)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1000, limits[1]))
    try:
        with pytest.raises(WriteError, match="The disk is full"):
            run_build(plan, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.exists()
    assert not list((tmp_path / "out.partial").glob("*.tmp"))
    run_build(plan, out)
    assert verify_checkpoint(out) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_any_error_of_the_disk_is_a_sentence(checkpoints, tmp_path, monkeypatch, code):
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code), "/disk/file")

    plan = plan_build(Recipe(), sources(checkpoints, "fp8"))
    monkeypatch.setattr("os.pwrite", refuse)
    with pytest.raises(WriteError, match="cannot be written" if code == errno.EIO else "disk is full"):
        run_build(plan, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_a_sentence(checkpoints, tmp_path, run_cli):
    (tmp_path / "file").write_text("")
    result = run_cli("build", "--base", checkpoints / "fp8", "--out", tmp_path / "file" / "out")
    assert result.code == 1
    assert "cannot be written: Not a directory" in result.err
