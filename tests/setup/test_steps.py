"""`onebox up` against a hub: every step once, only what is needed, and the same bytes however it was stopped."""

import json
import re
import shutil
import signal

import pytest

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.manifest import read_manifest
from onebox.checkpoint.partial import class_finder
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, classes_used, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.setup.place import SetupPlace
from onebox.setup.recipe_file import read_recipe
from tests.hub_server import Fault
from tests.setup.conftest import Box


@pytest.fixture(scope="module")
def first(tmp_path_factory, small_hub, nursery):
    """A box after one undisturbed run from nothing, with how that ended and the bytes that were fetched."""
    box = Box(tmp_path_factory.mktemp("first"), small_hub, nursery)
    small_hub.requests.clear()
    ended = box.up()
    assert ended.code == 0, ended.err
    return box, ended, small_hub.bytes_sent()


@pytest.fixture
def again(first, box):
    """A copy of that box."""
    shutil.copytree(first[0].directory / "models", box.directory / "models")
    return box


HYBRID = Recipe(shared=TargetFormat.FP8, lm_head=TargetFormat.INT8, mtp=TargetFormat.INT4)


def used_bytes(directory, role: str, recipe: Recipe = HYBRID) -> int:
    """Bytes of the tensors that the build takes from one source."""
    checkpoint = open_checkpoint(directory)
    classes = classes_used(recipe, role, has_mtp_source=False)
    find = class_finder(checkpoint.spec)
    return sum(entry.nbytes for name, entry in checkpoint.tensors.items() if find(name) in classes)


def test_little_more_is_fetched_than_the_tensors_that_are_used(first, tiny_sources):
    used = used_bytes(tiny_sources / "int4", "base") + used_bytes(tiny_sources / "fp8", "fp8")
    whole = sum(path.stat().st_size for path in tiny_sources.glob("*/*.safetensors"))
    assert used < first[2] <= 1.05 * used < 0.6 * whole


def test_every_step_says_what_it_did(first):
    steps = first[1].steps
    assert list(steps) == ["small,", "check", "fetch", "build", "verify", "warm"]
    assert steps["check"].startswith("no GPU: the model runs on the CPU, which is for small models")
    assert "MB" in steps["fetch"]
    assert " tensors, " in steps["build"]


def test_a_second_run_does_nothing_and_asks_nobody(first):
    box = first[0]
    before = {path: path.stat().st_mtime_ns for path in box.built.iterdir()}
    box.hub.requests.clear()
    ended = box.up()
    assert (ended.code, ended.redone) == (0, {"check"})
    assert box.hub.requests == []
    assert {path: path.stat().st_mtime_ns for path in box.built.iterdir()} == before


@pytest.mark.parametrize(("signal_number", "strides"), [(signal.SIGKILL, (8, 6, 1)), (signal.SIGINT, (60, 20, 3))])
def test_stopped_again_and_again_in_every_step_it_ends_in_the_same_bytes(box, first, signal_number, strides):
    """Each run is stopped a little later in the step than the one before, until the step comes to its end."""
    code = -signal_number if signal_number == signal.SIGKILL else 130
    for step, stride in zip(("fetch", "build", "verify"), strides, strict=True):
        num_stops = 0
        while (ended := box.up("--until", step, step=step, stop_at=1 + num_stops * stride, signal=signal_number)).code:
            assert ended.code == code, ended.err
            assert list(ended.steps)[-1] == step
            assert ended.err == ("onebox: stopped.\n" if code == 130 else "")
            num_stops += 1
        assert num_stops
    assert box.up().redone == {"check"}
    assert box.digest == first[0].digest
    assert not list(box.directory.glob("models/*.partial"))


def test_a_connection_that_is_cut_is_taken_up_again(box, first):
    box.hub.requests.clear()
    box.hub.fail(Fault.CUT, path=r"int4.*safetensors$", after_bytes=100_000, times=2)
    assert box.up().code == 0
    assert box.digest == first[0].digest
    assert box.hub.bytes_sent() < 1.2 * first[2]


def test_without_the_hub_it_is_a_sentence_and_a_later_run_resumes(box, first):
    assert box.up(step="fetch", stop_at=12).code == -signal.SIGKILL
    alone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert list(box.up("--dry-run", environment=alone).steps) == ["small,", "check", "fetch"]
    ended = box.up(environment=alone)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert "127.0.0.1:9 cannot be reached" in ended.err
    assert box.up().code == 0
    assert box.digest == first[0].digest


@pytest.mark.parametrize("max_file_bytes", [300_000, 1_200_000])
def test_a_disk_that_fills_up_is_a_sentence_and_a_later_run_resumes(box, first, max_file_bytes):
    ended = box.up(max_file_bytes=max_file_bytes)
    assert ended.code == 1
    assert len(ended.err.splitlines()) == 1
    assert "run the same command again" in ended.err
    assert box.up().code == 0
    assert box.digest == first[0].digest


def test_a_disk_without_room_is_refused_before_anything_is_fetched(box, run_cli, monkeypatch):
    box.hub.use(monkeypatch, box.directory / "home")
    monkeypatch.chdir(box.directory)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    ended = run_cli("up", "small", "--recipe", "hybrid.toml", "--no-serve")
    assert ended.code == 1
    assert "needs 0.34 GB in " in ended.err
    assert "choose another --dir" in ended.err
    assert not (box.directory / "models" / "sources").exists()


def test_a_dry_run_says_what_each_step_would_take_and_writes_nothing(box, first):
    before = sorted(box.directory.rglob("*"))
    ended = box.up("--dry-run", serves=True)
    assert ended.code == 0
    assert sorted(box.directory.rglob("*")) == before
    steps = ended.steps
    assert re.match(
        r"to do: \d\.\d MB of Intel/Small-int4, 0\.\d MB of Qwen/Small-FP8 \(shared expert\)", steps["fetch"]
    )
    assert re.match(r"to do: models/small-hybrid: (\d\.\d MB), \1 of them to write; 1 s at 1 GB/s", steps["build"])
    assert steps["serve"] == "onebox serve models/small-hybrid --max-model-len 2048"
    done = first[0].up("--dry-run")
    assert all(done.steps[step].startswith("done:") for step in ("fetch", "build", "verify", "warm"))


def test_a_changed_recipe_redoes_what_it_affects(again):
    again.write_recipe("max_model_len = 2048", "max_model_len = 1024")
    assert again.up().redone == {"check"}
    before = again.digest
    again.write_recipe('lm_head = "int8"', 'lm_head = "keep"')
    again.hub.requests.clear()
    assert again.up().redone == {"check", "build", "verify"}
    assert again.hub.requests == []
    assert again.digest != before
    assert not list(again.directory.glob("models/*.old"))
    again.write_recipe()
    assert again.up().redone == {"check", "build", "verify"}
    assert again.digest == before


def test_an_earlier_build_that_a_stopped_run_has_left_is_removed(again):
    left = again.built.with_name("small-hybrid.old")
    shutil.copytree(again.built, left)
    assert again.up("--dry-run").code == 0
    assert left.exists()
    assert again.up().redone == {"check"}
    assert not left.exists()


def test_an_unfinished_build_of_another_recipe_is_given_up(again, first):
    again.write_recipe('lm_head = "int8"', 'lm_head = "keep"')
    assert again.up(step="build", stop_at=9).code == -signal.SIGKILL
    assert (again.directory / "models" / "small-hybrid.partial").exists()
    again.write_recipe()
    assert again.up().code == 0
    assert again.digest == first[0].digest


def test_a_recipe_that_needs_more_of_a_source_fetches_the_rest(again, tiny_sources):
    """The other recipe needs less of the base and more of FP8; its build is the same as from whole sources."""
    again.write_recipe('lm_head = "int8"', 'attention = "fp8"')
    again.hub.requests.clear()
    ended = again.up()
    assert ended.code == 0, ended.err
    assert ended.redone == {"check", "fetch", "build", "verify"}
    recipe = Recipe.completed({"attention": TargetFormat.FP8, "mtp": TargetFormat.INT4}, has_fp8=True)
    more = used_bytes(tiny_sources / "fp8", "fp8", recipe) - used_bytes(tiny_sources / "fp8", "fp8")
    assert 0 < again.hub.bytes_sent(r"safetensors$") < 1.2 * more
    sources = BuildSources(open_source("base", tiny_sources / "int4"), open_source("fp8", tiny_sources / "fp8"))
    whole = run_build(plan_build(recipe, sources), again.directory / "whole")
    assert read_manifest(again.built).tensors == whole.tensors
    again.write_recipe()
    assert again.up().redone == {"check", "build", "verify"}


def test_the_sources_may_be_removed_after_the_build(again):
    shutil.rmtree(again.directory / "models" / "sources")
    again.hub.requests.clear()
    assert again.up().redone == {"check"}
    assert again.hub.requests == []


def test_a_fetch_that_was_stopped_just_before_its_end_is_ended(again, first):
    """All bytes have arrived, and the fetch has not said so."""
    shutil.rmtree(again.built)
    path = again.directory / "models" / "sources" / "Qwen--Small-FP8" / "onebox_source.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_complete": False}))
    again.hub.requests.clear()
    assert again.up().redone == {"check", "fetch", "build", "verify"}
    assert again.hub.bytes_sent(r"safetensors$") == 0
    assert json.loads(path.read_text())["is_complete"]
    assert again.digest == first[0].digest


def test_a_removed_file_is_fetched_again_and_no_other(again, first):
    shutil.rmtree(again.built)
    removed = again.directory / "models" / "sources" / "Qwen--Small-FP8" / "model-00001-of-00002.safetensors"
    size = removed.stat().st_size
    removed.unlink()
    again.hub.requests.clear()
    assert again.up().redone == {"check", "fetch", "build", "verify"}
    assert again.hub.bytes_sent(r"safetensors$") <= size
    assert again.digest == first[0].digest


def test_a_changed_byte_of_the_build_is_found(again):
    shard = again.built / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    ended = again.up()
    assert ended.code == 1
    assert "is not sound" in ended.err
    assert "remove models/small-hybrid and run the same command again" in ended.err


def test_a_directory_that_is_not_ours_is_not_touched(box):
    box.built.mkdir(parents=True)
    (box.built / "letter.txt").write_text("mine")
    ended = box.up()
    assert ended.code == 1
    assert "models/small-hybrid exists and was not built by onebox" in ended.err
    assert not (box.directory / "models" / "sources").exists()
    assert [path.name for path in box.built.iterdir()] == ["letter.txt"]


def test_a_second_run_at_the_same_time_is_refused(again):
    place = SetupPlace(again.directory / "models", read_recipe(again.directory / "hybrid.toml"))
    with place.locked() as name_step:
        name_step("fetch")
        ended = again.up()
    assert ended.code == 1
    assert "Another `onebox up` is at work in models (process " in ended.err
    assert "step fetch): wait for it, stop it, or choose another --dir" in ended.err
    assert list(again.up("--until", "check").steps) == ["small,", "check"]


NVIDIA_SMI = """#!/bin/sh
case $1 in *driver*) echo 580.95.05;; *) echo 'NVIDIA GB10, 12.1, [N/A], [N/A]';; esac
"""


def test_a_gpu_that_torch_cannot_use_stops_it_before_anything_is_fetched(box):
    program = box.directory / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    # A torch with CUDA that finds no GPU is refused as well, in other words.
    with_gpu = {"PATH": f"{program.parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"}
    ended = box.up(environment=with_gpu)
    assert ended.code == 1
    assert "This box has a GPU, NVIDIA GB10 (compute capability 12.1, driver 580.95.05)" in ended.err
    assert "--index-url https://download.pytorch.org/whl/cu130" in ended.err
    assert not (box.directory / "models" / "sources").exists()
    assert box.up("--until", "check", "--", "--device", "cpu", environment=with_gpu).code == 0


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_fetched(box):
    ended = box.up("--", "--gpu-memory-utilization", "0.01")
    assert ended.code == 1
    assert "too large" in ended.err
    assert not (box.directory / "models" / "sources").exists()
    dry = box.up("--dry-run", "--", "--gpu-memory-utilization", "0.01")
    assert dry.code == 1
    assert dry.steps["check"].startswith("would be refused: The plan is")
    assert dry.steps["build"].startswith("to do:")


def test_without_a_build_table_the_fetched_checkpoint_is_served_as_it_is(box, tiny_sources):
    recipe = 'model = "small"\n[sources]\nbase = "Intel/Small-int4"\n[serve]\nmax_model_len = 2048\n'
    (box.directory / "hybrid.toml").write_text(recipe)
    ended = box.up()
    assert ended.code == 0, ended.err
    assert "served as it is" in ended.steps["build"]
    fetched = box.directory / "models" / "sources" / "Intel--Small-int4"
    for path in (tiny_sources / "int4").iterdir():
        assert (fetched / path.name).read_bytes() == path.read_bytes()
    assert box.up().redone == {"check"}


def test_what_lies_in_the_hugging_face_cache_is_used_from_there(box, tiny_sources, tmp_path_factory):
    home = tmp_path_factory.mktemp("full-home")
    repository = home / "hub" / "models--Intel--Small-int4"
    commit = box.hub.repositories["Intel/Small-int4"].revisions["main"]
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_sources / "int4", repository / "snapshots" / commit)
    recipe = 'model = "small"\n[sources]\nbase = "Intel/Small-int4"\n[serve]\nmax_model_len = 2048\n'
    (box.directory / "hybrid.toml").write_text(recipe)
    box.hub.requests.clear()
    ended = box.up("--dry-run", serves=True, environment={"HF_HUB_CACHE": str(home / "hub")})
    assert ended.code == 0, ended.out
    assert "snapshots" in ended.steps["serve"]
    assert box.hub.requests == []


def test_local_directories_are_sources_like_any_other(box, tiny_sources, first):
    recipe = (box.directory / "hybrid.toml").read_text()
    shutil.copytree(tiny_sources / "int4", box.directory / "int4")
    text = recipe.replace("Intel/Small-int4", "./int4").replace("Qwen/Small-FP8", f"{tiny_sources}/fp8")
    (box.directory / "hybrid.toml").write_text(text)
    box.hub.requests.clear()
    assert box.up().redone == {"check", "build", "verify"}
    assert box.hub.requests == []
    weights = {name: value for name, value in first[0].digest.items() if name.endswith(".safetensors")}
    assert weights.items() <= box.digest.items()
    assert box.up().redone == {"check"}
    template = box.directory / "int4" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    assert box.up().redone == {"check", "build", "verify"}
    assert (box.built / "chat_template.jinja").read_text() == template.read_text()
