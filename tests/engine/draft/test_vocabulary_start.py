"""Where an engine's draft vocabulary comes from, and that what it counted is there for the next one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, open_source
from onebox.engine.api import (
    EngineOptions,
    EngineProcess,
    Request,
    SamplingParams,
    TokenInfo,
    kept_counts_path,
    plan_engine,
)
from onebox.engine.draft.vocabulary_start import open_draft_vocabulary
from onebox.engine.start import start_engine
from onebox.spec.errors import MismatchError, UnreadableError, UsageError
from onebox.spec.token_counts import KeptCounts, read_kept_counts, write_kept_counts

OPTIONS = EngineOptions(
    device="cpu", max_model_len=512, kv_cache_memory_bytes=8 << 20, speculation="mtp", num_speculative_tokens=2
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(checkpoint, draft_vocab, **changes):
    return plan_engine(checkpoint, replace(OPTIONS, draft_vocab=draft_vocab, **changes), TokenInfo())


def listed(plan, added=()):
    vocabulary = open_draft_vocabulary(plan, added)
    vocabulary.close()
    return vocabulary.token_ids


def test_a_small_vocabulary_is_not_trimmed_unless_asked(checkpoint):
    assert planned(checkpoint, "auto").draft_vocab is None
    assert planned(checkpoint, "full").draft_vocab is None
    plan = planned(checkpoint, "48")
    assert plan.config.speculation.draft_vocab_size == plan.memory.request.draft_vocab_size == 48
    assert listed(plan, (250, 9)) == [250, 9, *range(9), *range(10, 47)]


def test_a_file_is_taken_as_it_is(checkpoint, tmp_path):
    path = tmp_path / "list"
    path.write_text("100\n7\n8\n")
    plan = planned(checkpoint, str(path))
    assert plan.config.speculation.draft_vocab_size == 3
    assert listed(plan, (250,)) == [100, 7, 8]


@pytest.mark.parametrize(
    ("draft_vocab", "changes", "said"),
    [
        ("0", {}, "no number of tokens from 1 to"),
        ("9999", {}, "no number of tokens from 1 to"),
        ("nowhere", {}, "there is no such file"),
        ("40", {"speculation": "ngram"}, "drafts by ngram read no head"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint, draft_vocab, changes, said):
    with pytest.raises(UsageError, match=said):
        planned(checkpoint, draft_vocab, **changes)


def test_a_checkpoints_own_list_is_used_and_one_that_is_wrong_is_refused(checkpoint, tmp_path):
    sources = BuildSources(open_source("base", checkpoint))
    run_build(plan_build(Recipe(), sources, draft_vocab=[200, 3, 4, 90]), tmp_path / "own")
    assert listed(planned(tmp_path / "own", "auto"), (250,)) == [200, 3, 4, 90]
    assert listed(planned(tmp_path / "own", "2")) == [200, 3]
    run_build(plan_build(Recipe(), sources, draft_vocab=[3, 3]), tmp_path / "twice")
    with pytest.raises(MismatchError, match="twice"):
        planned(tmp_path / "twice", "auto")


def test_what_one_engine_counted_decides_the_next_ones_list(checkpoint):
    plan = planned(checkpoint, "48")
    path, model = kept_counts_path(checkpoint)
    request = Request("one", (1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3))
    with start_engine(plan, TokenInfo()) as engine:
        said = [token_id for event in engine.submit(request) for token_id in getattr(event, "token_ids", ())]
        assert engine.stats().draft_vocab.num_said == len(said) == 30
    counts = read_kept_counts(path, model, plan.spec.vocab_size)
    assert counts == {token_id: said.count(token_id) for token_id in said}
    assert {*said} <= {*listed(plan)}


@pytest.mark.parametrize(("draft_vocab", "waits"), [("48", True), ("full", False)])
def test_an_engine_in_its_own_process_has_time_to_keep_its_counts(checkpoint, draft_vocab, waits):
    closing = SimpleNamespace(_planned=planned(checkpoint, draft_vocab))
    assert (EngineProcess.close_s.fget(closing) > 0) == waits


@pytest.mark.parametrize("content", ["", "not counts\n", None])
def test_counts_that_cannot_be_used_are_ignored_with_one_line(checkpoint, caplog, content):
    plan = planned(checkpoint, "48")
    path, _ = kept_counts_path(checkpoint)
    if content is None:
        write_kept_counts(path, KeptCounts("f" * 64, plan.spec.vocab_size, {200: 9}))
    else:
        path.parent.mkdir(parents=True)
        path.write_text(content)
    with pytest.raises(UnreadableError):
        read_kept_counts(path, kept_counts_path(checkpoint)[1], plan.spec.vocab_size)
    assert listed(plan) == [*range(48)]
    (record,) = caplog.records
    assert "begin anew" in record.message
