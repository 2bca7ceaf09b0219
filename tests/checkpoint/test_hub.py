"""Checkpoints named by their id on the hub: where they are looked for, and what is said of those that are not here."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from onebox.checkpoint import hub as hub_module
from onebox.checkpoint import retry
from onebox.checkpoint.fetch import plan_tensors, plan_whole, run_fetch
from onebox.checkpoint.hub import HubId, find_source, inspect_remote, model_name, resolve_source
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.partial import MTP_CLASSES, classes_named, words_for
from onebox.checkpoint.recipe import Recipe, TargetFormat, classes_used
from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.modules import ModuleClass
from tests.hub_server import Fault

REPO = "Qwen/Small-FP8"
SHARED = frozenset({ModuleClass.SHARED})


@pytest.fixture
def fp8(hub, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.01)
    hub.add(REPO, checkpoints / "fp8-sharded")
    return checkpoints / "fp8-sharded"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3.5-122B-A10B", HubId("Qwen/Qwen3.5-122B-A10B")),
        ("Intel/x@v1.0", HubId("Intel/x", "v1.0")),
        ("Intel/x@refs/pr/1", HubId("Intel/x", "refs/pr/1")),
        ("models", None),
        ("./models/x", None),
        ("/models/x", None),
        ("~/x", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("a b/c", None),
        ("../x", None),
        ("", None),
    ],
)
def test_only_owner_and_name_are_an_id(text, expected):
    assert HubId.parse(text) == expected


def test_a_directory_that_exists_goes_before_an_id_of_the_same_form(hub, fp8, tmp_path):
    snapshot_download(REPO)
    (tmp_path / REPO).mkdir(parents=True)
    assert resolve_source(REPO) == Path(REPO)
    assert model_name(REPO) == "Small-FP8"


def test_what_lies_in_the_cache_is_used_without_the_network(hub, fp8):
    expected = Path(snapshot_download(REPO))
    hub.requests.clear()
    assert resolve_source(REPO) == expected
    assert model_name(REPO) == REPO
    assert hub.requests == []


def test_a_revision_is_looked_for_by_name_and_by_commit(hub, fp8, checkpoints):
    commit = hub.add(REPO, checkpoints / "fp8", revision="v2")
    expected = Path(snapshot_download(REPO, revision="v2"))
    assert find_source(REPO) is None
    assert find_source(f"{REPO}@v2") == expected
    assert find_source(f"{REPO}@{commit}") == expected
    assert find_source(f"{REPO}@v3") is None


def test_a_cache_without_all_shards_is_not_used(hub, fp8):
    snapshot = Path(snapshot_download(REPO))
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    assert find_source(REPO) is None
    snapshot_download("Qwen/Small-FP8", allow_patterns=["config.json"])
    assert find_source(REPO) is None


def test_a_cache_with_the_shards_that_are_needed_suffices_for_them(hub, fp8):
    index = json.loads((fp8 / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("mtp.")}
    snapshot = Path(snapshot_download(REPO))
    for name in set(index.values()) - needed:
        (snapshot / name).unlink()
    assert find_source(REPO, MTP_CLASSES) == snapshot
    (snapshot / min(needed)).unlink()
    assert find_source(REPO, MTP_CLASSES) is None


def test_what_was_pulled_is_found_by_its_id(hub, fp8):
    run_fetch(plan_whole(REPO, Path("models/Small-FP8")))
    assert find_source(REPO) == Path("models/Small-FP8")
    assert find_source("Other/Small-FP8") is None
    assert find_source(f"{REPO}@other") is None


def test_a_pulled_part_is_found_for_what_it_holds(hub, fp8):
    run_fetch(plan_tensors(REPO, SHARED, Path("models/Small-FP8-shared")))
    assert find_source(REPO, SHARED) == Path("models/Small-FP8-shared")
    assert find_source(REPO, SHARED | MTP_CLASSES) is None
    assert find_source(REPO) is None


def test_an_unfinished_pull_is_not_a_checkpoint(hub, fp8, monkeypatch):
    monkeypatch.setattr(retry, "MAX_RETRIES", 0)
    hub.fail(Fault.CUT, path="safetensors", after_bytes=1000)
    with pytest.raises(UnreadableError):
        run_fetch(plan_whole(REPO, Path("models/Small-FP8")))
    with pytest.raises(UnreadableError, match="what has arrived is kept"):
        resolve_source(REPO)


def test_what_is_not_here_comes_with_its_size_and_the_command(hub, fp8):
    size = sum(path.stat().st_size for path in fp8.iterdir())
    with pytest.raises(UnreadableError) as error:
        resolve_source(REPO)
    assert f"`onebox pull {REPO}` fetches it, {size / 1e9:.2f} GB in " in str(error.value)


def test_of_a_source_only_the_part_that_is_needed_is_named(hub, fp8):
    with pytest.raises(UnreadableError) as error:
        resolve_source(REPO, SHARED)
    assert f"`onebox pull {REPO} --only shared` fetches what is needed, 0.00 GB of 0.00 GB" in str(error.value)


def test_a_name_that_nobody_has_is_said_to_be_one(hub, fp8):
    with pytest.raises(UnreadableError, match=r"models/typo is no directory here .* The hub has no models/typo"):
        resolve_source("models/typo")


def test_a_hub_that_is_not_there_costs_only_the_size(hub, fp8, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UnreadableError, match=r"`onebox pull Qwen/None` fetches it. Its size is not known: .*reached"):
        resolve_source("Qwen/None")


def test_a_hub_that_says_nothing_is_not_waited_for(hub, fp8, monkeypatch):
    monkeypatch.setattr(hub_module, "_ASK_S", 0.2)
    hub.fail(Fault.STALL, path="/api/")
    with pytest.raises(UnreadableError, match="size is not known: the hub did not answer"):
        resolve_source(REPO)


def test_headers_on_the_hub_give_the_report_of_a_copy(hub, fp8):
    here, there = inspect_checkpoint(fp8), inspect_remote(REPO)
    assert there.directory == Path(REPO)
    assert replace(there, directory=here.directory) == here
    weights = sum(path.stat().st_size for path in fp8.glob("*.safetensors"))
    assert hub.bytes_sent(r"\.safetensors$") < 0.01 * weights


def test_inspect_and_plan_read_what_is_on_the_hub_alone(hub, fp8, run_cli):
    report = run_cli("inspect", REPO)
    assert report.code == 0
    assert f"{REPO}: " in report.out
    plan = run_cli("plan", REPO)
    assert plan.code == 0, plan.err
    assert f"{REPO} (read from its headers)" in plan.out
    assert not Path("models").exists()


def test_values_are_not_read_over_the_network(hub, fp8, run_cli):
    result = run_cli("inspect", REPO, "--deep")
    assert result.code == 2
    assert f"`onebox pull {REPO}`" in result.err


@pytest.mark.parametrize("command", ["serve", "warm", "verify"])
def test_commands_that_need_weights_say_what_to_pull(hub, fp8, run_cli, command):
    result = run_cli(command, REPO, *(["--port", "0"] if command == "serve" else []))
    assert result.code == 2
    assert f"`onebox pull {REPO}`" in result.err
    assert result.err.count("\n") == 1


def test_a_build_names_the_part_of_each_source(hub, fp8, checkpoints, run_cli):
    result = run_cli("build", "--base", checkpoints / "autoround", "--fp8", REPO, "--attention", "fp8", "--out", "out")
    assert result.code == 2
    assert f"`onebox pull {REPO} --only attention,shared`" in result.err


def test_a_build_from_ids_is_the_build_from_directories(hub, fp8, checkpoints, run_cli):
    hub.add("Intel/Small-int4", checkpoints / "autoround")
    hub.add("Qwen/Small", checkpoints / "bf16-fused-sharded")
    snapshot_download("Intel/Small-int4")
    assert run_cli("pull", REPO, "--only", "shared").code == 0
    assert run_cli("pull", "Qwen/Small", "--only", "mtp").code == 0
    options = ("--mtp", "int4", "--lm-head", "int8")
    ids = ("--base", "Intel/Small-int4", "--fp8", REPO, "--mtp-from", "Qwen/Small")
    built = run_cli("build", *ids, *options, "--out", "from-ids")
    assert built.code == 0, built.err
    directories = ("--base", checkpoints / "autoround", "--fp8", fp8, "--mtp-from", checkpoints / "bf16-fused-sharded")
    assert run_cli("build", *directories, *options, "--out", "from-directories").code == 0
    assert Path("from-ids/model.safetensors").read_bytes() == Path("from-directories/model.safetensors").read_bytes()
    assert Path("from-ids/config.json").read_bytes() == Path("from-directories/config.json").read_bytes()
    assert not Path("from-ids/onebox_source.json").exists()


def test_a_build_that_was_on_the_hub_is_verified_by_its_id(hub, fp8, checkpoints, run_cli):
    assert run_cli("build", "--base", checkpoints / "fp8", "--out", "built").code == 0
    Path("built/.gitattributes").write_text("*.safetensors filter=lfs")
    hub.add("Me/Built", Path("built"))
    assert run_cli("pull", "Me/Built").code == 0
    result = run_cli("verify", "Me/Built")
    assert (result.code, result.err) == (0, ""), result.out
    snapshot_download("Me/Built")
    assert run_cli("verify", "Me/Built").code == 0


@pytest.mark.parametrize(
    ("recipe", "role", "has_mtp_source", "expected"),
    [
        (Recipe(), "mtp", True, MTP_CLASSES),
        (Recipe(shared=TargetFormat.FP8), "fp8", False, SHARED),
        (Recipe(shared=TargetFormat.FP8, mtp=TargetFormat.FP8), "fp8", True, SHARED),
        (Recipe(shared=TargetFormat.FP8, mtp=TargetFormat.FP8), "fp8", False, SHARED | MTP_CLASSES),
        (Recipe(experts=TargetFormat.INT4), "fp8", False, frozenset()),
    ],
)
def test_a_recipe_uses_a_source_for_what_it_takes_from_it(recipe, role, has_mtp_source, expected):
    assert classes_used(recipe, role, has_mtp_source=has_mtp_source) == expected


@pytest.mark.parametrize("words", [["shared"], ["mtp", "shared"], ["attention"], ["delta"], ["experts", "lm-head"]])
def test_words_and_classes_are_each_others_inverse(words):
    assert sorted(words_for(classes_named(words))) == words


def test_a_part_that_does_not_exist_is_refused_by_name(fp8, run_cli):
    with pytest.raises(UsageError, match="'router' is no part of a checkpoint: --only takes experts"):
        classes_named(["router"])
    assert re.search("'shard' is no part", run_cli("pull", REPO, "--only", "shard").err)
