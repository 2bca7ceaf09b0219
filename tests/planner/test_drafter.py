"""A block drafter in the plan: its memory, its bytes of a step, and the depth that pays."""

from dataclasses import replace

import pytest

from onebox.planner.depths import best_depth, constant_acceptance, depth_rates
from onebox.planner.levers import Setting, find_levers
from onebox.planner.memory import MemoryRequest, plan_memory
from onebox.planner.presets import WRITTEN_PACKINGS, named_preset
from onebox.planner.roofline import Workload
from onebox.spec.block_drafter import BlockDrafter
from onebox.spec.dflash_config import drafter_from_config
from onebox.spec.dflash_shapes import DFLASH_122B
from onebox.spec.errors import UsageError
from onebox.spec.hardware import named_box
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec
from onebox.spec.weights import WeightFormat

SPEC, BOX, KV = named_spec("qwen3.5-122b-a10b"), named_box("dgx-spark"), KVFormat.parse("bf16")
DRAFTER = drafter_from_config(DFLASH_122B)
TRIMMED = 40_960


def drafter(weight_format="int4"):
    return BlockDrafter.predicted(DRAFTER, WeightFormat(weight_format), WRITTEN_PACKINGS)


def setting(weights="hybrid", tokens=6.45, drafts=12, *, curve=None, **changes):
    preset = named_preset(weights)
    given = {
        "drafts": drafts,
        "context_tokens": 1024,
        "acceptance": curve or constant_acceptance(tokens, drafts),
        "drafter": drafter(),
        "draft_vocab_size": TRIMMED,
    }
    workload = Workload(**{**given, **changes})
    return Setting(SPEC, preset.weight_bytes(SPEC), preset.format_names(), BOX, KV, workload)


def speed(*arguments, **changes):
    return setting(*arguments, **changes).project().engine_rate.tokens_per_second


def test_the_published_drafter_takes_its_published_bytes():
    assert drafter("bf16").weight_bytes == 2 * 773_893_632
    assert drafter("bf16").context_bytes == 2 * 6 * 2 * 1024 * 3072
    assert 0.39e9 < drafter("int4").weight_bytes < 0.41e9


def test_a_block_reads_windows_of_sliding_layers_and_all_of_the_full_one():
    position = 2 * 8 * 128 * 2
    assert drafter().context_read_bytes(1000) == 6 * 1000 * position
    assert drafter().context_read_bytes(100_000) == (5 * 4096 + 100_000) * position


def test_a_step_reads_the_drafter_once_whatever_the_depth():
    parts = [dict(setting(drafts=drafts, tokens=1.5).project().expected.parts) for drafts in (1, 12)]
    assert parts[0]["drafter"] == parts[1]["drafter"] == drafter().loaded_bytes
    assert parts[0]["LM head for drafts"] == parts[1]["LM head for drafts"]
    assert parts[0]["routed experts"] < parts[1]["routed experts"]
    assert "MTP layer" not in parts[0]


def test_the_spark_reaches_what_a_step_of_twelve_drafts_must():
    """At 6.45 tokens a step: with INT4 and 3-bit experts; with the published drafter and the whole head."""
    assert speed() == pytest.approx(58.1, abs=0.1)
    assert speed("hybrid-int3") == pytest.approx(72.8, abs=0.1)
    assert speed(drafter=drafter("bf16"), draft_vocab_size=None) == pytest.approx(54.1, abs=0.1)


def test_prose_runs_short_and_agents_deep():
    prose = depth_rates(setting(curve=(0.8, 0.5, 0.3, 0.15, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01)))
    agent = depth_rates(setting(tokens=8.5))
    assert best_depth(prose).drafts == 2
    assert best_depth(prose).tokens_per_second > 1.7 * prose[-1].tokens_per_second
    assert best_depth(agent).drafts > 5
    assert best_depth(agent).tokens_per_second > 1.01 * agent[-1].tokens_per_second
    assert all(best_depth(rates).tokens_per_second > rates[0].tokens_per_second for rates in (prose, agent))


def test_a_constant_curve_has_the_tokens_that_were_asked_for():
    curve = constant_acceptance(8.5, 12)
    assert 1 + sum(curve) == pytest.approx(8.5)
    assert curve[2] / curve[1] == pytest.approx(curve[0])
    assert constant_acceptance(13, 12) == pytest.approx((1.0,) * 12)


def test_levers_change_the_drafters_format_and_its_head():
    found = {(lever.part, lever.instead): lever for lever in find_levers(setting())}
    assert found["drafter", "bf16"].saved_bytes == drafter().loaded_bytes - drafter("bf16").loaded_bytes
    assert found["LM head for drafts", "248,320 rows"].saved_bytes < -0.6e9
    assert not any(part == "MTP layer" for part, _ in found)
    published = {lever.instead for lever in find_levers(setting(drafter=drafter("bf16"))) if lever.part == "drafter"}
    assert published == {"fp8", "int4"}


def test_more_drafts_than_a_block_has_are_refused():
    with pytest.raises(UsageError, match="block of 16 has 15"):
        setting(drafts=16)


def test_the_memory_plan_holds_the_drafter():
    request = MemoryRequest(max_context_tokens=131_072, slots=4, kv=KV, drafts=12, draft_vocab_size=TRIMMED)
    stored, loaded = named_preset("hybrid").weight_bytes(SPEC), drafter().loaded_bytes
    without = plan_memory(SPEC, stored, BOX, request)
    beside = plan_memory(SPEC, stored, BOX, replace(request, drafter=DRAFTER, drafter_bytes=loaded))
    window = 5 * 2 * 8 * 128 * 2 * 4096
    assert window < beside.slot_bytes - without.slot_bytes < 1.05 * window
    assert window < beside.checkpoint_bytes - without.checkpoint_bytes < 1.05 * window
    assert beside.page_bytes - without.page_bytes == 64 * 2 * 8 * 128 * 2
    assert sum(part.bytes for part in beside.parts) == BOX.memory_bytes
    assert {part.name: part.bytes for part in beside.parts}["drafter"] == loaded
