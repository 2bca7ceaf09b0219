"""Levers change one thing, with the bytes that `build` writes and the kernels that the engine launches."""

from dataclasses import replace

import pytest

from onebox.planner.levers import Setting, assumptions, find_levers, mtp_head_cost
from onebox.planner.presets import named_preset
from onebox.planner.roofline import KERNEL_SECONDS, Workload, step_kernels
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec

SPEC = named_spec("qwen3.5-122b-a10b")


def setting(weights: str = "hybrid", **changes) -> Setting:
    preset = named_preset(weights)
    workload = Workload(drafts=2, context_tokens=2048, acceptance=(0.9, 0.72), **changes)
    stored, kv = preset.weight_bytes(SPEC), KVFormat.parse("bf16")
    return Setting(SPEC, stored, preset.format_names(), BOXES["dgx-spark"], kv, workload)


def test_shared_experts_of_integers_are_charged_their_two_kernels():
    """Bytes alone would promise more: INT4 ones are not computed beside the router's choice."""
    (lever,) = [lever for lever in find_levers(setting()) if lever.part == "shared experts"]
    plain = setting().project()
    bytes_alone = plain.engine_step_seconds - lever.saved_bytes / 225e9
    assert lever.step_seconds - bytes_alone == pytest.approx(2 * SPEC.num_hidden_layers * KERNEL_SECONDS)
    formats = {ModuleClass.SHARED: "int4", ModuleClass.MTP_SHARED: "int4"}
    assert step_kernels(SPEC, 2, formats) - step_kernels(SPEC, 2) == 2 * SPEC.num_hidden_layers + 2 * 2
    assert step_kernels(SPEC, 2, {ModuleClass.SHARED: "fp8"}) == step_kernels(SPEC, 2)


def test_levers_of_unquantised_projections_are_both_formats():
    found = {(lever.part, lever.instead): lever.saved_bytes for lever in find_levers(setting("nvfp4"))}
    for part in ("DeltaNet projections", "attention projections", "shared experts"):
        assert 0 < found[part, "fp8"] < found[part, "int4"]
    assert found["LM head", "int8"] > 0
    assert found["MTP layer", "int4"] > 0


def test_a_lever_that_is_on_says_what_it_would_be_without():
    now = setting("hybrid-int3", draft_vocab_size=40_960)
    found = {lever.part: lever for lever in find_levers(now)}
    assert (found["LM head for drafts"].now, found["LM head for drafts"].instead) == ("40,960 rows", "248,320 rows")
    assert found["LM head for drafts"].saved_bytes < 0
    back = [lever for lever in find_levers(now) if lever.part == "routed experts" and lever.instead == "int4"]
    assert back[0].saved_bytes < 0
    assert back[0].now == "int3"


def test_a_cost_is_said_of_a_plain_head_in_a_quantised_model_alone():
    assert mtp_head_cost(setting("autoround-int4"))
    assert mtp_head_cost(setting("hybrid")) is None
    assert mtp_head_cost(setting("bf16")) is None
    plain = setting("autoround-int4")
    assert mtp_head_cost(replace(plain, workload=Workload())) is None
    unknown = mtp_head_cost(replace(plain, workload=replace(plain.workload, acceptance=None)))
    assert unknown is not None
    assert "tok/s" not in unknown


def test_the_assumptions_name_the_kernels_of_this_step():
    assert assumptions(setting())[-1].startswith(f"{step_kernels(SPEC, 2)} kernels")
    box = replace(BOXES["dgx-spark"], usable=None, peak=None)
    blind = replace(setting(), box=box)
    assert not any("GB/s" in clause for clause in assumptions(blind))
    assert all(lever.step_seconds is None and lever.saved_bytes for lever in find_levers(blind))


def test_an_int8_head_read_for_candidates_saves_a_quarter_of_it_less_what_three_rows_complete():
    found = [lever for lever in find_levers(setting(draft_vocab_size=40_960)) if lever.part == "LM head"]
    (lever,) = found
    head = setting().stored[ModuleClass.LM_HEAD]
    drafts = 2 * head * 40_960 / 248_320
    assert lever.saved_bytes == pytest.approx(0.25 * (head * 0.975**3 + drafts), rel=0.001)
    assert not [lever for lever in find_levers(setting(reads_candidates=True)) if lever.part == "LM head"]
    assert not [lever for lever in find_levers(setting("autoround-int4")) if lever.instead == "int8, candidates"]
