"""Where a build is written: one builder at a time, resumed from every point at which it can be stopped."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from onebox.checkpoint.build import BuildPlan, plan_build, run_build
from onebox.checkpoint.output import build_lock
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from onebox.spec.errors import MismatchError, UsageError, WriteError
from tests.synthetic import tiny_config, write_checkpoint

SMALL = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 2, "vocab_size": 490}
SHARD_BYTES = 900_000
TO_INT8 = Recipe(lm_head=TargetFormat.INT8)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    directory = write_checkpoint(
        tmp_path_factory.mktemp("base") / "base", "bf16-per-expert", config=tiny_config(**SMALL)
    )
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "tokenizer.json").chmod(0o444)  # as the files of a Hugging Face cache are
    return directory


def planned(base: Path, recipe: Recipe = TO_INT8) -> BuildPlan:
    return plan_build(recipe, BuildSources(open_source("base", base)), SHARD_BYTES)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- stopped at every point ---------------------------------------------------------------------------------------

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def build_and_die(plan: BuildPlan, out: Path, point: int, *, restart: bool = False) -> bool:
    """Builds in another process, killed just before its change number `point` of the file system; False: it ended."""
    child = os.fork()
    if child == 0:
        lock, left = threading.Lock(), [point]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event not in CHANGES or (event == "open" and not is_write(arguments)):
                return
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        signal.alarm(60)
        try:
            sys.addaudithook(watch)
            run_build(plan, out, restart=restart)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def is_write(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def test_a_build_killed_before_any_change_of_the_disk_is_resumed_to_the_same_bytes(base, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # the machine does not lose power here
    plan = planned(base)
    assert len(plan.shards) > 2
    run_build(plan, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    point = 0
    while True:
        out = tmp_path / f"out{point}"
        if not build_and_die(plan, out, point):
            break
        assert not out.exists() or contents(out) == whole, f"point {point}: neither absent nor complete"
        run_build(planned(base), out)
        assert contents(out) == whole, f"point {point}"
        left = {path.name for path in tmp_path.iterdir() if path.name.startswith(f"{out.name}.")}
        assert not left - {f"{out.name}.partial.lock"}, f"point {point}"
        shutil.rmtree(out)
        point += 1
    assert point > 4 * len(plan.shards), "the points were not counted"


def test_one_build_killed_again_and_again_still_ends(base, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    plan, out = planned(base), tmp_path / "out"
    point = 0
    while build_and_die(plan, out, point):
        point += 3
    assert point > 20
    run_build(plan, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_a_restart_killed_at_any_point_goes_on_without_the_flag(base, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    plan, other = planned(base), planned(base, Recipe())
    run_build(plan, tmp_path / "whole")
    for point in range(9):
        out = tmp_path / f"out{point}"
        assert build_and_die(other, out, 14)
        assert build_and_die(plan, out, point, restart=True)
        run_build(plan, out, restart=point < 3)  # up to there nothing of the other one is discarded
        assert contents(out) == contents(tmp_path / "whole"), point


def test_a_complete_build_that_was_not_renamed_is_not_written_again(base, tmp_path):
    plan, out = planned(base), tmp_path / "out"
    run_build(plan, out)
    out.rename(tmp_path / "out.partial")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").iterdir()}
    counted: list[int] = []
    run_build(plan, out, on_bytes=counted.append)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert sum(counted) == plan.nbytes
    out.rename(tmp_path / "out.partial")
    with pytest.raises(WriteError, match="unfinished build of another recipe"):
        run_build(planned(base, Recipe()), out)


# --- where -------------------------------------------------------------------------------------------------------


def test_a_link_to_an_empty_directory_is_followed(base, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "disk" / "absent")
    for name in ("out", "dangling"):
        run_build(planned(base), tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert verify_checkpoint(tmp_path / name) == []
    assert (tmp_path / "disk" / "absent" / "config.json").exists()


@pytest.mark.parametrize("out", [".", "../here", "/", "link"])
def test_the_current_directory_and_the_root_are_refused(base, tmp_path, monkeypatch, run_cli, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if out == "link":
        out = str(tmp_path / "link")
        Path(out).symlink_to(tmp_path / "here")
    result = run_cli("build", "--base", base, "--out", out)
    assert result.code == 2
    assert "name a new directory" in result.err
    assert list((tmp_path / "here").iterdir()) == []


def test_a_mount_point_is_refused_before_anything_is_written(base, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(UsageError, match="mount point"):
        run_build(planned(base), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_restart_does_not_remove_what_onebox_did_not_write(base, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(WriteError):
            run_build(planned(base), tmp_path / "out", restart=restart)
    assert contents(partial) == {"thesis.txt": b"mine"}


# --- one at a time ------------------------------------------------------------------------------------------------


def test_a_second_build_into_one_directory_is_refused(base, tmp_path, run_cli):
    plan, out = planned(base), tmp_path / "out"
    refused: list[str] = []

    def build_too(_: int) -> None:
        if not refused:
            refused.append("")
            refused[0] = run_cli("build", "--base", base, "--out", out).err

    run_build(plan, out, on_bytes=build_too)
    assert f"Another process is building {out}" in refused[0]
    assert verify_checkpoint(out) == []
    assert {path.name for path in tmp_path.iterdir()} == {"out"}, "no lock is left"


def test_a_lock_ends_with_the_process_that_held_it(base, tmp_path):
    out = tmp_path / "out"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with build_lock(out):
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(WriteError, match="Another process"):
        run_build(planned(base), out)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "out.partial.lock").exists()
    run_build(planned(base), out)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


# --- sources that change ------------------------------------------------------------------------------------------


@pytest.fixture
def own_base(base, tmp_path) -> Path:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").chmod(0o644)
    return tmp_path / "base"


def add_key(path: Path) -> None:
    path.write_text(path.read_text().replace("{", '{"dtype": "bfloat16", ', 1))


EDITS = {
    "config.json": lambda base: add_key(base / "config.json"),
    "chat_template.jinja": lambda base: (base / "chat_template.jinja").write_text("{{ other }}"),
    "tokenizer.json": lambda base: (base / "tokenizer.json").unlink(),
    "merges.txt": lambda base: (base / "merges.txt").write_text("a b"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_second_build_notices_changed_side_files_and_config(own_base, tmp_path, name):
    out = tmp_path / "out"
    first = run_build(planned(own_base), out)
    assert run_build(planned(own_base), out) == first
    EDITS[name](own_base)
    with pytest.raises(WriteError, match=rf"not this build, which has a base checkpoint with\w* (another )?{name}"):
        run_build(planned(own_base), out)


@pytest.mark.parametrize("name", EDITS)
def test_an_unfinished_build_is_not_resumed_over_changed_side_files(own_base, tmp_path, monkeypatch, name):
    monkeypatch.setattr("os.fsync", lambda _: None)
    out = tmp_path / "out"
    assert build_and_die(planned(own_base), out, 14)
    EDITS[name](own_base)
    with pytest.raises(WriteError, match=f"{name}.*--restart"):
        run_build(planned(own_base), out)
    run_build(planned(own_base), out, restart=True)
    assert verify_checkpoint(out) == []


def test_a_changed_shard_of_equal_size_is_noticed_whatever_its_date(own_base, tmp_path):
    """Another revision of the model, copied with its times."""
    out, shard = tmp_path / "out", own_base / "model.safetensors"
    run_build(planned(own_base), out)
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-3000:] = bytes(3000)
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(WriteError, match=r"with another model\.safetensors"):
        run_build(planned(own_base), out)


def test_a_shard_written_after_the_build_is_noticed_where_no_sample_shows_it(own_base, tmp_path):
    out, shard = tmp_path / "out", own_base / "model.safetensors"
    run_build(planned(own_base), out)
    os.utime(shard)
    with pytest.raises(WriteError, match=r"base/model\.safetensors was written after it"):
        run_build(planned(own_base), out)


def test_a_source_that_changes_during_the_build_is_not_used(own_base, tmp_path):
    plan = planned(own_base)
    with pytest.raises(MismatchError, match="changed while"):
        run_build(plan, tmp_path / "out", on_bytes=lambda _: os.utime(own_base / "model.safetensors"))
    plan = planned(own_base)
    (own_base / "chat_template.jinja").write_text("{{ other }}")
    with pytest.raises(MismatchError, match=r"chat_template\.jinja changed while"):
        run_build(plan, tmp_path / "other")


def test_a_build_that_was_edited_is_not_taken_for_done(base, tmp_path):
    out = tmp_path / "out"
    run_build(planned(base), out)
    add_key(out / "config.json")
    with pytest.raises(WriteError, match=r"has been changed: config\.json has changed"):
        run_build(planned(base), out)


def test_equal_sources_in_two_places_give_equal_bytes(base, own_base, tmp_path):
    """The manifest too: nothing in it depends on when or where the sources were fetched."""
    os.utime(own_base / "model.safetensors", ns=(1, 1))
    run_build(planned(own_base), tmp_path / "one")
    run_build(planned(base), tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
