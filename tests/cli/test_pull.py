"""`onebox pull`: where it puts what, and what it says."""

import pytest

from onebox.checkpoint.source import open_checkpoint

REPO = "Qwen/Small-FP8"


@pytest.fixture
def fp8(hub, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.add(REPO, checkpoints / "fp8-sharded")
    return checkpoints / "fp8-sharded"


def test_a_repository_goes_to_a_directory_of_its_name(hub, fp8, tmp_path, run_cli):
    result = run_cli("pull", REPO)
    assert result.code == 0
    assert "Qwen/Small-FP8 -> models/Small-FP8" in result.out
    assert "Check it with `onebox inspect models/Small-FP8`." in result.out
    assert run_cli("inspect", REPO).out == run_cli("inspect", "models/Small-FP8").out
    hub.requests.clear()
    again = run_cli("pull", REPO)
    assert again.code == 0
    assert "0.00 of 0.00 GB to fetch" in again.out
    assert hub.requests == []


def test_parts_go_to_a_directory_of_their_own(fp8, tmp_path, run_cli):
    assert run_cli("pull", REPO, "--only", "shared,lm-head").code == 0
    names = open_checkpoint(tmp_path / "models" / "Small-FP8-shared-lm-head").tensors
    assert "lm_head.weight" in names
    assert not any(".experts." in name for name in names)


@pytest.mark.parametrize("options", [(f"{REPO}@v2",), (REPO, "--revision", "v2"), (f"{REPO}@v2", "--revision", "v2")])
def test_a_revision_is_part_of_the_name_or_an_option(hub, fp8, checkpoints, tmp_path, run_cli, options):
    commit = hub.add(REPO, checkpoints / "fp8", revision="v2")
    result = run_cli("pull", *options, "--out", tmp_path / "out")
    assert result.code == 0
    assert f"commit {commit}." in result.out
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((f"{REPO}@v2", "--revision", "v3"), "name two revisions"),
        (("Small-FP8",), "'Small-FP8' is not a repository on the hub: write owner/name"),
        (("a/b/c d",), "is not a repository on the hub"),
        (("Qwen/none--such",), "Qwen/none--such"),
        ((REPO, "--only", "router"), "'router' is no part of a checkpoint"),
        (("Qwen/None",), "The hub has no Qwen/None"),
    ],
)
def test_what_cannot_be_pulled_is_one_sentence(fp8, run_cli, options, text):
    result = run_cli("pull", *options)
    assert result.code == 2
    assert text in result.err
    assert result.err.count("\n") == 1


def test_a_repository_without_safetensors_is_refused(hub, tmp_path, run_cli):
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(bytes(10))
    (tmp_path / "pickles" / "config.json").write_text("{}")
    hub.add("Old/Model", tmp_path / "pickles")
    assert "holds no .safetensors file" in run_cli("pull", "Old/Model", "--out", tmp_path / "out").err
