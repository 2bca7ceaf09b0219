"""Figures against numpy, and against answers worked out by hand."""

from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench.figures import CONTEXT_LABEL, Slo, failure_counts, figures, percentile
from onebox.bench.metrics import DraftCounters, acceptance, draft_counters, memory_bytes, startup_seconds
from onebox.bench.record import Failure, Reason, RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.bench.timing import decode_tok_s, gaps_s, tpot_s
from onebox.spec.errors import UsageError

# Ten tokens: two in the first chunk after a second, four each at 1.5 s and 2 s; the stream ends at 2.1 s.
COLD = RequestRecord(Role.COLD, 0.0, 2.1, (1.0, 1.5, 2.0), (2, 4, 4), 100, 10, "usage")
WARM = RequestRecord(Role.WARM, 3.0, 0.3, (0.25,), (1,), 100, 1, "usage")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, share):
    assert percentile(values, share) == pytest.approx(numpy.percentile(values, share), rel=1e-9, abs=1e-6)


def test_decode_speed_leaves_out_what_came_with_the_first_chunk():
    assert decode_tok_s(COLD) == pytest.approx(8.0)
    assert tpot_s(COLD) == pytest.approx(0.125)
    assert gaps_s(COLD) == pytest.approx([0.5, 0.5])
    # Without token ids the first chunk is taken for one token.
    assert decode_tok_s(replace(COLD, arrival_tokens=())) == pytest.approx(9.0)
    assert decode_tok_s(WARM) is None


def test_cold_and_warm_are_apart_and_speeds_are_of_whole_answers():
    other = replace(COLD, arrivals_s=(2.0, 2.5, 3.0), total_s=4.0)
    found = figures(WorkloadRecord("x", WorkloadKind.SINGLE, requests=(COLD, WARM, other, WARM), duration_s=7.0))
    assert found["ttft_cold_p50_s"] == pytest.approx(1.5)
    assert (found["ttft_cold_min_s"], found["ttft_cold_max_s"]) == (1.0, 2.0)
    assert found["ttft_cold_std_s"] == pytest.approx(numpy.std([1.0, 2.0], ddof=1))
    assert found["ttft_warm_p50_s"] == pytest.approx(0.25)
    assert found["prefill_tok_s"] == pytest.approx(100 / 1.5)
    assert found["completion_tokens"] == 10
    assert found["e2e_p50_tok_s"] == pytest.approx((10 / 2.1 + 10 / 4) / 2)


def test_a_load_counts_whole_answers_over_the_whole_time():
    request = replace(COLD, role=Role.LOAD)
    failed = replace(request, failure=Failure(Reason.CUT, "x"))
    load = WorkloadRecord("x", WorkloadKind.LOAD, requests=(request, request, failed), duration_s=4.0)
    found = figures(load, Slo(ttft_s=1.0, itl_s=0.5))
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["aggregate_tok_s"] == pytest.approx(5.0)
    assert found["input_tok_s"] == pytest.approx(50.0)
    # Two of three met the objective: the one that failed has not.
    assert (found["goodput_req_s"], found["slo_share"]) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert "slo_share" not in figures(load)


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({"ttft_s": 0.9}, False),
        ({"ttft_s": 1.0, "itl_s": 0.5, "tpot_s": 0.13, "e2e_s": 2.1}, True),
        ({"itl_s": 0.4}, False),
        ({"tpot_s": 0.12}, False),
        ({"e2e_s": 2.0}, False),
    ],
)
def test_an_objective_holds_only_if_all_of_it_does(limits, holds):
    assert Slo(**limits).holds(COLD) is holds


def test_an_objective_is_read_as_people_write_it():
    assert Slo.parse("ttft=2s, itl=100ms,e2e=1.5s") == Slo(ttft_s=2.0, itl_s=0.1, e2e_s=1.5)
    assert not Slo.parse("").is_set
    for text in ("ttft=2", "ttft", "speed=2s", "ttft=-1s"):
        with pytest.raises(UsageError, match="write it as"):
            Slo.parse(text)


def test_a_cell_of_a_sweep_is_of_the_prompt_and_not_of_its_context():
    load = replace(COLD, label=CONTEXT_LABEL, role=Role.LOAD, arrivals_s=(9.0,))
    one, two = (replace(COLD, role=Role.LOAD, start_s=start) for start in (0.0, 0.5))
    cell = WorkloadRecord("x", WorkloadKind.SWEEP, {"prompt": 50}, (load, one, two), 9.0)
    found = figures(cell)
    assert found["prefill_tok_s"] == pytest.approx(50.0)
    # From the first chunk of the one at 1 s to the last of the other at 2.5 s, 16 tokens.
    assert found["aggregate_tok_s"] == pytest.approx(16 / 1.5)
    assert found["decode_p50_tok_s"] == pytest.approx(8.0)


def test_what_was_not_measured_has_no_figure():
    assert figures(WorkloadRecord("x", WorkloadKind.LOAD)) == {}
    failed = replace(COLD, failure=Failure(Reason.CUT, "x"))
    assert figures(WorkloadRecord("x", WorkloadKind.SINGLE, requests=(failed,))) == {}


def test_failures_are_counted_by_status_and_reason():
    def failed(reason, status, message):
        return replace(COLD, failure=Failure(reason, message, status))

    refused = [failed(Reason.REFUSED, 400, f"{131073 + i} tokens are too many.") for i in range(3)]
    found = failure_counts([COLD, failed(Reason.CUT, 200, "It broke."), *refused])
    assert found == [("refused", 400, "131073 tokens are too many.", 3), ("cut stream", 200, "It broke.", 1)]


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b, \\"c\\""} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
onebox:memory_bytes{model_name="x",part="KV pages"} 966367641.0
onebox:startup_seconds{model_name="x",phase="weights"} 0.69
"""


def test_draft_counters_are_read_under_vllms_names():
    assert draft_counters(METRICS) == DraftCounters(10, 20, 15, {0: 9, 1: 6})
    assert draft_counters(METRICS.replace("vllm:", "llamacpp:").replace("_total", "")).accepted == 15
    assert draft_counters("up 1\n") is None
    assert draft_counters(None) is None
    assert memory_bytes(METRICS) == {"KV pages": 966367641}
    assert startup_seconds(METRICS) == {"weights": 0.69}


def test_acceptance_comes_from_usage_where_it_is_told_and_from_metrics_elsewhere():
    after = draft_counters(METRICS)
    counted = after - DraftCounters(2, 4, 3, {0: 1})
    told = replace(COLD, accepted_drafts=6, rejected_drafts=2)
    found = acceptance([told], counted)
    assert (found.source, found.accepted, found.drafted, found.rate) == ("usage", 6, 8, 0.75)
    # Ten tokens, six of them drafts: four steps.
    assert found.tokens_per_step == pytest.approx(2.5)
    assert (found.num_drafts, found.by_position) == (8, (1.0, 0.75))
    by_metrics = acceptance([COLD, COLD], counted)
    assert (by_metrics.source, by_metrics.accepted, by_metrics.drafted) == ("metrics", 12, 16)
    assert by_metrics.tokens_per_step == pytest.approx(20 / 8)
    assert acceptance([COLD], None) is None
