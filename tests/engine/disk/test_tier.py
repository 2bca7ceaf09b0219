"""The real disk under the real engine: written behind its back, flushed at its end, read at the next start."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from benchmarks.prefix_store.kill import leftovers
from onebox.engine.api import (
    CacheTier,
    CheckpointStarter,
    EngineProcess,
    Finished,
    Request,
    SamplingParams,
    TokenInfo,
    Tokens,
    plan_engine,
    start_engine,
)
from onebox.engine.disk.fingerprint import fingerprint_parts
from onebox.engine.disk.rates import DiskRates
from onebox.store.reader import EntryReader
from onebox.store.writer import EntryWriter
from tests.engine.disk.killed import OPTIONS, REQUEST
from tests.engine.tiny_disk import damage_files, forget_memory, wait_written

NUM_CACHED = len(REQUEST.prompt) // 64 * 64


@pytest.fixture(autouse=True)
def always_reads(monkeypatch):
    """Which is faster depends on the machine."""
    monkeypatch.setattr(DiskRates, "read_pays", lambda *_: True)


@pytest.fixture
def plan(checkpoint, tmp_path):
    return plan_engine(checkpoint, replace(OPTIONS, prefix_dir=tmp_path / "prefixes"), TokenInfo())


@pytest.fixture(scope="module")
def expected(checkpoint):
    with start_engine(plan_engine(checkpoint, OPTIONS, TokenInfo()), TokenInfo()) as engine:
        return answer(engine, REQUEST)[:2]


def answer(engine, request):
    token_ids, logprobs = [], []
    for event in engine.submit(request):
        if isinstance(event, Tokens):
            token_ids += event.token_ids
            logprobs += event.logprobs
    assert isinstance(event, Finished), event
    return token_ids, [repr(value) for value in logprobs], event.counts


def test_what_memory_holds_at_the_end_is_there_at_the_next_start(plan, expected):
    with start_engine(plan, TokenInfo()) as engine:
        assert answer(engine, REQUEST)[:2] == expected
    assert engine.stats().disk.num_entries == 1
    with start_engine(plan, TokenInfo()) as engine:
        assert engine.lookup(REQUEST).disk_tokens == NUM_CACHED
        token_ids, logprobs, counts = answer(engine, REQUEST)
        assert engine.lookup(REQUEST).tier is CacheTier.MEMORY
    assert (token_ids, logprobs) == expected
    assert (counts.cached_tokens, counts.cached_tier) == (NUM_CACHED, CacheTier.DISK)
    stats = engine.stats().disk
    assert (stats.num_hits, stats.hit_tokens, stats.written_bytes) == (1, NUM_CACHED, 0)
    assert stats.read_bytes > 0
    engine._scheduler.check()


def test_a_request_that_opted_out_leaves_nothing_on_disk_and_reads_nothing(plan):
    private = replace(REQUEST, cache_prompt=False)
    with start_engine(plan, TokenInfo()) as engine:
        answer(engine, private)
    assert engine.stats().disk.num_entries == 0
    with start_engine(plan, TokenInfo()) as engine:
        answer(engine, REQUEST)
        forget_memory(engine)
        assert answer(engine, private)[2].cached_tokens == 0
    assert engine.stats().disk.read_bytes == 0


def test_a_pinned_prompt_is_pinned_on_disk(plan):
    with start_engine(plan, TokenInfo()) as engine:
        answer(engine, replace(REQUEST, pin_prompt=True))
        wait_written(engine)
        assert engine._disk._directory.stats().num_pinned == 1


def test_damaged_files_are_a_miss_and_are_written_again(plan, expected, tmp_path):
    with start_engine(plan, TokenInfo()) as engine:
        answer(engine, REQUEST)
    assert damage_files(tmp_path / "prefixes")
    with start_engine(plan, TokenInfo()) as engine:
        token_ids, logprobs, counts = answer(engine, REQUEST)
        assert (token_ids, logprobs, counts.cached_tokens) == (*expected, 0)
        forget_memory(engine)
        assert answer(engine, REQUEST)[2].cached_tokens == NUM_CACHED
    assert engine.stats().disk.num_damaged > 0


def test_the_engine_thread_sleeps_while_a_prefix_is_read_and_an_abort_wakes_it(plan, monkeypatch):
    with start_engine(plan, TokenInfo()) as engine:
        answer(engine, REQUEST)
    gate, reading, read_chunk = threading.Event(), threading.Event(), EntryReader.read_chunk

    def read_later(reader, chunk, into):
        reading.set()
        gate.wait(60)
        read_chunk(reader, chunk, into)

    monkeypatch.setattr(EntryReader, "read_chunk", read_later)
    with start_engine(plan, TokenInfo()) as engine:
        plans, began = [], time.monotonic()
        plan_step = engine._scheduler.plan
        monkeypatch.setattr(engine._scheduler, "plan", lambda: plans.append(1) or plan_step())
        handle = engine.submit(REQUEST)
        assert reading.wait(60)
        # Others are answered meanwhile, and the one that waits can be aborted.
        assert answer(engine, Request("beside", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True)))[0]
        engine.abort(handle.request_id)
        assert [*handle][-1].reason == "abort"
        # A few for the steps, and two a second for deadlines.
        assert len(plans) < 20 + 4 * (time.monotonic() - began)
        gate.set()
        wait_written(engine)
        assert answer(engine, REQUEST)[2].cached_tokens == NUM_CACHED
    engine._scheduler.check()


def test_a_disk_that_takes_nothing_more_stops_writing_and_not_serving(plan, expected, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onebox.store.writer.write_chunk", refuse)
    with start_engine(plan, TokenInfo()) as engine:
        assert answer(engine, REQUEST)[:2] == expected
        wait_written(engine)
        stats = engine.stats().disk
        assert answer(engine, REQUEST)[:2] == expected
    assert (stats.num_entries, stats.is_writing, stats.num_dropped) == (0, False, 1)


def test_an_engine_that_dies_writes_nothing_more(plan, monkeypatch):
    with start_engine(plan, TokenInfo()) as engine:
        began, gate, write_chunk = threading.Event(), threading.Event(), EntryWriter.write_chunk

        def write_later(writer, chunk, parts):
            began.set()
            gate.wait(60)
            write_chunk(writer, chunk, parts)

        monkeypatch.setattr(EntryWriter, "write_chunk", write_later)
        answer(engine, REQUEST)
        assert began.wait(60)
        monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 / 0)
        handle = engine.submit(replace(REQUEST, request_id="last"))
        assert "division" in [*handle][-1].message
        gate.set()
        engine.wait_stopped()
    assert engine.stats().disk.num_entries == 0


def test_an_engine_in_its_own_process_flushes_when_it_is_closed(checkpoint, plan, tmp_path):
    options = replace(OPTIONS, prefix_dir=tmp_path / "prefixes")
    seen = []
    with EngineProcess(CheckpointStarter(checkpoint, options, TokenInfo()), seen.append) as engine:
        engine.wait_ready()
        for _ in engine.submit(REQUEST):
            pass
    assert any(type(progress).__name__ == "PrefixDiskOpened" for progress in seen)
    assert len([*(tmp_path / "prefixes").glob("*/entries/*")]) == 1
    assert not leftovers(tmp_path / "prefixes")


def test_a_killed_engine_leaves_right_answers_and_no_files_that_nobody_deletes(checkpoint, plan, expected, tmp_path):
    root = tmp_path / "prefixes"
    command = [sys.executable, "-m", "tests.engine.disk.killed", str(checkpoint), str(root), "1"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert [*root.glob("*/chunks/*/*")]
    with start_engine(plan, TokenInfo()) as engine:
        assert not leftovers(root)
        assert answer(engine, REQUEST)[:2] == expected
        forget_memory(engine)
        assert answer(engine, REQUEST)[2].cached_tier is CacheTier.DISK


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"mamba_ssm_cache_dtype": "bfloat16"}, {"speculation": "mtp"}],
    ids=lambda change: next(iter(change)),
)
def test_prefixes_of_another_engine_are_another_familys(checkpoint, plan, change, tmp_path):
    other = plan_engine(checkpoint, replace(OPTIONS, prefix_dir=tmp_path, **change), TokenInfo())
    assert fingerprint_parts(plan) == fingerprint_parts(plan)
    assert fingerprint_parts(other) != fingerprint_parts(plan)


def test_other_weights_are_another_family(checkpoint, plan, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    same = plan_engine(copy, OPTIONS, TokenInfo())
    assert fingerprint_parts(same) == fingerprint_parts(plan)
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert fingerprint_parts(same) != fingerprint_parts(plan)
