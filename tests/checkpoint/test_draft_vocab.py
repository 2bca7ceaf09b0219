"""A draft vocabulary in a checkpoint: written as vLLM's drafters have it, carried along, shown, checked."""

import json

import pytest
from safetensors.torch import load_file

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.verify import verify_checkpoint
from onebox.spec.errors import UsageError

TOKENS = [300, 2, 77, 5]


def build(base, out, draft_vocab=None, **recipe):
    run_build(plan_build(Recipe(**recipe), BuildSources(open_source("base", base)), draft_vocab=draft_vocab), out)
    assert verify_checkpoint(out) == []
    return out


def d2t(directory):
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return tensors.get("mtp.d2t")


def size_in_config(directory):
    config = json.loads((directory / "config.json").read_text())
    return config.get("text_config", config).get("draft_vocab_size")


@pytest.fixture(scope="module")
def built(checkpoints, tmp_path_factory):
    return build(checkpoints / "autoround", tmp_path_factory.mktemp("built") / "out", TOKENS)


def test_a_list_is_written_as_offsets_and_shown(built, run_cli):
    assert d2t(built).tolist() == [300, 1, 75, 2]
    assert size_in_config(built) == 4
    report = inspect_checkpoint(built, deep=True)
    assert report.is_servable, report.problems
    assert report.mtp.draft_vocab_size == 4
    assert not [problem for problem in report.problems if "d2t" in problem.message]
    assert "drafts from 4 listed tokens" in run_cli("inspect", str(built)).out
    assert "drafts from 4 listed tokens (mtp.d2t)" in run_cli("verify", str(built)).out


def test_tools_that_follow_the_index_do_not_meet_the_list(built):
    index = json.loads((built / "model.safetensors.index.json").read_text())
    tensors = load_file(built / "model.safetensors")
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert list(load_file(built / "draft_vocab.safetensors")) == ["mtp.d2t"]


def test_a_list_goes_with_its_head_until_it_is_taken_away(built, tmp_path):
    kept = build(built, tmp_path / "kept", mtp=TargetFormat.KEEP)
    assert d2t(kept).tolist() == d2t(built).tolist()
    without = build(built, tmp_path / "without", [])
    assert d2t(without) is None
    assert size_in_config(without) is None


def test_a_list_without_a_head_is_refused(checkpoints, tmp_path):
    base = BuildSources(open_source("base", checkpoints / "nvfp4-modelopt"))
    with pytest.raises(UsageError, match="nothing to act on"):
        plan_build(Recipe(), base, draft_vocab=TOKENS)


def test_a_list_beyond_the_vocabulary_is_a_problem(checkpoints, tmp_path):
    wrong = build(checkpoints / "autoround", tmp_path / "wrong", [3, 10**6])
    assert inspect_checkpoint(wrong).is_servable
    report = inspect_checkpoint(wrong, deep=True)
    assert [problem.tensor for problem in report.problems if problem.is_fatal] == ["mtp.d2t"]


def test_a_config_that_says_another_size_is_told(checkpoints, built, tmp_path):
    copy = build(built, tmp_path / "copy")
    path = copy / "config.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 4', '"draft_vocab_size": 9'))
    notes = [problem.message for problem in inspect_checkpoint(copy).problems]
    assert any("draft_vocab_size 9, but mtp.d2t lists 4" in note for note in notes)
