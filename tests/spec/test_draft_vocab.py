"""The size, the bytes and the checkpoint form of a draft vocabulary."""

import pytest

from onebox.planner.memory import MemoryRequest, draft_vocab_bytes, plan_memory
from onebox.planner.presets import named_preset
from onebox.spec.draft_vocab import (
    d2t_offsets,
    default_draft_vocab_size,
    draft_head_bytes,
    first_tokens,
    tokens_of_d2t,
)
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec
from onebox.spec.traffic import Routing, TrafficStep, step_traffic

SPEC = named_spec("qwen3.5-122b-a10b")
STORED = named_preset("hybrid").weight_bytes(SPEC)


@pytest.mark.parametrize(("vocab_size", "size"), [(248_320, 40_960), (8192, 1344), (4096, 672), (4095, None)])
def test_the_default_is_about_a_sixth(vocab_size, size):
    assert default_draft_vocab_size(vocab_size) == size


def test_the_first_list_has_added_tokens_and_then_the_lowest_ids():
    assert first_tokens(100, 6, [98, 99, 1]) == [98, 99, 1, 0, 2, 3]
    assert first_tokens(4, 9) == [0, 1, 2, 3]
    assert first_tokens(100, 2, [98, 99, 97, 120]) == [98, 99]


def test_d2t_holds_what_is_added_to_a_draft_index():
    """As in vLLM: target id = draft id + d2t[draft id]."""
    tokens = [5, 6, 2, 900]
    offsets = d2t_offsets(tokens)
    assert offsets == [5, 5, 0, 897]
    assert [index + offset for index, offset in enumerate(offsets)] == tokens == tokens_of_d2t(offsets)


def test_a_draft_reads_its_share_of_the_head_and_the_plan_has_room_for_it():
    head = STORED[ModuleClass.LM_HEAD]
    assert draft_head_bytes(head, SPEC.vocab_size, None) == head
    assert draft_head_bytes(head, SPEC.vocab_size, 40_960) == -(-head * 40_960 // 248_320)
    parts = {
        size: dict(step_traffic(SPEC, STORED, TrafficStep(drafts=2, draft_vocab_size=size), KV, Routing.LEAST).parts)
        for size in (None, 40_960)
    }
    assert parts[None]["LM head for drafts"] == 2 * head
    assert parts[40_960]["LM head for drafts"] == 2 * draft_head_bytes(head, SPEC.vocab_size, 40_960)
    assert parts[None]["LM head"] == parts[40_960]["LM head"] == head


KV = KVFormat.parse("fp8")


@pytest.mark.parametrize(("drafts", "size"), [(2, 40_960), (2, None), (0, 40_960)])
def test_the_memory_plan_adds_up_with_a_draft_vocabulary(drafts, size):
    request = MemoryRequest(max_context_tokens=32_768, slots=4, kv=KV, drafts=drafts, draft_vocab_size=size)
    plan = plan_memory(SPEC, STORED, BOXES["dgx-spark"], request)
    named = {part.name: part.bytes for part in plan.parts}
    assert sum(named.values()) == plan.box.memory_bytes
    expected = draft_vocab_bytes(SPEC, STORED, request)
    assert named.get("draft vocab", 0) == expected == plan.draft_vocab_bytes
    assert (expected > 0) == (drafts > 0 and size is not None)
