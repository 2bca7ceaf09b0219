"""What the scheduler promises, one by one, on the fake runner and without threads; the queue has a file of its own."""

import math

import pytest

from onebox.engine.request import Failed, FinishReason, Request, SamplingParams, Tokens
from onebox.spec.errors import UnsupportedError
from tests.engine.fake import FAILING, plain_answer
from tests.engine.small import prompt, running, stand

LONG = 100_000


def prompt_tokens(batch):
    return sum(len(piece.token_ids) for piece in batch.chunks)


# Prompts and answers side by side.


def test_between_two_steps_of_a_running_answer_at_most_max_num_batched_tokens_of_prompt_are_computed():
    it = stand(max_model_len=2 * LONG, num_pages=2000, max_num_batched_tokens=2048, num_checkpoints=2)
    it.runner.scheduler = None  # its check of whole texts costs a pass over them at every step
    answers = [it.ask(f"answer {i}", prompt(5, i), max_tokens=200, ignore_eos=True) for i in range(3)]
    it.step()
    it.ask("long", prompt(LONG), max_tokens=2)
    plans = []
    while it.sequences["long"].is_prefilling:
        made = [answer.num_sampled for answer in answers]
        plans.append(it.step())
        assert [answer.num_sampled for answer in answers] == [count + 1 for count in made]
    assert max(map(prompt_tokens, plans)) == 2048
    assert sum(map(prompt_tokens, plans)) == LONG
    assert len(plans) == math.ceil(LONG / 2048)


def test_a_short_prompt_is_not_stuck_behind_a_long_one():
    it = stand(max_model_len=20_000, num_pages=400)
    it.ask("long", prompt(10_000), max_tokens=1)
    it.step()
    it.ask("short", prompt(100, seed=1), max_tokens=1)
    batch = it.step()
    assert [(piece.request_id, len(piece.token_ids)) for piece in batch.chunks] == [("long", 128), ("short", 100)]
    assert it.end("short").reason is FinishReason.LENGTH


def test_what_short_prompts_leave_of_the_budget_goes_to_the_long_one():
    it = stand(max_model_len=20_000, num_pages=400, max_num_batched_tokens=640)
    for name, length in (("long", 5000), ("a", 30), ("b", 64), ("c", 70)):
        it.ask(name, prompt(length, seed=length), max_tokens=1)
    pieces = it.step().chunks
    assert {piece.request_id: len(piece.token_ids) for piece in pieces} == {"long": 384, "a": 30, "b": 64, "c": 70}


def test_prompts_are_cut_on_the_grid_and_only_their_end_draws():
    it = stand(max_num_batched_tokens=64)
    it.ask("a", prompt(133), max_tokens=2)
    pieces = [piece for _ in range(3) for piece in it.step().chunks]
    assert [(piece.start, piece.end, piece.draw is not None) for piece in pieces] == [
        (0, 64, False),
        (64, 128, False),
        (128, 133, True),
    ]
    (rows,) = it.step().rows
    assert (rows.start, rows.token_ids) == (133, tuple(it.token_ids("a")[:1]))


def test_a_timeout_ends_a_request_wherever_it_is_with_what_it_has():
    it = stand(max_num_seqs=1)
    way = SamplingParams(max_tokens=100, ignore_eos=True)
    it.submit(Request("running", prompt(5), way, timeout_s=10), now=0.0)
    it.submit(Request("waiting", prompt(5), way, timeout_s=9), now=0.0)
    it.submit(Request("later", prompt(5), way, timeout_s=11), now=0.0)
    it.step()
    assert it.scheduler.expire(8.9) == []
    it.hear(it.scheduler.expire(10.0))
    assert [it.end(name).reason for name in ("running", "waiting")] == [FinishReason.TIMEOUT] * 2
    assert it.token_ids("running") == plain_answer(prompt(5), 1).token_ids
    it.step()
    assert running(it) == {"later"}


def test_abort_frees_what_the_request_held_wherever_it_was():
    it = stand(max_num_seqs=2, num_pages=8)
    it.ask("prompt", prompt(300), max_tokens=3)
    it.ask("answer", prompt(3, seed=1), max_tokens=99, ignore_eos=True)
    it.ask("queue", prompt(3, seed=2), max_tokens=3)
    it.step()
    assert it.sequences["prompt"].is_prefilling
    for name in ("queue", "prompt", "answer", "nobody"):
        it.hear(it.scheduler.abort(name))
        it.scheduler.check()
    assert [it.end(name).reason for name in ("queue", "prompt", "answer")] == [FinishReason.ABORT] * 3
    assert it.scheduler.is_idle
    it.scheduler.clear_cache()
    assert it.scheduler.stats().num_free_pages == 8


def test_a_failing_prompt_ends_its_request_alone_and_what_it_reserved_is_free_again():
    it = stand()
    it.ask("bad", (*prompt(100), FAILING), max_tokens=2)
    it.ask("good", prompt(100, seed=1), max_tokens=2, ignore_eos=True)
    it.drain()
    assert "could not compute this request: a scripted failure." in it.events["bad"][-1].message
    assert it.token_ids("good") == plain_answer(prompt(100, seed=1), 2).token_ids
    assert it.scheduler.stats().totals.num_failed == 1
    assert it.scheduler.stats().prefix.num_checkpoints == 1


def test_a_first_mask_that_fails_leaves_no_checkpoint_reserved():
    it = stand(num_checkpoints=1)
    sequence = it.ask("bad", prompt(200), max_tokens=2)

    def fail(_drafts):
        raise UnsupportedError("The grammar is too large.")

    sequence.logits_rules.adjust = fail
    it.drain()
    assert it.events["bad"] == [Failed("bad", "The grammar is too large.", is_refusal=True)]
    assert not it.scheduler._prefix.reserved
    it.ask("good", prompt(200), max_tokens=2)
    it.drain()
    assert it.scheduler.stats().prefix.num_checkpoints == 1


def test_a_reservation_that_nobody_owns_is_noticed():
    it = stand()
    it.scheduler._prefix.reserve()
    with pytest.raises(RuntimeError, match="are reserved"):
        it.scheduler.check()


def test_accounts_that_do_not_add_up_after_a_fault_end_the_engine():
    it = stand()
    sequence = it.ask("bad", prompt(10), max_tokens=9)

    def lose_a_page(_token_ids):
        it.scheduler._pool.take(1)
        raise KeyError("a fault")

    sequence.append = lose_a_page
    with pytest.raises(RuntimeError, match="counts 1 holders where 0"):
        it.step()


# The prefix cache, as requests meet it.


def test_what_a_prompt_left_in_the_cache_is_gone_when_its_end_cannot_be_computed():
    it = stand(max_num_batched_tokens=64, checkpoint_spacing=64)
    bad = (*prompt(200), FAILING)
    it.ask("bad", bad, max_tokens=2)
    while it.sequences["bad"].num_computed < 128:
        it.step()
    assert it.scheduler.stats().prefix.num_checkpoints == 2
    it.drain()
    assert isinstance(it.events["bad"][-1], Failed)
    stats = it.scheduler.stats()
    assert (stats.prefix.num_checkpoints, stats.num_free_pages) == (0, stats.num_pages)
    it.ask("good", prompt(200), max_tokens=2, ignore_eos=True)
    it.drain()
    assert it.end("good").counts.cached_tokens == 0
    assert it.token_ids("good") == plain_answer(prompt(200), 2).token_ids


def test_a_request_whose_answer_fails_leaves_its_prompt_in_the_cache():
    it = stand()
    sequence = it.ask("bad", prompt(200), max_tokens=9)
    it.step()

    def fail(_token_ids):
        raise FloatingPointError("a fault")

    sequence.append = fail
    it.drain()
    assert isinstance(it.events["bad"][-1], Failed)
    assert it.scheduler.stats().prefix.num_checkpoints == 1


def test_prefixes_whose_pages_running_requests_hold_outlive_those_that_nobody_holds():
    it = stand(num_pages=14, max_num_seqs=2, num_checkpoints=4)
    it.ask("old", prompt(200), max_tokens=1)
    it.drain()
    it.ask("unused", prompt(200, seed=1), max_tokens=1)
    it.drain()
    # The least recently used prefix is held by a request that runs on; its eviction would free nothing.
    it.ask("holder", (*prompt(192), 5), max_tokens=90, ignore_eos=True)
    it.step()
    it.scheduler._prefix._use(next(n for n in it.scheduler._prefix._owners.values() if n.tokens[0] != prompt(192)[128]))
    it.ask("large", prompt(450, seed=2), max_tokens=10, ignore_eos=True)
    it.step()
    assert running(it) == {"holder", "large"}
    assert it.scheduler._prefix.find((*prompt(192), 5)) is not None
    assert it.scheduler._prefix.find((*prompt(192, seed=1), 5)) is None
    it.drain()


def test_the_same_prompt_again_is_computed_from_its_last_grid_point():
    it = stand()
    for name in ("first", "again"):
        it.ask(name, prompt(200), max_tokens=3, ignore_eos=True)
        it.drain()
    assert [it.end(name).counts.cached_tokens for name in ("first", "again")] == [0, 192]
    assert it.token_ids("first") == it.token_ids("again")
    assert it.scheduler.stats().totals.prompt_tokens == 208


def test_a_prompt_that_ends_on_the_grid_still_computes_its_last_page():
    it = stand()
    for name in ("first", "again"):
        it.ask(name, prompt(128), max_tokens=1)
        it.drain()
    assert it.end("again").counts.cached_tokens == 0
    it.ask("longer", prompt(129), max_tokens=1)
    it.drain()
    assert it.end("longer").counts.cached_tokens == 128


@pytest.mark.parametrize("way", ["cache_prompt", "prompt_logprobs"])
def test_a_request_may_stay_out_of_the_cache(way):
    it = stand()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0 if way == "prompt_logprobs" else None)
    for name in ("first", "again"):
        it.submit(Request(name, prompt(200), sampling, cache_prompt=way != "cache_prompt"))
        it.drain()
    assert it.end("again").counts.cached_tokens == 0
    assert it.scheduler.stats().prefix.num_checkpoints == 0


def test_states_are_kept_before_the_second_message_before_the_last_and_at_the_end():
    opens = 40
    it = stand(boundary_token_ids=(opens,), max_num_batched_tokens=1024, checkpoint_spacing=4096)
    body = [token_id for token_id in prompt(2000) if token_id != opens]
    text = [opens, *body[:150], opens, *body[150:300], opens, *body[300:550], opens, *body[550:700]]
    it.ask("a", text, max_tokens=1)
    (piece,) = it.step().chunks
    starts = [place for place, token_id in enumerate(text) if token_id == opens]
    assert [save.num_tokens for save in piece.saves] == [
        starts[1] // 64 * 64,
        starts[3] // 64 * 64,
        len(text) // 64 * 64,
    ]


# When an answer ends.


def test_max_tokens_ends_an_answer_and_the_last_token_is_delivered():
    it = stand()
    it.ask("a", prompt(9), max_tokens=7, ignore_eos=True)
    it.drain()
    assert it.token_ids("a") == plain_answer(prompt(9), 7).token_ids
    assert (it.end("a").reason, it.end("a").counts.completion_tokens) == (FinishReason.LENGTH, 7)


@pytest.mark.parametrize("method", ["none", "mtp"])
def test_a_stop_token_ends_an_answer_is_counted_and_not_delivered(method):
    free = plain_answer(prompt(9), 40).token_ids
    stop = free[12]
    expected = free[: free.index(stop)]
    for sampling, config in (({"stop_token_ids": (stop,)}, {}), ({}, {"eos_token_ids": (stop,)})):
        it = stand(method, 0 if method == "none" else 4, draft_accuracy=1.0, **config)
        it.ask("a", prompt(9), max_tokens=40, **sampling)
        it.drain()
        assert it.token_ids("a") == expected
        assert (it.end("a").reason, it.end("a").counts.completion_tokens) == (FinishReason.STOP, len(expected) + 1)


def test_ignore_eos_leaves_the_request_its_own_stop_tokens():
    free = plain_answer(prompt(9), 40).token_ids
    eos, own = free[2], next(token_id for token_id in free[4:] if token_id not in free[:4])
    it = stand(eos_token_ids=(eos,))
    it.ask("a", prompt(9), max_tokens=40, ignore_eos=True, stop_token_ids=(own,))
    it.drain()
    assert it.token_ids("a") == free[: free.index(own)]


@pytest.mark.parametrize("method", ["none", "mtp", "ngram"])
def test_no_stop_token_is_drawn_before_min_tokens_are(method):
    stop = plain_answer(prompt(9), 40).token_ids[3]
    it = stand(method, 0 if method == "none" else 3)
    it.ask("a", prompt(9), max_tokens=60, min_tokens=20, stop_token_ids=(stop,))
    it.drain()
    expected = plain_answer(prompt(9), 60, {stop}, min_tokens=20)
    assert (it.token_ids("a"), it.end("a").reason) == (expected.token_ids, expected.reason)
    assert len(expected.token_ids) >= 20
    assert stop not in expected.token_ids


# Drafts.


@pytest.mark.parametrize("method", ["mtp", "ngram", "auto"])
def test_right_drafts_are_kept_and_save_steps(method):
    it = stand(method, 4, draft_accuracy=1.0)
    it.ask("a", prompt(9), max_tokens=300, ignore_eos=True)
    it.drain()
    counts = it.end("a").counts.drafts
    assert it.token_ids("a") == plain_answer(prompt(9), 300).token_ids
    assert counts.num_accepted > 0
    assert it.scheduler.stats().totals.num_steps == 300 - counts.num_accepted
    if method == "mtp":
        assert counts.num_accepted == counts.num_drafted


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_drafts_never_exceed_what_is_left(max_tokens):
    it = stand("mtp", 4, draft_accuracy=1.0)
    it.ask("a", prompt(9), max_tokens=max_tokens, ignore_eos=True)
    it.drain()
    drafted = [len(rows.token_ids) - 1 for plan in it.runner.plans for rows in plan.rows]
    assert drafted == ([max_tokens - 2] if max_tokens > 1 else [])
    assert len(it.token_ids("a")) == max_tokens


def test_synthetic_acceptance_gives_the_asked_rates_whatever_the_drafts_are_worth():
    rates = (0.8, 0.5, 0.3)
    it = stand("mtp", 3, rates, draft_accuracy=0.5, max_model_len=8000, num_pages=130)
    it.runner.scheduler = None  # its check of whole texts costs a pass over them at every step
    it.ask("a", prompt(9), seed=5, max_tokens=6000, ignore_eos=True)
    while it.scheduler.stats().totals.drafts.num_steps < 2000:
        it.step()
    counts = it.scheduler.stats().totals.drafts
    for accepted, rate in zip(counts.accepted_by_position, rates, strict=True):
        # 3.3 standard deviations of a binomial: one run in a thousand would be outside.
        assert abs(accepted - rate * counts.num_steps) < 3.3 * math.sqrt(counts.num_steps * rate * (1 - rate))


def test_logprobs_come_with_the_tokens_they_belong_to():
    it = stand("mtp", 3)
    it.ask("a", prompt(9), max_tokens=30, logprobs=0, ignore_eos=True)
    it.drain()
    told = [event for event in it.events["a"] if isinstance(event, Tokens)]
    assert any(len(event.token_ids) > 1 for event in told)
    assert all([logprob.token_id for logprob in event.logprobs] == list(event.token_ids) for event in told)


# The accounts notice what is lost.


def test_a_lost_slot_is_noticed():
    it = stand()
    it.scheduler._free_slots.pop()
    with pytest.raises(RuntimeError, match="Slots are lost"):
        it.scheduler.check()


def test_a_lost_page_is_noticed():
    it = stand()
    it.scheduler._pool.take(1)
    with pytest.raises(RuntimeError, match="Page 1 counts 1 holders where 0"):
        it.scheduler.check()
