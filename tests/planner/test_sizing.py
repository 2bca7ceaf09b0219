"""What a model that does not fit one box would take: whole boxes, each with its own workspace and reserve."""

from dataclasses import replace

import pytest

from onebox.planner.memory import MemoryRequest, plan_memory
from onebox.planner.presets import PRESETS
from onebox.planner.sizing import size_formats, sizing_lines
from onebox.spec.errors import DoesNotFitError
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import SHAPES, named_spec

SPARK = BOXES["dgx-spark"]
REQUEST = MemoryRequest(max_context_tokens=262_144, slots=4, kv=KVFormat.parse("bf16"))


def fits_one(spec, preset, request):
    try:
        plan_memory(spec, preset.weight_bytes(spec), SPARK, request)
    except DoesNotFitError:
        return False
    return True


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("request_", [REQUEST, replace(REQUEST, slots=1, max_context_tokens=8192)])
def test_one_box_is_enough_exactly_where_a_plan_fits(model, request_):
    spec = named_spec(model)
    for sizing in size_formats(spec, {}, SPARK, request_, 8192):
        assert (sizing.num_boxes == 1) == fits_one(spec, PRESETS[sizing.name], request_), sizing


def test_the_397b_takes_two_sparks_as_the_hybrid_and_eight_in_bf16():
    sizings = {
        sizing.name: sizing for sizing in size_formats(named_spec("qwen3.5-397b-a17b"), {}, SPARK, REQUEST, 8192)
    }
    assert {name: sizings[name].num_boxes for name in ("hybrid", "fp8", "bf16")} == {"hybrid": 2, "fp8": 4, "bf16": 8}
    assert sizings["hybrid"].tokens_per_second == pytest.approx(54, abs=1)


def test_more_boxes_than_counted_and_an_unknown_bandwidth_are_said():
    small = replace(SPARK, name="small", memory_bytes=16 << 30, available_bytes=None, peak=None, usable=None)
    sizings = size_formats(named_spec("qwen3.5-397b-a17b"), {}, small, REQUEST, 8192)
    text = "\n".join(sizing_lines(sizings, small))
    assert sizings[-1].num_boxes is None
    assert "bf16" in text.splitlines()[-2]
    assert ">16" in text.splitlines()[-2]
    assert "tok/s" not in text
