"""Stored bytes by format, and the bytes of a decode step by part."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.spec.errors import UsageError
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.shapes import named_spec
from onebox.spec.states import StateDtype
from onebox.spec.traffic import (
    PACKINGS,
    MatrixPacking,
    Routing,
    TrafficStep,
    class_parameters,
    class_step_bytes,
    distinct_experts,
    matrix_bytes,
    predicted_weight_bytes,
    step_traffic,
)
from onebox.spec.weights import Layout, WeightFormat

SPEC = named_spec("qwen3.5-122b-a10b")
BF16 = KVFormat.parse("bf16")
STORED = predicted_weight_bytes(SPEC, {ModuleClass.EXPERTS: WeightFormat.INT4})

streams = st.integers(1, 64)
drafts = st.integers(0, 8)
contexts = st.integers(0, 262144)
routings = st.sampled_from(Routing)


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (PACKINGS[WeightFormat.FP8], 1024 * 3072 + 2 * 8 * 24),
        (replace(PACKINGS[WeightFormat.FP8], scale_dtype="F32"), 1024 * 3072 + 4 * 8 * 24),
        (PACKINGS[WeightFormat.INT4], 1024 * 3072 * (0.5 + 2 / 128 + 0.5 / 128)),
        (MatrixPacking(Layout.GPTQ, 4, 128, "F16", ("g_idx",)), 1024 * 3072 * (0.5 + 2.5 / 128) + 4 * 3072),
        (MatrixPacking(Layout.PACKED, 4, 128), 1024 * 3072 * (0.5 + 2 / 128) + 16),
        (PACKINGS[WeightFormat.INT8], 1024 * 3072 + 2 * 1024),
        (MatrixPacking(Layout.PACKED, 8), 1024 * 3072 + 2 * 1024 + 16),
        (PACKINGS[WeightFormat.NVFP4], 1024 * 3072 * (0.5 + 1 / 16) + 4),
    ],
)
def test_a_matrix_takes_exactly_its_layouts_bytes(packing, expected):
    assert matrix_bytes(packing, 1024, 3072) == expected


def test_edges_of_blocks_and_groups_are_counted_whole():
    assert matrix_bytes(PACKINGS[WeightFormat.FP8], 129, 1) == 129 + 2 * 2
    assert matrix_bytes(MatrixPacking(Layout.PACKED, 4, 128), 8, 136) == 8 * 17 * 4 + 2 * 8 * 2 + 16


def test_parameters_are_the_published_counts():
    counts = class_parameters(SPEC)
    assert sum(counts.values()) == 125_086_497_008
    assert sum(count for kind, count in counts.items() if kind.in_mtp) == 2_523_679_232
    assert counts[ModuleClass.VISION] == 451_290_864
    assert sum(class_parameters(named_spec("qwen3.5-35b-a3b")).values()) == 35_951_822_704


def test_plain_weights_take_two_bytes_a_parameter():
    stored = predicted_weight_bytes(SPEC, {})
    assert stored == {kind: 2 * count for kind, count in class_parameters(SPEC).items()}
    assert set(stored) == {module.module_class for module in modules(SPEC)}


def test_only_matrices_take_a_format():
    stored = predicted_weight_bytes(SPEC, {ModuleClass.ROUTER: WeightFormat.INT4, ModuleClass.SMALL: WeightFormat.FP8})
    assert stored == predicted_weight_bytes(SPEC, {})


def test_one_row_reads_the_experts_it_chose():
    assert distinct_experts(SPEC, 1, Routing.EXPECTED) == 8
    assert distinct_experts(SPEC, 3, Routing.LEAST) == 8
    assert distinct_experts(SPEC, 3, Routing.EXPECTED) == pytest.approx(23.26, abs=0.01)


@given(rows=st.integers(1, 1000))
def test_distinct_experts_lie_between_one_rows_and_all(rows):
    expected = distinct_experts(SPEC, rows, Routing.EXPECTED)
    assert 8 <= expected <= min(256, 8 * rows)
    assert expected <= distinct_experts(SPEC, rows + 1, Routing.EXPECTED)


@given(streams, drafts, contexts, routings)
def test_parts_sum_to_the_total_and_none_is_negative(streams, drafts, context, routing):
    traffic = step_traffic(SPEC, STORED, TrafficStep(streams, drafts, context, 1.0 + drafts), BF16, routing)
    assert traffic.total_bytes == sum(part.bytes for part in traffic.parts)
    assert all(part.bytes >= 0 for part in traffic.parts)
    assert traffic.largest.bytes == max(part.bytes for part in traffic.parts)


@given(streams, drafts, contexts, routings)
def test_more_of_anything_never_reads_less(streams, drafts, context, routing):
    def total(step: TrafficStep) -> int:
        return step_traffic(SPEC, STORED, step, BF16, routing).total_bytes

    step = TrafficStep(streams, drafts, context)
    assert total(step) <= total(step._replace(streams=streams + 1))
    assert total(step) < total(step._replace(drafts=drafts + 1))
    assert total(step) < total(step._replace(context_tokens=context + 1))


@given(streams, drafts, contexts)
def test_the_least_is_never_more_than_the_expected(streams, drafts, context):
    step = TrafficStep(streams, drafts, context, 1.0 + drafts)
    least, expected = (step_traffic(SPEC, STORED, step, BF16, routing) for routing in Routing)
    assert all(a.bytes <= b.bytes for a, b in zip(least.parts, expected.parts, strict=True))


def test_a_plain_step_reads_each_part_once():
    parts = {
        p.name: p.bytes for p in step_traffic(SPEC, STORED, TrafficStep(context_tokens=1000), BF16, Routing.LEAST).parts
    }
    assert parts["LM head"] == STORED[ModuleClass.LM_HEAD]
    assert parts["routed experts"] == STORED[ModuleClass.EXPERTS] // 32
    assert parts["embedding rows"] == 2 * 3072
    assert parts["KV cache"] == 1000 * 24576
    assert parts["DeltaNet state"] == 36 * (2 * 4194304 + 4 * 12288 * 2)
    assert "MTP layer" not in parts


def test_states_of_16_bits_are_half_the_traffic_of_matrices():
    steps = [TrafficStep(streams=16, state_dtype=dtype) for dtype in (StateDtype.FLOAT32, StateDtype.BFLOAT16)]
    whole, narrow = (step_traffic(SPEC, STORED, step, BF16, Routing.LEAST) for step in steps)
    assert whole.total_bytes - narrow.total_bytes == 16 * 36 * 4194304


def test_a_draft_reads_the_mtp_layer_and_the_head_once_more():
    step = TrafficStep(drafts=2, context_tokens=1000)
    parts = {p.name: p.bytes for p in step_traffic(SPEC, STORED, step, BF16, Routing.LEAST).parts}
    dense = sum(
        STORED[kind]
        for kind in (ModuleClass.MTP_FC, ModuleClass.MTP_ATTENTION, ModuleClass.MTP_SHARED, ModuleClass.MTP_SMALL)
    )
    one_pass = dense + STORED[ModuleClass.MTP_EXPERTS] // 32 + 2 * 3072 + 1000 * 2048
    assert parts["MTP layer"] == 2 * one_pass
    assert parts["LM head for drafts"] == 2 * parts["LM head"]


def test_the_first_draft_pass_covers_the_tokens_just_kept():
    def mtp(kept: float) -> int:
        step = TrafficStep(drafts=1, kept_tokens=kept)
        return step_traffic(SPEC, STORED, step, BF16, Routing.EXPECTED).parts[-2].bytes

    assert mtp(1.0) < mtp(1.9) < mtp(2.0)


def test_a_drafter_of_unknown_size_costs_no_bytes():
    free = step_traffic(SPEC, STORED, TrafficStep(drafts=12, drafter_is_mtp=False), BF16, Routing.LEAST)
    assert [part.name for part in free.parts][-1] == "LM head"


def test_drafting_without_an_mtp_head_is_refused():
    without = {kind: size for kind, size in STORED.items() if not kind.in_mtp}
    with pytest.raises(UsageError, match="no MTP head"):
        step_traffic(SPEC, without, TrafficStep(drafts=1), BF16, Routing.LEAST)


def test_a_tied_head_is_the_embedding():
    tied = replace(SPEC, tie_word_embeddings=True)
    parts = step_traffic(tied, predicted_weight_bytes(tied, {}), TrafficStep(), BF16, Routing.LEAST).parts
    assert parts[-1].bytes == 2 * 248320 * 3072


def test_vision_is_not_read_when_decoding():
    without = {kind: size for kind, size in STORED.items() if kind is not ModuleClass.VISION}
    step = TrafficStep(drafts=2, context_tokens=10)
    assert step_traffic(SPEC, without, step, BF16, Routing.LEAST) == step_traffic(
        SPEC, STORED, step, BF16, Routing.LEAST
    )


def test_the_classes_of_a_plain_step_are_its_parts_without_the_state():
    by_class = class_step_bytes(SPEC, STORED)
    plain = step_traffic(SPEC, STORED, TrafficStep(), BF16, Routing.LEAST)
    state = next(part.bytes for part in plain.parts if part.name == "DeltaNet state")
    assert sum(size for kind, size in by_class.items() if not kind.in_mtp) == plain.total_bytes - state
    one_draft = step_traffic(SPEC, STORED, TrafficStep(drafts=1), BF16, Routing.LEAST)
    mtp = next(part.bytes for part in one_draft.parts if part.name == "MTP layer")
    embedding_row = by_class[ModuleClass.EMBEDDING]
    assert sum(size for kind, size in by_class.items() if kind.in_mtp) == mtp - embedding_row
