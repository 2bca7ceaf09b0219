"""Whatever the disk does at whatever moment: each answer is the plain one, and nothing is held for ever."""

import pytest

from onebox.engine.disk.traffic import MAX_LOADS
from onebox.engine.request import CacheTier, FinishReason, Request, SamplingParams
from tests.engine.disk.fake_disk import FakeDisk
from tests.engine.fake import FAILING, Stand, plain_answer
from tests.engine.test_walk import Walk, config


class DiskWalk(Walk):
    """A walk beside a disk that goes a step further between two steps."""

    def __init__(self, settings, seed=0, fault_rate=0.0, failure_rate=0.1):
        super().__init__(settings, seed, fault_rate, open_disk=lambda runner: FakeDisk(runner, seed, failure_rate))
        self.disk = self.stand.scheduler._disk._disk

    def step(self):
        self.disk.turn()
        self.stand.scheduler.check()
        if self.random.random() < 0.02:
            self.stand.scheduler._prefix.clear()  # as if others had needed the memory
        super().step()

    def end(self):
        self.drain()
        self.check_answers()
        self.check_accounts()
        self.disk.settle()
        self.stand.scheduler.tend_disk()
        self.disk.settle()
        self.stand.scheduler._disk.stop_writing()
        self.disk.settle()
        self.stand.scheduler.tend_disk()
        self.stand.scheduler._disk.stop_writing()
        self.disk.settle()
        self.stand.scheduler._disk.release_written()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("method", "max_drafts"), [("none", 0), ("auto", 3)])
def test_every_answer_is_the_plain_one_whatever_the_disk_does(method, max_drafts, seed):
    walk = DiskWalk(config(method, max_drafts), seed)
    walk.wander(500)
    walk.end()
    disk, stats = walk.disk, walk.stand.scheduler.stats()
    # The walk went where it is dangerous.
    assert min(disk.num_loads, disk.num_failed, disk.num_written, disk.num_refused) > 3
    assert stats.totals.num_preempted > 3
    assert stats.disk.num_hits > 3
    assert all(stats.totals.finished[reason] > 0 for reason in FinishReason)
    walk.check_nothing_is_held()


@pytest.mark.parametrize(
    "limits",
    [
        {"num_pages": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        {"num_checkpoints": 1, "checkpoint_spacing": 64},
        {"num_pages": 60, "num_checkpoints": 40, "max_num_batched_tokens": 2048, "checkpoint_spacing": 64},
        {"max_num_seqs": 1},
    ],
    ids=["hardly any pages", "one checkpoint", "room for all", "one slot"],
)
def test_every_answer_is_the_plain_one_whatever_the_limits_are(limits):
    walk = DiskWalk(config("mtp", 2, **limits), seed=7)
    walk.wander(400)
    walk.end()
    walk.check_nothing_is_held()


def test_whatever_fails_in_one_sequence_beside_a_disk_ends_that_one():
    walk = DiskWalk(config("auto", 3), seed=5, fault_rate=0.3)
    walk.wander(400)
    walk.end()
    assert walk.stand.scheduler.stats().totals.num_failed > 5


# One thing at a time.


class DiskStand(Stand):
    def __init__(self, failure_rate=0.0, **limits):
        super().__init__(config(**({"num_pages": 40, "num_checkpoints": 8} | limits)), open_disk=self.open)
        self.disk._failure_rate = failure_rate

    def open(self, runner):
        self.disk = FakeDisk(runner)
        return self.disk

    def drain(self, limit=5000):
        """The disk ends what it is at before every step."""
        for _ in range(limit):
            if self.scheduler.is_idle:
                return
            self.disk.settle()
            self.step()
        raise AssertionError("requests are left that no step moves")

    def rest(self):
        """Until the disk has nothing more to do."""
        while self.scheduler.tend_disk() or self.scheduler._disk.is_busy:
            self.disk.settle()

    def write_all(self):
        """Until all that memory holds is on disk, and then forgets it in memory."""
        self.rest()
        self.scheduler._prefix.clear()
        self.scheduler.check()

    def warm(self, prompt):
        self.ask("before", prompt, max_tokens=1)
        self.drain()
        self.write_all()


PROMPT = tuple(range(40)) * 6


def test_a_prompt_whose_prefix_is_on_disk_is_computed_from_there():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("again", PROMPT, max_tokens=5, ignore_eos=True)
    plan = it.step()
    assert plan.is_empty
    assert it.scheduler.stats().num_waiting == 1
    it.disk.settle()
    plan = it.step()
    assert [chunk.start for chunk in plan.chunks] == [192]
    it.drain()
    assert it.token_ids("again") == plain_answer(PROMPT, 5).token_ids
    counts = it.end("again").counts
    assert (counts.cached_tokens, counts.cached_tier) == (192, CacheTier.DISK)
    it.ask("third", PROMPT, max_tokens=1)
    it.drain()
    assert it.end("third").counts.cached_tier is CacheTier.MEMORY
    stats = it.scheduler.stats().disk
    assert (stats.num_hits, stats.hit_tokens) == (1, 192)
    assert stats.saved_s == pytest.approx(1.92)


def test_others_run_and_are_admitted_while_a_prefix_is_read():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("running", (1, 2, 3), max_tokens=30, ignore_eos=True)
    it.step()
    it.ask("loading", PROMPT, max_tokens=1)
    it.ask("behind", (4, 5, 6), max_tokens=3, ignore_eos=True)
    for _ in range(4):
        plan = it.step()
        assert "running" in {rows.request_id for rows in plan.rows}
    assert it.token_ids("behind") == plain_answer((4, 5, 6), 3).token_ids
    assert not it.events["loading"]
    it.disk.settle()
    it.drain()
    assert it.end("loading").counts.cached_tokens == 192


def test_two_that_need_one_prefix_read_it_once():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("one", PROMPT, max_tokens=1)
    it.ask("two", (*PROMPT[:200], 9), max_tokens=1)
    it.step()
    assert len(it.scheduler._disk.reserved()) == 1
    it.disk.settle()
    it.drain()
    assert it.disk.num_loads == 1
    assert [it.end(name).counts.cached_tokens for name in ("one", "two")] == [192, 192]


def test_only_what_memory_does_not_have_is_read():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("half", (*PROMPT[:130], 7, 7), max_tokens=1)
    it.step()
    it.disk.settle()
    it.drain()
    it.ask("whole", PROMPT, max_tokens=1)
    it.step()
    (job,) = it.scheduler._disk._loads
    assert (job.first_page, len(job.pages), job.num_known) == (2, 3, 128)
    it.disk.settle()
    it.drain()
    assert it.end("whole").counts.cached_tokens == 192


def test_a_prefix_that_cannot_be_read_is_computed():
    it = DiskStand()
    it.warm(PROMPT)
    it.disk._failure_rate = 1.0
    sequence = it.ask("again", PROMPT, max_tokens=5, ignore_eos=True)
    it.step()
    it.disk.settle()
    assert [chunk.start for chunk in it.step().chunks] == [0]
    it.drain()
    assert sequence.num_loads == MAX_LOADS
    assert it.token_ids("again") == plain_answer(PROMPT, 5).token_ids
    assert (it.end("again").counts.cached_tokens, it.end("again").counts.cached_tier) == (0, None)


@pytest.mark.parametrize("end", ["abort", "expire", "fail", "preempt"])
def test_whoever_leaves_while_its_prefix_is_read_leaves_nothing(end):
    it = DiskStand(num_pages=5, max_num_seqs=1)
    it.warm(PROMPT)
    it.submit(Request("leaving", PROMPT, SamplingParams(max_tokens=1, ignore_eos=True), timeout_s=5))
    it.step()
    assert it.scheduler._disk.is_busy
    if end == "abort":
        it.hear(it.scheduler.abort("leaving"))
    elif end == "expire":
        it.hear(it.scheduler.expire(10.0))
    elif end == "fail":
        it.hear(it.scheduler.fail("leaving", ValueError("a fault")))
    else:
        it.ask("first", (1, 2, 3), priority=-1, max_tokens=1)
        it.step()
    it.scheduler.check()
    it.drain()
    it.rest()
    it.scheduler.clear_cache()
    assert it.scheduler.stats().num_free_pages == 5
    if end == "preempt":
        assert it.token_ids("leaving") == plain_answer(PROMPT, 1).token_ids


def test_a_load_that_takes_longer_than_computing_is_given_up():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("again", PROMPT, max_tokens=2, ignore_eos=True)
    it.step()
    assert not it.scheduler.expire(100.0)
    assert it.step().is_empty
    assert not it.scheduler.expire(103.0)
    assert it.step().is_empty
    # Computing its 192 tokens would have taken 1.92 s.
    assert not it.scheduler.expire(104.0)
    assert [chunk.start for chunk in it.step().chunks] == [0]
    it.drain()
    assert it.token_ids("again") == plain_answer(PROMPT, 2).token_ids
    it.rest()


def test_pages_that_are_only_being_written_are_there_for_who_needs_them():
    it = DiskStand(num_pages=5, num_checkpoints=4)
    it.ask("before", PROMPT, max_tokens=1)
    it.drain()
    assert it.scheduler.tend_disk()
    assert it.scheduler._disk.is_busy
    it.ask("next", tuple(range(30)) * 8, max_tokens=1)
    assert it.step().chunks
    it.drain()
    assert it.end("next").counts.cached_tokens == 0


def test_what_is_not_on_disk_yet_is_evicted_last():
    it = DiskStand(num_pages=40, num_checkpoints=2)
    it.ask("written", (1,) * 70, max_tokens=1)
    it.drain()
    it.rest()
    it.disk.is_writing = False
    it.ask("unwritten", (2,) * 70, max_tokens=1)
    it.drain()
    it.ask("written", (1,) * 70, max_tokens=1)  # used last
    it.drain()
    it.ask("third", (3,) * 70, max_tokens=1)
    it.drain()
    prefix = it.scheduler._prefix
    assert [prefix.find((token,) * 70) is not None for token in (1, 2, 3)] == [False, True, True]


def test_a_prompt_that_opted_out_is_neither_looked_up_nor_kept():
    it = DiskStand()
    it.warm(PROMPT)
    for name, cache_prompt, logprobs in (("out", False, None), ("logprobs", True, 0)):
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=logprobs)
        it.submit(Request(name, (*PROMPT, 1, 2, 3), sampling, cache_prompt=cache_prompt))
        assert [chunk.start for chunk in it.step().chunks] == [0]
        it.drain()
        assert not it.scheduler.tend_disk()


def test_a_prefix_that_is_not_finite_is_removed_from_disk_too():
    it = DiskStand()
    it.warm(PROMPT)
    keys = set(it.disk._entries)
    it.ask("other", tuple(range(30)) * 8, max_tokens=1)
    it.drain()
    it.write_all()
    it.ask("failing", (*PROMPT, FAILING), max_tokens=1)
    it.step()
    it.ask("beside", PROMPT, max_tokens=1)
    it.disk.settle()
    it.drain()
    assert it.disk.num_discarded == 1
    assert it.disk._entries
    assert not keys & set(it.disk._entries)


def test_a_load_of_a_prefix_that_turned_out_not_to_be_finite_is_dropped():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("loading", PROMPT, max_tokens=1)
    it.step()
    it.scheduler._disk.discard(it.sequences["loading"])
    assert it.scheduler._disk._loads[0].is_poisoned
    it.disk._loads[0].is_complete = True
    it.disk._over.append(it.disk._loads.pop())
    assert [chunk.start for chunk in it.step().chunks] == [0]


def test_clearing_the_cache_clears_the_disk_and_what_is_under_way():
    it = DiskStand()
    it.warm(PROMPT)
    it.ask("loading", PROMPT, max_tokens=1)
    it.step()
    it.scheduler.clear_cache()
    it.disk.settle()
    assert [chunk.start for chunk in it.step().chunks] == [0]
    it.drain()
    assert it.disk.num_loads == 0


def test_a_state_that_the_step_restores_is_not_overwritten_by_a_load_of_the_same_step():
    it = DiskStand(num_checkpoints=1)
    it.warm(PROMPT)
    it.ask("kept", (5,) * 130, max_tokens=1)
    it.drain()
    it.rest()
    it.ask("restoring", (*(5,) * 128, 1, 2), max_tokens=4, ignore_eos=True)
    it.ask("loading", PROMPT, max_tokens=1)
    plan = it.scheduler.plan()
    ((restored, _),) = plan.restored
    assert it.scheduler._disk.reserved() == [restored]
    it.disk.turn()
    it.disk.turn()
    it.hear(it.scheduler.commit(plan, it.runner.run(plan)))
    it.disk.settle()
    it.drain()
    assert it.token_ids("restoring") == plain_answer((*(5,) * 128, 1, 2), 4).token_ids


def test_a_prefix_from_disk_is_pinned_for_a_request_that_pins():
    it = DiskStand()
    it.warm(PROMPT)
    it.submit(Request("pinning", PROMPT, SamplingParams(max_tokens=1), pin_prompt=True))
    it.step()
    it.disk.settle()
    it.drain()
    assert it.scheduler.stats().prefix.num_pinned == 1
