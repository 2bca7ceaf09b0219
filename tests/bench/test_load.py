"""Loads, sweeps and whole runs against a server over real sockets: what is sent, what is kept, what is said."""

import asyncio
import os
import random
import signal
import socket
import sys
import time
from dataclasses import replace

import pytest

from onebox.bench.client import Client, Connection
from onebox.bench.figures import CONTEXT_LABEL, Slo
from onebox.bench.load import MIXES, Loop, run_load
from onebox.bench.measure import BenchPlan, measure
from onebox.bench.record import Reason, Role, WorkloadKind
from onebox.bench.session import BenchSettings, Session, Silence
from onebox.bench.single import run_single
from onebox.bench.sweep import Cell, cells, run_cell
from onebox.bench.tasks import TASKS, chosen_tasks
from onebox.spec.errors import OneboxError, UsageError
from tests.bench.faulty import faulty, prompt_words

SETTINGS = BenchSettings(runs=2, warm_ups=1, seed=5)
NO_WARM_UP = replace(SETTINGS, warm_ups=0)


def done(server, work, settings=SETTINGS, watch=None, **limits):
    """What a piece of work gives in a session with the server."""

    async def run():
        async with Client(Connection(server.url, **limits)) as client:
            await client.discover()
            return await work(Session(client, settings, watch or Silence()))

    return asyncio.run(run())


def test_single_stream_is_warm_up_then_cold_and_warm_in_turn():
    with faulty(drafts_in_usage=True, drafts_in_metrics=True) as server:
        made = done(server, lambda session: run_single(session, TASKS["qa"]))
    roles = [request.role for request in made.requests]
    assert roles == [Role.WARM_UP, Role.COLD, Role.WARM, Role.COLD, Role.WARM]
    openings = [body["messages"][0]["content"][:20] for body in server.bodies]
    # A warm prompt is the cold one before it; every cold one is new.
    assert openings[1] == openings[2]
    assert openings[3] == openings[4]
    assert len(set(openings)) == 3
    assert [body["max_tokens"] for body in server.bodies] == [32, 256, 256, 256, 256]
    assert {request.prompt_tokens for request in made.requests} == {64}
    assert made.figures["completion_tokens"] == 12
    # Two cold answers of 12 tokens, 6 of them drafts each; every step of the metrics keeps its first draft.
    assert (made.acceptance.accepted, made.acceptance.drafted, made.acceptance.tokens_per_step) == (12, 18, 2.0)
    assert made.acceptance.by_position == (1.0, 0.5)
    # The server writes its answers at once: they have no decode speed, and that is said.
    assert made.notes == ("4 of 4 answers are too short to have a decode speed",)
    assert {"ttft_warm_p50_s", "e2e_warm_p50_tok_s"} < made.figures.keys()
    assert "decode_p50_tok_s" not in made.figures


def test_the_same_seed_sends_the_same_prompts():
    sent = []
    for seed in (5, 5, 6):
        with faulty() as server:
            done(server, lambda session: run_single(session, TASKS["math"]), replace(SETTINGS, seed=seed))
            sent.append([body["messages"] for body in server.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_a_cold_prompt_that_was_cached_is_told():
    with faulty(cached_tokens=90) as server:
        made = done(server, lambda session: run_single(session, TASKS["json"]))
    assert made.notes[0] == "a cold prompt had 90 tokens in the server's cache"


def test_a_workload_that_takes_too_long_has_fewer_runs_and_says_so():
    settings = replace(SETTINGS, runs=5, limit_s=0.2)
    with faulty(chunk_delay_s=0.05) as server:
        made = done(server, lambda session: run_single(session, TASKS["qa"]), settings)
        cell = done(server, lambda session: run_cell(session, Cell(64, 12)), settings)
    assert [request.role for request in made.requests] == [Role.WARM_UP, Role.COLD, Role.WARM]
    assert made.notes == ("1 of 5 runs: they took more than the 0.2 s of --limit",)
    assert [request.role for request in cell.requests] == [Role.WARM_UP, Role.LOAD]
    assert made.figures["ttft_cold_p50_s"] > 0


def test_a_long_prompt_has_no_warm_up_where_time_is_short():
    with faulty(max_model_len=40_000) as server:
        made = done(server, lambda session: run_single(session, TASKS["rag-32k"]), replace(SETTINGS, limit_s=60.0))
    assert [request.role for request in made.requests] == [Role.COLD, Role.WARM] * 2
    assert made.notes[0].startswith("no warm-up")


def test_a_picture_is_not_sent_to_a_server_without_eyes():
    with faulty() as server:
        made = done(server, lambda session: run_single(session, TASKS["vision"]))
    assert made.skipped == "the server takes no images"
    assert server.bodies == []


def test_usage_is_held_against_the_text_where_no_token_ids_come():
    for fault, reason in (("overstated", Reason.WRONG_USAGE), ("duplicates", Reason.DUPLICATE), ("", None)):
        with faulty(fault, knows={"ignore_eos"}, answer_tokens=60) as server:
            made = done(server, lambda session: run_single(session, TASKS["qa"]))
        cold = [request for request in made.requests if request.role is Role.COLD]
        assert {request.failure.reason if request.failure else None for request in cold} == {reason}


def test_usage_is_held_against_the_prompt_that_was_sent():
    with faulty("wrong prompt") as server:
        made = done(server, lambda session: run_single(session, TASKS["qa"]))
    assert {request.failure.message for request in made.failed} == {
        "usage counts 128 tokens of a prompt that has 64 by /tokenize."
    }
    assert len(made.failed) == len(made.requests)


def test_a_closed_loop_keeps_its_clients_busy_and_ends_after_its_count():
    with faulty(chunk_delay_s=0.002) as server:
        made = done(server, lambda session: run_load(session, "uniform_short", Loop(3, count=12)), NO_WARM_UP)
    assert len(made.requests) == len(server.bodies) == 12
    assert server.most_at_once == 3
    labels = [request.label for request in made.requests]
    assert {label: labels.count(label) for label in labels} == dict.fromkeys(
        ("docai-qa", "docai-code", "docai-kie", "docai-hungarian"), 3
    )
    assert made.figures["completed"] == 12
    ends = max(request.start_s + request.total_s for request in made.requests)
    assert made.duration_s == pytest.approx(ends - min(request.start_s for request in made.requests))


def test_a_load_is_warmed_up_with_what_was_not_measured_before():
    async def both(session):
        return [await run_load(session, "mixed_typical", Loop(4, count=4)) for _ in range(2)]

    with faulty(max_model_len=20_000) as server:
        first, second = done(server, both)
    assert [request.label for request in first.requests if request.role is Role.WARM_UP] == [
        *("docai-qa", "docai-code", "docai-kie", "docai-hungarian", "rag-8k")
    ]
    assert not any(request.role is Role.WARM_UP for request in second.requests)
    assert first.figures["completed"] == second.figures["completed"] == 4
    # The time runs from the first request that counts.
    assert first.duration_s < max(request.start_s + request.total_s for request in first.requests)


def test_a_picture_is_sent_to_a_server_with_eyes():
    with faulty(modalities=("text", "image")) as server:
        made = done(server, lambda session: run_single(session, TASKS["vision"]))
    assert made.figures["completion_tokens"] == 12
    kinds = [part["type"] for part in server.bodies[0]["messages"][1]["content"]]
    assert kinds == ["image_url", "text"]


def test_an_open_loop_sends_when_its_seed_says_whether_or_not_the_server_keeps_up():
    with faulty(chunk_delay_s=0.05, answer_tokens=6) as server:
        made = done(server, lambda session: run_load(session, "uniform_short", Loop(rate=50.0, count=20)), NO_WARM_UP)
    draw, expected, clock = random.Random(5), [], 0.0
    for _ in range(20):
        clock += draw.expovariate(50.0)
        expected.append(clock)
    starts = sorted(request.start_s for request in made.requests)
    assert len(starts) == 20
    # Never before its time; how late is the machine's doing, and not judged here.
    assert all(start >= planned - 1e-3 for start, planned in zip(starts, expected, strict=True))
    assert server.most_at_once > 4


def test_a_load_by_time_begins_nothing_after_it_and_waits_for_the_rest():
    with faulty(chunk_delay_s=0.01) as server:
        made = done(server, lambda session: run_load(session, "uniform_short", Loop(2, duration_s=0.4)), NO_WARM_UP)
    starts = [request.start_s for request in made.requests]
    assert len(starts) >= 2
    assert not made.failed
    # A second for a machine that is busy; one answer alone would end the load far later if the time did not.
    assert max(starts) - min(starts) < 0.4 + 1.0


def test_one_client_of_four_has_long_prompts():
    with faulty(max_model_len=9000) as server:
        done(server, lambda session: run_load(session, "mixed_typical", Loop(4, count=16)), NO_WARM_UP)
    lengths = [len(prompt_words(body)) for body in server.bodies]
    assert 7936 in lengths
    assert sum(length > 5000 for length in lengths) < len(lengths) / 2


def test_long_prompts_fill_a_small_context_and_say_so():
    with faulty(max_model_len=3000) as server:
        made = done(server, lambda session: run_load(session, "long_only", Loop(2, count=2)), NO_WARM_UP)
    assert {request.prompt_tokens for request in made.requests} == {3000 - 256}
    assert made.notes[:1] == ("Long: scaled down to 2,744 + 256 tokens from 108,000 + 256: the context holds 3,000",)


def test_what_does_not_fit_at_all_is_left_out_and_said():
    with faulty() as server:
        settings = replace(NO_WARM_UP, max_context=90)
        made = done(server, lambda session: run_load(session, "uniform_short", Loop(2, count=6)), settings)
        assert not made.failed
        assert {request.label for request in made.requests} == {"docai-qa", "docai-code", "docai-hungarian"}
        assert any(note.startswith("DocAI JSON-KIE: left out, its prompt has ") for note in made.notes)
        agent = done(server, lambda session: run_load(session, "agent", Loop(2, count=6)), settings)
        assert "the context holds 90 tokens" in agent.skipped
        single = done(server, lambda session: run_single(session, TASKS["docai-kie"]), settings)
        assert "the context holds 90" in single.skipped


def test_an_agents_context_grows_by_what_was_said():
    with faulty() as server:
        made = done(server, lambda session: run_load(session, "agent", Loop(1, count=2)), NO_WARM_UP)
    assert [request.turn for request in made.requests] == [1, 2, 3, 4, 5, 6] * 2
    assert {f"ttft_turn{turn}_p50_s" for turn in range(1, 7)} < made.figures.keys()
    assert made.figures["cached_share"] == 0
    lengths = [request.prompt_tokens for request in made.requests[:6]]
    assert lengths == sorted(set(lengths))
    second = server.bodies[1]["messages"]
    assert second[:2] == server.bodies[0]["messages"]
    assert second[2] == {"role": "assistant", "content": "the quick brown fox jumps over the lazy dog and then it "}


def test_an_agent_has_fewer_turns_in_a_small_context():
    with faulty(max_model_len=1024) as server:
        made = done(server, lambda session: run_load(session, "agent", Loop(1, count=1)), NO_WARM_UP)
    assert len(made.requests) == 2
    assert not made.failed
    assert made.notes[:1] == ("scaled down to 2 turns from 6: the context holds 1,024 tokens",)


def test_failures_under_load_are_kept_with_their_reasons_and_leave_the_figures():
    faults = {1: "500", 3: "cut", 5: "429"}
    with faulty(fault_of=lambda number: faults.get(number, "")) as server:
        settings = replace(NO_WARM_UP, slo=Slo(ttft_s=60))
        made = done(server, lambda session: run_load(session, "uniform_short", Loop(1, count=8)), settings)
    assert [request.failure.status for request in made.failed] == [500, 200, 429]
    assert (made.figures["completed"], made.figures["failed"]) == (5, 3)
    assert made.figures["slo_share"] == pytest.approx(5 / 8)


def test_a_loop_needs_one_end():
    for options in ({}, {"count": 1, "duration_s": 1.0}):
        with pytest.raises(UsageError, match="either --count or --duration"):
            Loop(**options)
    with faulty() as server, pytest.raises(UsageError, match=f"there are {', '.join(MIXES)}"):
        done(server, lambda session: run_load(session, "other", Loop(count=1)), NO_WARM_UP)


def test_a_cell_has_exactly_the_tokens_it_names_on_a_context_that_was_sent_before():
    cell = Cell(prompt=200, answer=24, depth=500, concurrency=2)
    with faulty(chunk_delay_s=0.005) as server:
        made = done(server, lambda session: run_cell(session, cell))
    assert made.kind is WorkloadKind.SWEEP
    loads = [request for request in made.requests if request.label == CONTEXT_LABEL]
    measured = [request for request in made.requests if request.label != CONTEXT_LABEL]
    assert len(loads) == len(measured) == 2 * 3
    assert {request.prompt_tokens for request in loads} == {500}
    assert {(request.prompt_tokens, request.completion_tokens) for request in measured} == {(700, 24)}
    load = server.bodies[0]
    cell_body = next(body for body in server.bodies[2:4] if body["messages"][0] == load["messages"][0])
    assert (load["max_tokens"], cell_body["ignore_eos"], cell_body["min_tokens"]) == (1, True, 24)
    assert server.most_at_once == 2


def test_a_cell_that_would_be_another_one_is_skipped():
    with faulty(max_model_len=500) as server:
        made = done(server, lambda session: run_cell(session, Cell(500, 24)))
        assert made.skipped == "the context holds 500 tokens"
    with faulty(knows=set()) as server:
        assert "ignore_eos" in done(server, lambda session: run_cell(session, Cell(100, 24))).skipped


def test_a_server_that_ends_answers_early_all_the_same_is_told():
    with faulty("ends early") as server:
        made = done(server, lambda session: run_cell(session, Cell(64, 24)))
    assert made.notes[:1] == ("answers have 12 tokens, not 24: the server does not follow ignore_eos",)


def test_cells_are_the_product_shallow_first():
    names = [cell.name for cell in cells((128,), (32, 64), (0, 512), (1,))]
    assert names == ["pp128 tg32 c1", "pp128 tg64 c1", "pp128 tg32 d512 c1", "pp128 tg64 d512 c1"]


def run_of(server, watch=None, **parts):
    plan = BenchPlan(Connection(server.url, api_key="secret"), SETTINGS, **parts)
    return asyncio.run(measure(plan, watch or Silence(), ("onebox", "bench")))


def test_a_run_holds_all_that_is_needed_to_judge_it():
    with faulty(drafts_in_metrics=True) as server:
        loads = (("uniform_short", Loop(2, count=2)),)
        run = run_of(server, tasks=chosen_tasks(["math", "vision"]), loads=loads, cells=(Cell(64, 8),))
    assert run.is_success
    assert [workload.name for workload in run.workloads] == ["Math", "Vision/OCR", "uniform_short c=2", "pp64 tg8 c1"]
    assert run.memory_bytes == {"weights": 1024}
    assert run.startup_s == {"weights": 0.5}
    assert run.versions.keys() >= {"onebox", "python", "httpx"}
    assert run.config["workloads"] == ["math", "vision"]
    assert "secret" not in str(run)
    assert (run.hardware.num_cores, run.server.model) == (os.cpu_count(), "fake")


def test_what_a_server_cannot_tell_is_noted():
    with faulty(knows=set(), tokenizer="", max_model_len=None) as server:
        run = run_of(server, tasks=chosen_tasks(["math"]))
    text = "\n".join(run.notes)
    for words in ("no /tokenize", "no token ids", "chat_template_kwargs", "does not report its context"):
        assert words in text
    # Counted by asking, and exact all the same.
    assert {request.prompt_tokens for request in run.workloads[0].requests} == {96}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_measured(sent):
    class Interrupter(Silence):
        count = 0

        def answered(self, answer):  # noqa: ARG002 - it only counts
            self.count += 1
            if self.count == 8:
                os.kill(os.getpid(), sent)

    with faulty(chunk_delay_s=0.005) as server:
        run = run_of(server, Interrupter(), tasks=chosen_tasks(["qa", "math", "code"]))
    assert run.interrupted
    assert not run.is_success
    assert [workload.name for workload in run.workloads] == ["Q&A", "Code"]
    assert len(run.workloads[0].requests) == 5
    assert 3 <= len(run.workloads[1].requests) <= 4


def test_a_launched_server_is_timed_and_stopped():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"{sys.executable} -m tests.bench.serve_faulty {port}"
    plan = BenchPlan(Connection(f"127.0.0.1:{port}"), SETTINGS, chosen_tasks(["math"]), launch=command)
    run = asyncio.run(measure(plan, Silence(), ()))
    assert run.is_success
    assert list(run.startup_s) == ["listening", "healthy", "first token"]
    assert 0 < run.startup_s["listening"] <= run.startup_s["healthy"] <= run.startup_s["first token"]
    assert run.memory_bytes["resident"] > 1 << 20
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))  # nobody holds it any more


def test_a_server_that_does_not_come_up_is_told_in_its_own_words():
    command = f"{sys.executable} -c 'print(\"no such model\"); raise SystemExit(3)'"
    plan = BenchPlan(Connection("127.0.0.1:9"), SETTINGS, chosen_tasks(["math"]), launch=command)
    with pytest.raises(OneboxError, match=r"(?s)ended with status 3 before it served.*no such model"):
        asyncio.run(measure(plan, Silence(), ()))
    with pytest.raises(UsageError, match="cannot be started: /no/such/program"):
        asyncio.run(measure(replace(plan, launch="/no/such/program"), Silence(), ()))
    with faulty() as server, pytest.raises(UsageError, match="already answers"):
        asyncio.run(measure(replace(plan, connection=Connection(server.url)), Silence(), ()))


def test_an_open_loop_sends_every_task_of_its_mix_and_says_how_late():
    with faulty(max_model_len=9000) as server:
        made = done(server, lambda session: run_load(session, "mixed_typical", Loop(rate=400.0, count=16)), NO_WARM_UP)
    labels = [request.label for request in made.requests]
    assert {label: labels.count(label) for label in set(labels)} == {
        **dict.fromkeys(("docai-qa", "docai-code", "docai-kie", "docai-hungarian"), 3),
        "rag-8k": 4,
    }
    late = [request.late_s for request in made.requests]
    assert all(value >= -1e-3 for value in late)
    assert made.figures["late_max_s"] == pytest.approx(max(late))
    assert made.figures["late_p50_s"] <= made.figures["late_p95_s"] <= made.figures["late_max_s"]
    with faulty() as server:
        closed = done(server, lambda session: run_load(session, "uniform_short", Loop(2, count=4)), NO_WARM_UP)
    assert {request.late_s for request in closed.requests} == {None}
    assert not [name for name in closed.figures if name.startswith("late_")]


def test_a_client_that_cannot_keep_its_arrivals_says_so():
    class Busy(Silence):
        """Holds the client at its first answer, beyond the times of all later arrivals."""

        held = False

        def answered(self, answer):  # noqa: ARG002 - it only takes time
            if not self.held:
                self.held = True
                time.sleep(1.5)

    with faulty() as server:
        load = ("uniform_short", Loop(rate=5.0, count=6))
        made = done(server, lambda session: run_load(session, *load), NO_WARM_UP, watch=Busy())
    assert made.figures["late_max_s"] > 0.1
    assert any("sent late" in note for note in made.notes)


@pytest.mark.parametrize(
    ("loop", "why"),
    [(Loop(3, count=8), "mixed_typical needs 4 clients for it"), (Loop(4, count=3), "the load ended before its turn")],
)
def test_a_mix_that_cannot_send_its_long_prompt_says_so(loop, why):
    with faulty(max_model_len=9000, chunk_delay_s=0.002) as server:
        made = done(server, lambda session: run_load(session, "mixed_typical", loop), NO_WARM_UP)
        whole = done(server, lambda session: run_load(session, "mixed_typical", Loop(4, count=16)), NO_WARM_UP)
    assert f"Long-RAG-8K (7,936 tokens) was never sent: {why}" in made.notes
    assert not any("was never sent" in note for note in whole.notes)


def test_a_server_that_counts_no_prompt_has_no_prompt_figures():
    """Neither usage nor a tokenizer: token ids count the answer, and nothing counts the prompt."""
    with faulty("no usage", tokenizer="") as server:
        single = done(server, lambda session: run_single(session, TASKS["qa"]))
        load = done(server, lambda session: run_load(session, "uniform_short", Loop(2, count=4)), NO_WARM_UP)
    assert not single.failed
    assert {request.prompt_tokens for request in single.requests} == {None}
    assert not {"prompt_tokens", "prefill_tok_s", "input_tok_s"} & (single.figures.keys() | load.figures.keys())
    assert single.figures["ttft_cold_p50_s"] > 0
    with faulty("no usage") as server:
        counted = done(server, lambda session: run_single(session, TASKS["qa"]))
    assert counted.figures["prompt_tokens"] == 64
    assert counted.figures["prefill_tok_s"] > 0


def test_a_warm_answer_that_is_another_one_is_told():
    class Renamed(Silence):
        count = 0

        def answered(self, answer):
            self.count += 1
            answer.content += f" {self.count}"

    with faulty() as server:
        made = done(server, lambda session: run_single(session, TASKS["qa"]), watch=Renamed())
        same = done(server, lambda session: run_single(session, TASKS["qa"]))
    assert "2 of 2 warm answers differ from the cold one to the same prompt, at temperature 0" in made.notes
    assert not any("differ" in note for note in same.notes)
