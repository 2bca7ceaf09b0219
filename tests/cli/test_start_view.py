"""What `onebox serve` says at its start: sentences and figures that its operator looks for."""

import re
from dataclasses import replace

import pytest

from onebox.cli.start_view import plan_lines, progress_lines
from onebox.engine.api import (
    DraftVocabOpened,
    EngineConfig,
    Planned,
    PrefixDiskConfig,
    PrefixDiskOpened,
    SpeculationConfig,
    SpeculationMethod,
)
from onebox.planner.memory import MemoryRequest, plan_memory
from onebox.planner.presets import named_preset
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.prefix_place import prefix_directory_line
from onebox.spec.shapes import named_spec

SPEC = named_spec("qwen3.5-122b-a10b")


def planned(context: int = 262_144, **config) -> Planned:
    request = MemoryRequest(max_context_tokens=context, slots=8, kv=KVFormat.parse("fp8"), drafts=2)
    memory = plan_memory(SPEC, named_preset("hybrid").weight_bytes(SPEC), BOXES["dgx-spark"], request)
    settings = {"speculation": SpeculationConfig(SpeculationMethod.MTP, 2), "num_checkpoints": memory.num_checkpoints}
    return Planned(EngineConfig(context, memory.num_pages, **settings | config), 248320, memory, "bfloat16", b"")


def test_tokens_and_users_at_three_lengths_are_told():
    plan = planned()
    text = "\n".join(plan_lines(plan))
    pages = plan.memory.num_pages
    assert f"KV cache size: {pages * 64:,} tokens" in text
    assert f"Maximum concurrency for 262,144 tokens per request: {pages / 4096:.2f}x" in text
    for length in (32_768, 131_072, 262_144):
        assert f"{pages * 64 // length} at {length:,} tokens" in text
    assert "At most 8 run at once (--max-num-seqs), 64 more wait." in text


def test_lengths_beyond_the_limit_are_not_counted():
    users = next(line for line in plan_lines(planned(32_768)) if line.startswith("Users"))
    assert re.findall(r"at ([\d,]+) tokens", users) == ["32,768"]


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        (SpeculationConfig(), "Drafts: none."),
        (SpeculationConfig(SpeculationMethod.MTP, 2), "Drafts: up to 2 a step, from the MTP head (mtp)."),
        (SpeculationConfig(SpeculationMethod.NGRAM, 3), "Drafts: up to 3 a step, from the text itself (ngram)."),
        (SpeculationConfig(SpeculationMethod.AUTO, 4), "from the MTP head or the text itself (auto)."),
        (SpeculationConfig(SpeculationMethod.AUTO, 4, has_head=False), "a step, from the text itself (auto)."),
    ],
)
def test_where_drafts_come_from_is_told(speculation, said):
    assert said in list(plan_lines(planned(speculation=speculation)))[-1]


def test_nothing_is_printed_as_python_writes_it():
    plan = planned(num_checkpoints=0, eos_token_ids=(1, 2))
    text = "\n".join(plan_lines(replace(plan, dtype="float32")))
    assert not re.search(r"\w+\(|None|True|False|<|'|=", text), text
    assert "Prefix cache: off." in text


def test_prefixes_on_disk_are_told_with_what_was_found(tmp_path):
    disk = PrefixDiskConfig(str(tmp_path), 10**11)
    told = [line for line in plan_lines(planned(prefix_disk=disk)) if line.startswith("Prefixes on disk")]
    assert told == [prefix_directory_line(tmp_path, 10**11)]
    assert not [line for line in plan_lines(planned()) if "on disk" in line]
    (found,) = progress_lines(PrefixDiskOpened("/kept", 1200, 3 << 30, 1 << 30))
    assert found == "prefixes on disk: 1,200 of 3.00 GiB in /kept, and 1.00 GiB of other models"


def test_the_draft_vocabulary_is_told_with_what_it_covers():
    assert [*progress_lines(DraftVocabOpened(40_960, 248_320, 0, None))] == [
        "draft vocabulary: 40,960 of 248,320 tokens, nothing was counted yet"
    ]
    (line,) = progress_lines(DraftVocabOpened(40_960, 248_320, 1_200_000, 0.9751))
    assert line == "draft vocabulary: 40,960 of 248,320 tokens, 97.5% of 1,200,000 tokens said"
