"""The memory plan: exact, never larger than the box, refused with a table when it does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.planner.memory import MemoryRequest, checkpoint_bytes, loaded_weight_bytes, plan_memory, slot_bytes
from onebox.planner.presets import PRESETS, named_preset
from onebox.spec.errors import DoesNotFitError, UsageError
from onebox.spec.hardware import BOXES, GIB
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec
from onebox.spec.states import StateDtype

SPEC = named_spec("qwen3.5-122b-a10b")
SPARK = BOXES["dgx-spark"]
STORED = named_preset("hybrid").weight_bytes(SPEC)
BF16 = KVFormat.parse("bf16")
REQUEST = MemoryRequest(max_context_tokens=131072, slots=4, kv=BF16, drafts=2)

requests = st.builds(
    MemoryRequest,
    max_context_tokens=st.integers(1, 262144),
    slots=st.integers(1, 64),
    kv=st.sampled_from(["bf16", "fp8", "turboquant", "turboquant_k3v2"]).map(KVFormat.parse),
    drafts=st.integers(0, 8),
    gpu_memory_utilization=st.floats(0.01, 1),
    reserve_bytes=st.none() | st.integers(0, 200 * GIB),
    page_tokens=st.sampled_from([16, 64, 256]),
    max_batched_tokens=st.integers(1, 16384),
    with_vision=st.booleans(),
    staging_bytes=st.sampled_from([0, 200 << 20]),
)


@given(request=requests, box=st.sampled_from(sorted(BOXES)), preset=st.sampled_from(sorted(PRESETS)))
def test_a_plan_owns_the_box_exactly_or_is_refused(request, box, preset):
    try:
        plan = plan_memory(SPEC, named_preset(preset).weight_bytes(SPEC), BOXES[box], request)
    except DoesNotFitError:
        return
    assert sum(part.bytes for part in plan.parts) == BOXES[box].memory_bytes
    assert all(part.bytes >= 0 for part in plan.parts)
    assert plan.unused_bytes < plan.page_bytes
    assert plan.kv_tokens >= request.max_context_tokens
    assert plan.users_at(request.max_context_tokens) >= 1


@given(context=st.integers(1, 262143))
def test_longer_contexts_never_hold_more_users(context):
    plan = plan_memory(SPEC, STORED, SPARK, REQUEST)
    users = plan.users_at(context)
    assert users >= plan.users_at(context + 1)
    held = users * plan.context_bytes(context)
    assert held <= plan.states_bytes + plan.kv_bytes + plan.unused_bytes < held + plan.context_bytes(context)


def test_the_parts_are_what_the_request_says():
    plan = plan_memory(SPEC, STORED, SPARK, REQUEST)
    assert plan.weights_bytes == sum(STORED.values())
    assert plan.states_bytes == 4 * slot_bytes(SPEC, 2)
    assert plan.page_bytes == 64 * 13 * 2048
    assert plan.reserve_bytes == pytest.approx(0.1 * SPARK.memory_bytes, abs=1)
    assert plan.prefix_bytes == plan.num_checkpoints * checkpoint_bytes(SPEC)
    left = plan.prefix_bytes + plan.kv_bytes + plan.unused_bytes
    assert 0.1 * left - checkpoint_bytes(SPEC) < plan.prefix_bytes <= 0.1 * left


def test_staging_takes_memory_of_the_box_only_where_the_host_shares_it():
    request = replace(REQUEST, staging_bytes=1 * GIB)
    for name, expected in (("dgx-spark", 1 * GIB), ("h200", 0)):
        plan = plan_memory(SPEC, STORED, BOXES[name], request)
        assert sum(part.bytes for part in plan.parts if part.name == "disk staging") == expected == plan.staging_bytes
        assert sum(part.bytes for part in plan.parts) == BOXES[name].memory_bytes


def test_a_slot_is_a_state_and_the_rows_awaiting_verification():
    state = SPEC.state_bytes_per_sequence(StateDtype.FLOAT32)
    assert state == 36 * (73_728 + 4_194_304)
    assert checkpoint_bytes(SPEC) == state + 2 * 3072
    row = 36 * (2 * 12288 + 4 * 2 * 64)
    assert slot_bytes(SPEC, 0) == checkpoint_bytes(SPEC) + row
    assert slot_bytes(SPEC, 2) == checkpoint_bytes(SPEC) + 3 * row


@pytest.mark.parametrize("state_dtype", [StateDtype.BFLOAT16, StateDtype.FLOAT16])
def test_states_of_16_bits_halve_the_matrices_of_slots_and_checkpoints(state_dtype):
    half = 36 * 4_194_304 // 2
    assert checkpoint_bytes(SPEC, 2, state_dtype) == checkpoint_bytes(SPEC) - half
    whole = plan_memory(SPEC, STORED, SPARK, REQUEST)
    narrow = plan_memory(SPEC, STORED, SPARK, replace(REQUEST, state_dtype=state_dtype))
    assert narrow.slot_bytes == whole.slot_bytes - half
    assert narrow.checkpoint_bytes == whole.checkpoint_bytes - half
    assert narrow.num_checkpoints > 1.9 * whole.num_checkpoints
    assert state_dtype in next(part.note for part in narrow.parts if part.name == "states")


def test_the_mtp_head_and_the_tower_are_loaded_only_when_used():
    everything = sum(STORED.values())
    mtp = sum(size for kind, size in STORED.items() if kind.in_mtp)
    assert loaded_weight_bytes(STORED, with_mtp=True, with_vision=True) == everything
    assert loaded_weight_bytes(STORED, with_mtp=False, with_vision=True) == everything - mtp
    assert loaded_weight_bytes(STORED, with_mtp=True, with_vision=False) == everything - STORED[ModuleClass.VISION]


def test_an_explicit_reserve_replaces_the_utilization():
    plan = plan_memory(SPEC, STORED, SPARK, replace(REQUEST, reserve_bytes=20 * GIB))
    assert plan.reserve_bytes == 20 * GIB


def test_what_other_programs_hold_now_is_left_to_them():
    busy = replace(SPARK, available_bytes=100 * GIB)
    assert plan_memory(SPEC, STORED, busy, REQUEST).reserve_bytes == SPARK.memory_bytes - 100 * GIB
    idle = replace(SPARK, available_bytes=SPARK.memory_bytes)
    assert (
        plan_memory(SPEC, STORED, idle, REQUEST).reserve_bytes
        == plan_memory(SPEC, STORED, SPARK, REQUEST).reserve_bytes
    )


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(DoesNotFitError) as caught:
        plan_memory(SPEC, named_preset("bf16").weight_bytes(SPEC), SPARK, REQUEST)
    message = str(caught.value)
    assert "GiB too large for dgx-spark" in message
    assert "weights" in message
    assert "232.99 GiB" in message
    assert "KV of one 131,072-token sequence" in message


def test_the_workspace_has_room_for_attentions_sums_and_for_the_widest_prefill():
    """262,144 tokens are 392 pieces (64 each of 128, 256 and 512, 200 of 1,024), with 32 heads of 256 numbers."""
    short, long = (plan_memory(SPEC, STORED, SPARK, replace(REQUEST, max_context_tokens=n)) for n in (128, 262144))
    assert long.workspace_bytes - short.workspace_bytes == 12 * (392 - 1) * 32 * (256 + 2) * 4
    # Eight experts' float32 outputs and bfloat16 inner values alone.
    more = plan_memory(SPEC, STORED, SPARK, replace(REQUEST, max_batched_tokens=2 * REQUEST.max_batched_tokens))
    least = REQUEST.max_batched_tokens * 8 * (4 * 3072 + 2 * 1024)
    assert more.workspace_bytes - plan_memory(SPEC, STORED, SPARK, REQUEST).workspace_bytes >= least


def test_the_prefix_cache_yields_to_one_full_context():
    tight = replace(REQUEST, max_context_tokens=262144, reserve_bytes=45 * GIB)
    plan = plan_memory(SPEC, STORED, SPARK, tight)
    assert plan.kv_tokens >= 262144
    assert plan.prefix_bytes < 0.1 * (plan.prefix_bytes + plan.kv_bytes)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"max_context_tokens": 0}, "--max-model-len"),
        ({"slots": 0}, "--max-num-seqs"),
        ({"drafts": -1}, "--speculative-tokens"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"reserve_bytes": -1}, "--reserve-gib"),
    ],
)
def test_a_wrong_value_is_refused_by_flag(change, flag):
    with pytest.raises(UsageError, match=flag):
        replace(REQUEST, **change)


def test_a_context_beyond_the_model_is_refused_by_flag():
    with pytest.raises(UsageError, match="--max-model-len 262,145 is more than the 262,144"):
        plan_memory(SPEC, STORED, SPARK, replace(REQUEST, max_context_tokens=262145))


def test_an_unknown_preset_is_refused_by_flag():
    with pytest.raises(UsageError, match="--weights 'q4' is not known; the known ones are bf16, fp8"):
        named_preset("q4")


def test_a_cache_beyond_the_box_is_refused_with_what_there_is():
    left = plan_memory(SPEC, STORED, SPARK, REQUEST)
    most = left.prefix_bytes + left.kv_bytes + left.unused_bytes
    with pytest.raises(DoesNotFitError) as caught:
        plan_memory(SPEC, STORED, SPARK, replace(REQUEST, cache_bytes=400 * GIB))
    message = str(caught.value)
    assert message.startswith(f"--kv-cache-memory-bytes {400 * GIB} asks for 400.00 GiB, but ")
    assert f"leave {most / GIB:.2f} GiB: give {most} or less, or leave it out" in message
    exact = plan_memory(SPEC, STORED, SPARK, replace(REQUEST, cache_bytes=most))
    assert exact.num_pages == left.num_pages
    with pytest.raises(DoesNotFitError):
        plan_memory(SPEC, STORED, SPARK, replace(REQUEST, cache_bytes=most + 1))


def test_a_cache_below_one_context_says_how_much_that_needs():
    needed = 131072 // 64 * plan_memory(SPEC, STORED, SPARK, REQUEST).page_bytes
    for limits in ({"cache_bytes": GIB}, {"default_cache_bytes": GIB}):
        with pytest.raises(DoesNotFitError, match=f"Give --kv-cache-memory-bytes {needed} or more"):
            plan_memory(SPEC, STORED, SPARK, replace(REQUEST, **limits))
    assert plan_memory(SPEC, STORED, SPARK, replace(REQUEST, cache_bytes=needed)).num_pages == 131072 // 64


def test_a_default_limit_beyond_the_box_is_no_error():
    limited = plan_memory(SPEC, STORED, SPARK, replace(REQUEST, default_cache_bytes=400 * GIB))
    assert limited.num_pages == plan_memory(SPEC, STORED, SPARK, REQUEST).num_pages
