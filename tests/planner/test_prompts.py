"""Times to first tokens, projected: they follow from bytes and arithmetic, and fit what was measured."""

import pytest

from onebox.planner.presets import named_preset
from onebox.planner.prompts import NEW_TOKENS, prompt_flops, prompt_seconds, prompt_times
from onebox.planner.roofline import Workload, step_flops
from onebox.spec.hardware import Box, named_box
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec

SPEC = named_spec("qwen3.5-122b-a10b")
BF16 = KVFormat.parse("bf16")


def seconds(
    box: Box, num_tokens: int, weights: str = "hybrid", start: int = 0, max_batched_tokens: int = 2048
) -> float:
    stored = named_preset(weights).weight_bytes(SPEC)
    found = prompt_seconds(SPEC, stored, box, BF16, range(start, num_tokens), max_batched_tokens)
    assert found is not None
    return found


def test_arithmetic_is_that_of_decode_steps_without_the_head():
    head = 2 * SPEC.vocab_size * SPEC.hidden_size
    rows = sum(step_flops(SPEC, Workload(context_tokens=place + 1)) - head for place in range(256))
    assert prompt_flops(SPEC, 256, 0) == pytest.approx(rows)
    assert prompt_flops(SPEC, 100, 0) + prompt_flops(SPEC, 156, 100) == pytest.approx(prompt_flops(SPEC, 256, 0))


@pytest.mark.parametrize(("num_tokens", "measured"), [(8_000, 0.403), (128_000, 12.7)])
def test_the_engine_on_an_h200_took_about_as_long(num_tokens, measured):
    assert seconds(named_box("h200"), num_tokens) == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(("num_tokens", "published"), [(7_500, 4.41), (30_000, 18.11)])
def test_published_first_tokens_on_a_spark_are_not_faster_than_projected(num_tokens, published):
    """vLLM, NVFP4: Long-RAG-8K and Long-RAG-32K of the 122B blog, cold."""
    assert 0.8 * published < seconds(named_box("dgx-spark"), num_tokens, "nvfp4") < published


def test_larger_steps_read_the_weights_less_often():
    spark = named_box("dgx-spark")
    assert seconds(spark, 8192, max_batched_tokens=8192) < seconds(spark, 8192) - 3 * 0.25


def test_behind_a_cached_prefix_only_the_rest_is_computed():
    spark, stored = named_box("dgx-spark"), named_preset("hybrid").weight_bytes(SPEC)
    (times,) = prompt_times(SPEC, stored, spark, BF16, 2048, [32_768])
    assert times.cached_seconds == pytest.approx(seconds(spark, 32_768, start=32_768 - NEW_TOKENS))
    assert times.cold_seconds > 20 * times.cached_seconds
    (short,) = prompt_times(SPEC, stored, spark, BF16, 2048, [100])
    assert short.cached_seconds == short.cold_seconds


def test_a_box_of_unknown_speed_gives_no_times():
    box = Box("box", "a GPU", 10**11, False, "given")
    assert prompt_times(SPEC, named_preset("hybrid").weight_bytes(SPEC), box, BF16, 2048, [2048]) == ()
