"""Times to first tokens, projected: they follow from bytes and arithmetic, and fit what was measured."""

from typing import NamedTuple

import pytest

from onebox.planner.presets import named_preset
from onebox.planner.prompts import NEW_TOKENS, prompt_flops, prompt_seconds, prompt_times
from onebox.planner.roofline import Workload, step_flops
from onebox.spec.hardware import Box, named_box
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec

BIG, SMALL = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b"
SPEC = named_spec(BIG)
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


class Prompt(NamedTuple):
    """A published cold prompt of one stream on a Spark: `num_tokens` in `seconds`, by vLLM."""

    source: str
    num_tokens: int
    seconds: float
    weights: str = "hybrid-mtp16"
    model: str = BIG


PUBLISHED = [
    # llama-benchy's rate counts the tokens before the prompt: 512 after 2,048 are 2,560.
    *(
        Prompt("51 tok/s thread, llama-benchy", tokens, tokens / rate)
        for tokens, rate in (
            (2_560, 2089.7),
            (4_096, 2286.2),
            (10_240, 2283.3),
            (12_512, 2209.3),
            (14_048, 2210.2),
            (20_192, 2153.1),
        )
    ),
    Prompt("122B blog, Long-RAG-8K", 7_500, 4.41, "nvfp4-llmc"),
    Prompt("122B blog, Long-RAG-32K", 30_000, 18.11, "nvfp4-llmc"),
    Prompt("survey, ozskywalker, b12x kernels", 4_096, 1.66, "nvfp4"),
    Prompt("survey, Entrpi, cold", 4_096, 2.30),
    Prompt("survey, styles01, pp512", 512, 512 / 827),
    Prompt("survey, vLLM's recipe for the 35B", 8_192, 8_192 / 6_265, "nvfp4", SMALL),
    Prompt("survey, eugr, 35B", 8_192, 8_192 / 6_830, "fp8", SMALL),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}: {row.num_tokens}")
def test_published_prompts_on_a_spark_took_about_as_long(row):
    """The share of the peak is this engine's on an H200; nothing here was fitted to these."""
    spec = named_spec(row.model)
    stored = named_preset(row.weights).weight_bytes(spec)
    found = prompt_seconds(spec, stored, named_box("dgx-spark"), BF16, range(row.num_tokens), 2048)
    assert 0.7 < found / row.seconds < 1.25


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
