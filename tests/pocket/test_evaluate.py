"""The evaluation measures what it says, on the tiny random model: nothing is right there, and everything is counted."""

import json
from dataclasses import replace

import pytest
import torch

from onebox.engine.api import AcceptanceCounts
from onebox.model import reference
from onebox.model.assemble import load_model
from onebox.model.load import load_weights
from onebox.model.random import write_random_checkpoint
from onebox.pocket import evaluate
from onebox.pocket.agree import Variant, compare, predictions
from onebox.pocket.passages import Passage
from onebox.pocket.tasks import TaskResult
from onebox.spec.kv import KVFormat

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate") / "tiny"
    write_random_checkpoint(directory)
    return directory


def passage(length: int = 100, start: int = 40) -> Passage:
    return Passage("counting", tuple(range(length)), start)


def test_predictions_are_the_references(checkpoint):
    loaded = load_weights(checkpoint)
    found = predictions(Variant(load_model(checkpoint, CPU, torch.float32), KVFormat.parse("bf16")), passage())
    tokens = torch.tensor(passage().token_ids)
    hidden = reference.forward(loaded.spec, loaded.weights, tokens, reference.Cache.empty(loaded.spec))
    expected = reference.lm_head(loaded.spec, loaded.weights, hidden).log_softmax(-1)[39:99]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_a_model_agrees_with_itself_and_less_so_with_a_coarse_cache(checkpoint):
    model = load_model(checkpoint, CPU, torch.float32)
    names = ("bf16", "turboquant_k2v2")
    variants = {"first": Variant(model, KVFormat.parse("bf16"))} | {n: Variant(model, KVFormat.parse(n)) for n in names}
    found = compare(variants, [passage()])
    assert found["bf16"].mean_divergence == 0
    assert found["bf16"].top_agreement == 1
    assert found["turboquant_k2v2"].mean_divergence > 0
    assert found["first"].num_tokens == 60


def test_perplexity_of_a_random_model_is_near_its_vocabulary(checkpoint):
    model = load_model(checkpoint, CPU, torch.float32)
    found = compare({"only": Variant(model, KVFormat.parse("bf16"))}, [passage()])["only"]
    assert 250 < found.perplexity < 600
    assert found.perplexities["counting"] == pytest.approx(found.perplexity)


def test_a_second_draft_counts_only_after_a_kept_first():
    drafts = AcceptanceCounts(num_steps=10, num_drafted=20, num_accepted=12, accepted_by_position=(8, 4))
    result = TaskResult("json", 1, drafts=drafts)
    assert result.kept(0) == 0.8
    assert result.kept(1) == 0.5
    assert TaskResult("none", 1).kept(0) is None
    assert TaskResult("all wrong", 1, drafts=AcceptanceCounts(num_steps=3, num_drafted=6)).kept(0) == 0.0


def test_all_tables_are_printed_and_the_last_line_is_json(checkpoint, tmp_path, monkeypatch, capsys):
    few = replace(evaluate.QUICK, num_examples=1, recall_lengths=(256,), num_keys=1, passage_tokens=900, max_tokens=4)
    monkeypatch.setattr(evaluate, "QUICK", few)
    evaluate.main([str(checkpoint), "--data", str(tmp_path), "--kv", "bf16", "fp8", "--quick"])
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert {task["name"] for task in found["tasks"]} >= {"invoice", "tools", "arithmetic", "key at 256"}
    assert list(found["agreements"]) == ["master / bf16", "master / fp8", "hybrid / bf16", "hybrid / fp8"]
    assert found["agreements"]["hybrid / bf16"]["mean_kl"] > 0
    assert sum(line.startswith("|---") for line in lines) == 3
