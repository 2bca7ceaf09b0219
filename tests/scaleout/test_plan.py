"""The projection of N boxes: its arithmetic, and how it stands beside what others measured on two Sparks."""

import json

import pytest

from onebox.planner.memory import MemoryPlan, MemoryRequest
from onebox.planner.presets import named_preset
from onebox.planner.report import Weights
from onebox.planner.roofline import Workload
from onebox.scaleout.plan import ALL_REDUCE_SECONDS, all_reduce_seconds, plan_boxes
from onebox.scaleout.ranks import class_bytes_per_rank, rank_spec, stage_specs
from onebox.spec.errors import UsageError
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec

SPARK = BOXES["dgx-spark"]


def planned(model, preset, num_boxes=2, acceptance=None, **request):
    spec = named_spec(model)
    weights = Weights(model, preset, spec, named_preset(preset).weight_bytes(spec))
    drafts = len(acceptance or ())
    wanted = MemoryRequest(8192, 8, KVFormat.parse("bf16"), drafts=drafts, **request)
    workload = Workload(drafts=drafts, context_tokens=1024, acceptance=acceptance)
    return plan_boxes(weights, SPARK, num_boxes, wanted, workload)


def test_the_published_pair_of_a_35b_is_met_within_a_tenth():
    """41.8 tok/s on one Spark and 67 on two: NVFP4 experts, vLLM, no drafts."""
    found = planned("qwen3.5-35b-a3b", "nvfp4")
    assert found.steps[1].tokens_per_second == pytest.approx(41.8, rel=0.1)
    assert found.steps[2].tokens_per_second == pytest.approx(67, rel=0.1)


def test_the_published_speed_of_the_122b_on_one_spark_is_met_within_a_tenth():
    assert planned("qwen3.5-122b-a10b", "hybrid").steps[1].tokens_per_second == pytest.approx(36.0, rel=0.1)


def test_the_published_122b_on_two_sparks_lies_between_drafts_badly_and_well_accepted():
    """About 65 tok/s, AutoRound INT4 with MTP; its acceptance is not published."""
    bad, good = (planned("qwen3.5-122b-a10b", "autoround-int4", acceptance=one) for one in ((0.8, 0.5), (0.95, 0.85)))
    assert bad.steps[2].tokens_per_second < 65 < good.steps[2].tokens_per_second


def test_two_all_reduces_a_layer_and_one_for_the_embedding():
    step = planned("qwen3.5-122b-a10b", "hybrid").steps[2]
    assert step.num_all_reduces == 2 * 48 + 1
    assert step.all_reduce_bytes == 3072 * 2
    assert step.all_reduce_seconds == pytest.approx(97 * ALL_REDUCE_SECONDS[8192])
    assert planned("qwen3.5-122b-a10b", "hybrid").steps[1].num_all_reduces == 0


@pytest.mark.parametrize(("size", "microseconds"), [(100, 31), (8192, 31), (24576, 34.5), (65536, 66), (131072, 132)])
def test_latencies_lie_between_the_published_ones(size, microseconds):
    assert all_reduce_seconds(size) == pytest.approx(microseconds * 1e-6)


def test_a_rank_of_two_has_half_of_the_heads_the_state_and_the_kv():
    spec = named_spec("qwen3.5-122b-a10b")
    rank = rank_spec(spec, 2)
    kv = KVFormat.parse("bf16")
    assert 2 * kv.bytes_per_token(rank, with_mtp=False) == kv.bytes_per_token(spec, with_mtp=False)
    assert 2 * rank.conv_dim == spec.conv_dim
    assert (rank.num_attention_heads, rank.moe_intermediate_size, rank.vocab_size) == (16, 512, 124160)
    assert rank_spec(spec, 4).num_key_value_heads == 1  # two KV heads, each on two ranks
    assert rank_spec(spec, 8).vocab_size == 31040


def test_ranks_together_hold_the_model_and_what_each_needs_whole():
    spec = named_spec("qwen3.5-122b-a10b")
    stored = named_preset("hybrid").weight_bytes(spec)
    rank = class_bytes_per_rank(spec, stored, 2)
    assert rank[ModuleClass.ROUTER] == stored[ModuleClass.ROUTER]
    assert rank[ModuleClass.EXPERTS] * 2 == stored[ModuleClass.EXPERTS]
    four = class_bytes_per_rank(spec, stored, 4)
    assert 4 * four[ModuleClass.ATTENTION] > stored[ModuleClass.ATTENTION]  # KV heads are on two ranks each


def test_what_does_not_fit_one_box_fits_several():
    found = planned("qwen3.5-122b-a10b", "bf16", num_boxes=4)
    assert "too large for dgx-spark" in found.memory[1]
    assert isinstance(found.memory[4], MemoryPlan)
    assert sum(part.bytes for part in found.memory[4].parts) == SPARK.memory_bytes


def test_two_boxes_have_room_for_more_than_twice_the_users():
    found = planned("qwen3.5-122b-a10b", "hybrid")
    assert found.memory[2].users_at(8192) > 2 * found.memory[1].users_at(8192)
    assert found.vllm_tokens[2] > 2 * found.vllm_tokens[1] > 0


def test_pipeline_stages_have_all_layers_once_and_the_outer_ones_no_more_than_the_inner():
    spec = named_spec("qwen3.5-122b-a10b")
    assert [stage.num_hidden_layers for stage in stage_specs(spec, 2)] == [24, 24]
    counts = [stage.num_hidden_layers for stage in stage_specs(spec, 5)]
    assert sum(counts) == 48
    assert counts[-1] == counts[0] == 9


def test_the_command_shows_one_box_beside_two_and_the_published_figures(run_cli):
    result = run_cli("scaleout", "plan", "qwen3.5-122b-a10b", "--boxes", 2, "--box", "dgx-spark")
    assert result.code == 0, result.err
    assert "97 of 6 KiB" in result.out
    assert "~65" in result.out
    found = json.loads(run_cli("scaleout", "plan", "qwen3.5-35b-a3b", "--json", "--streams", 4).out)
    assert found["steps"]["2"]["tokens_per_second"] > found["steps"]["1"]["tokens_per_second"]
    assert {pair["model"] for pair in found["published"]} == {"qwen3.5-35b-a3b"}


def test_what_does_not_fit_one_box_is_said_with_the_reason(run_cli):
    result = run_cli("scaleout", "plan", "qwen3.5-397b-a17b", "--boxes", 4)
    assert "times one, if one had the memory." in result.out
    assert "too large for dgx-spark" in " ".join(result.out.split())


def test_another_box_is_not_shown_beside_figures_of_sparks(run_cli):
    result = run_cli("scaleout", "plan", "qwen3.5-122b-a10b", "--box", "h200")
    assert result.code == 0, result.err
    assert "Published" not in result.out
    assert "h200: joined by NVLink" in result.out


def test_one_box_and_a_box_without_bandwidth_are_refused(run_cli):
    assert run_cli("scaleout", "plan", "qwen3.5-122b-a10b", "--boxes", 1).code == 2
    with pytest.raises(UsageError, match="--boxes 3 does not divide"):
        planned("qwen3.5-122b-a10b", "hybrid", num_boxes=3)
