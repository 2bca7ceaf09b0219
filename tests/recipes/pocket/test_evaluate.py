"""The evaluation counts everything it reports, shown on a tiny random model whose answers are all wrong."""

import json
from dataclasses import replace

import pytest
import torch

from onebox.checkpoint.verify import verify_checkpoint
from onebox.engine.api import AcceptanceCounts
from onebox.model import reference
from onebox.model.load import load_model
from onebox.model.random import write_random_checkpoint
from onebox.model.reference_weights import load_weights
from onebox.pocket.builds import BUILDS, build
from onebox.spec.kv import KVFormat
from recipes.pocket import evaluate
from recipes.pocket.evaluate import TOY
from recipes.pocket.evaluation.predictions import HeldOutPassage, ModelVariant, compare, predict
from recipes.pocket.evaluation.report import claims
from recipes.pocket.evaluation.tasks import TaskResult

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate") / "tiny"
    write_random_checkpoint(directory)
    return directory


def passage(length: int = 100, start: int = 40) -> HeldOutPassage:
    return HeldOutPassage("counting", tuple(range(length)), start)


def test_predictions_are_the_references(checkpoint):
    loaded = load_weights(checkpoint)
    found = predict(ModelVariant(load_model(checkpoint, CPU, torch.float32), KVFormat.parse("bf16")), passage())
    tokens = torch.tensor(passage().token_ids)
    hidden = reference.forward(loaded.spec, loaded.weights, tokens, reference.Cache.empty(loaded.spec))
    expected = reference.lm_head(loaded.spec, loaded.weights, hidden).log_softmax(-1)[39:99]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_a_model_agrees_with_itself_and_less_so_with_a_coarse_cache(checkpoint):
    model = load_model(checkpoint, CPU, torch.float32)
    names = ("bf16", "turboquant_k2v2")
    variants = {"first": ModelVariant(model, KVFormat.parse("bf16"))} | {
        n: ModelVariant(model, KVFormat.parse(n)) for n in names
    }
    found = compare(variants, [passage()])
    assert found["bf16"].mean_divergence == 0
    assert found["bf16"].top_agreement == 1
    assert found["turboquant_k2v2"].mean_divergence > 0
    assert found["first"].num_tokens == 60


def test_perplexity_of_a_random_model_is_near_its_vocabulary(checkpoint):
    model = load_model(checkpoint, CPU, torch.float32)
    found = compare({"only": ModelVariant(model, KVFormat.parse("bf16"))}, [passage()])["only"]
    assert 250 < found.perplexity < 600
    assert found.perplexities["counting"] == pytest.approx(found.perplexity)


def test_a_second_draft_counts_only_after_a_kept_first():
    drafts = AcceptanceCounts(num_steps=10, num_drafted=20, num_accepted=12, accepted_by_position=(8, 4))
    result = TaskResult("json", 1, drafts=drafts)
    assert result.acceptance(0) == 0.8
    assert result.acceptance(1) == 0.5
    assert TaskResult("none", 1).acceptance(0) is None
    assert TaskResult("all wrong", 1, drafts=AcceptanceCounts(num_steps=3, num_drafted=6)).acceptance(0) == 0.0


TINY = replace(TOY, passage_tokens=900, builds=("hybrid",))


def test_all_tables_are_printed_and_the_last_line_is_json(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "QUICK", TINY)
    arguments = [str(checkpoint), "--data", str(tmp_path), "--kv", "bf16", "fp8", "--quick", "--out", str(tmp_path)]
    assert evaluate.main(arguments) == 1, "random weights reach nothing, and the exit code says so"
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    found = json.loads(lines[-1])
    assert {task["name"] for task in found["tasks"]} >= {"invoice", "invoice, ordinary names", "tools", "key at 256"}
    assert list(found["agreements"]) == ["master / bf16", "master / fp8", "hybrid / bf16", "hybrid / fp8"]
    assert found["agreements"]["hybrid / bf16"]["mean_kl"] > 0
    assert [build["name"] for build in found["builds"]] == ["master", "hybrid"]
    assert found["builds"][1]["num_bytes"] < found["builds"][0]["num_bytes"]
    assert {claim["what"]: claim["holds"] for claim in found["claims"]}["unseen invoices: valid JSON"] is False
    assert sum(line.startswith("### ") for line in lines) == sum(line.startswith("|---") for line in lines) == 7
    assert (tmp_path / "evaluation.md").read_text() in printed
    assert json.loads((tmp_path / "evaluation.json").read_text()) == found


def test_a_wrong_kv_format_is_refused_before_anything_is_measured(checkpoint, capsys):
    assert evaluate.main([str(checkpoint), "--kv", "bf16", "int3"]) == 2
    assert "int3" in capsys.readouterr().err


def test_builds_that_differ_in_their_mtp_head_alone_predict_the_same(checkpoint, tmp_path):
    """So the evaluation computes them once."""
    names = ("hybrid-int8-head", "hybrid-int8-head-int4-mtp")
    made = {name: tmp_path / name for name in names}
    for name, path in made.items():
        build(name, checkpoint, path)
    models = {name: load_model(path, CPU, torch.float32) for name, path in made.items()}
    variants = {name: ModelVariant(model, KVFormat.parse("fp8")) for name, model in models.items()}
    found = compare(variants, [passage()])
    assert found[names[1]].mean_divergence == 0
    shared = evaluate.agreements(made, [passage()], ["fp8"])
    assert [each.perplexity for each in shared.values()] == [found[name].perplexity for name in names]


def test_every_build_of_the_pocket_model_can_be_made_and_read(checkpoint, tmp_path):
    for name in BUILDS:
        build(name, checkpoint, tmp_path / name)
        assert verify_checkpoint(tmp_path / name) == []
        assert predict(
            ModelVariant(load_model(tmp_path / name, CPU, torch.float32), KVFormat.parse("bf16")), passage()
        ).shape == (60, 384)


def test_a_claim_holds_from_its_least_on():
    drafts = AcceptanceCounts(num_steps=100, num_drafted=200, num_accepted=85, accepted_by_position=(85, 0))
    scores = {"exact": 0.5, "valid": 0.95, "fields": 0.89}
    tasks = {
        "invoice": TaskResult("invoice", 100, scores, drafts),
        "key at 4,096": TaskResult("key at 4,096", 50, {"exact": 0.92}),
    }
    found = {claim.what: claim.holds for claim in claims(tasks)}
    assert found == {
        "unseen invoices: valid JSON": True,
        "unseen invoices: right fields": False,
        "a key in 4,096 tokens found": True,
        "first of two drafts accepted: invoice": True,
    }
