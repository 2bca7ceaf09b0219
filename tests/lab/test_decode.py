"""The engine's own benchmark, on a tiny model on a CPU: what it counts adds up."""

from itertools import count
from time import monotonic, thread_time

import pytest
import torch

from onebox.lab.decode import (
    ACCEPTANCE,
    ROWS,
    DecodeRow,
    measure,
    random_model,
    row_bytes,
    start_seconds,
    weight_bytes,
)
from onebox.model.dummy import DUMMY_FORMATS, dummy_model
from onebox.spec.errors import DoesNotFitError
from onebox.spec.model import spec_from_config
from onebox.spec.shapes import named_spec
from tests.synthetic import tiny_config


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Each look at the clock is a millisecond after the last: every event of a stream comes that much later."""
    ticks = count()
    monkeypatch.setattr("onebox.lab.decode.perf_counter", lambda: next(ticks) / 1e3)


@pytest.fixture(scope="module")
def model():
    return dummy_model(spec_from_config(tiny_config()), {}, torch.device("cpu"), torch.float32)


def test_a_plain_row_gives_one_token_a_step(model):
    found = measure(model, DecodeRow("plain", context=9, num_tokens=12), ceiling=1e10)
    assert found.tokens_per_step == 1
    assert found.step_ms == 1
    assert found.tokens_per_second == 1000
    assert found.bytes_per_step == row_bytes(model.spec, DecodeRow("plain", context=9))
    assert found.share_of_copy == pytest.approx(found.bytes_per_step / 1e10 / 1e-3, abs=1e-3)


def test_drafts_are_kept_at_the_rates_that_were_set(model):
    found = measure(model, DecodeRow("mtp2", context=9, drafts=2, num_tokens=300), ceiling=1e10)
    assert found.tokens_per_step == pytest.approx(1 + sum(ACCEPTANCE), abs=0.15)


def test_every_stream_counts(model):
    found = measure(model, DecodeRow("plain-x3", streams=3, context=9, num_tokens=12), ceiling=1e10)
    assert found.tokens_per_second == 3000


def test_streams_have_prompts_of_their_own(model):
    from onebox.lab.decode import generate, open_engine

    asked = []
    row = DecodeRow("plain-x3", streams=3, context=20, num_tokens=2)
    with open_engine(model, row) as engine:
        submit_all = engine.submit_all
        engine.submit_all = lambda requests: asked.extend(requests) or submit_all(requests)
        generate(engine, row, "a")
        generate(engine, row, "b")
    assert len({request.prompt for request in asked}) == 6


def test_a_row_of_first_tokens_tells_their_median_and_no_steps(model):
    found = measure(model, DecodeRow("first-9", context=9, drafts=2, num_tokens=1), ceiling=1e10)
    assert found.first_token_s == pytest.approx(1e-3)
    assert found.step_ms is None
    assert found.tokens_per_second is None


def test_the_bytes_are_those_of_the_weights_that_are_run():
    spec, (mtp2,) = named_spec("qwen3.5-122b-a10b"), [row for row in ROWS if row.name == "mtp2"]
    assert row_bytes(spec, mtp2) < 11.2e9, "the drafting layer is INT4, not BF16"


def test_other_formats_have_bytes_of_their_own():
    spec, (plain,) = named_spec("qwen3.5-122b-a10b"), [row for row in ROWS if row.name == "plain"]
    hybrid, nvfp4, fp8, bf16 = (
        row_bytes(spec, plain, DUMMY_FORMATS[name]) for name in ("hybrid", "nvfp4", "fp8", "bf16")
    )
    assert 1.02 < nvfp4 / hybrid < 1.06, "a scale of one byte for 16 columns instead of two for 128, in the experts"
    assert 1.7 < fp8 / hybrid < 2.2
    assert 1.8 < bf16 / fp8 < 2
    assert weight_bytes(spec, DUMMY_FORMATS["bf16"]) > 240e9


def test_weights_that_do_not_fit_are_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (139 << 30, 140 << 30))
    with pytest.raises(DoesNotFitError, match=r"take 2\d\d\.\d GiB, and 139\.0 GiB of this GPU are free"):
        random_model(named_spec("qwen3.5-122b-a10b"), DUMMY_FORMATS["bf16"])


def test_a_plain_step_of_the_122b_moves_what_the_planner_says():
    (plain,) = [row for row in ROWS if row.name == "plain"]
    assert row_bytes(named_spec("qwen3.5-122b-a10b"), plain) == pytest.approx(5.63e9, rel=0.01)


def test_the_start_is_told_in_seconds_of_the_process(model):
    first, began = start_seconds(model), monotonic()
    second, ended = start_seconds(model), monotonic()
    assert second - first == pytest.approx(ended - began, abs=0.05)
    assert first > thread_time()
