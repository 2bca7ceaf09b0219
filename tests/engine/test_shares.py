"""Clients' shares of the slots, on the fake runner and without threads."""

import pytest

from onebox.engine.config import EngineConfig
from onebox.engine.request import ClientShare
from tests.engine.fake import Stand, plain_answer

HOG, GUEST = ClientShare("hog", 20, 1), ClientShare("guest", 20, 3)
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture
def it():
    """Four slots."""
    sizes = EngineConfig(max_num_seqs=4, max_model_len=1000, num_pages=60, num_checkpoints=8)
    return Stand(sizes)


def ask(it, client, count, *, name=None, **options):
    """So many requests, each with a prompt of its own."""
    for number in range(count):
        given = {"max_tokens": 40, "ignore_eos": True, **options}
        it.ask(f"{name or client.name} {number}", (*PROMPT, number), client=client, **given)


def num_running(it):
    names = [name.split()[0] for name in it.scheduler._running]
    return {name: names.count(name) for name in sorted(set(names))}


def test_a_client_alone_may_run_in_every_slot(it):
    ask(it, HOG, 6)
    it.step()
    assert num_running(it) == {"hog": 4}
    it.drain()
    assert it.scheduler.stats().totals.num_preempted == 0


def test_who_waits_within_its_share_gets_a_slot_at_once_and_no_answer_changes(it):
    ask(it, HOG, 6)
    it.step()
    for count, found in ((1, {"guest": 1, "hog": 3}), (4, {"guest": 3, "hog": 1})):
        ask(it, GUEST, count, name=f"guest {count}")
        it.step()
        assert num_running(it) == found
    assert it.scheduler.stats().totals.num_preempted == 3
    it.drain()
    for number in range(6):
        assert it.token_ids(f"hog {number}") == list(plain_answer((*PROMPT, number), 40).token_ids)
    # Then the hog ran beyond its share again, and nothing was preempted for that.
    assert it.scheduler.stats().totals.num_preempted == 3


def test_a_free_slot_goes_to_who_is_within_its_share_though_another_came_first(it):
    ask(it, HOG, 3, max_tokens=100)
    ask(it, GUEST, 1, name="short", max_tokens=2)
    it.step()
    ask(it, HOG, 3, name="later")
    ask(it, GUEST, 1)
    while "short 0" in it.scheduler._running:
        it.step()
    it.step()
    assert "guest 0" in it.scheduler._running
    assert not any(name.startswith("later") for name in it.scheduler._running)


def test_priorities_come_before_shares(it):
    ask(it, HOG, 4)
    it.step()
    ask(it, GUEST, 1, priority=1)
    it.step()
    assert num_running(it) == {"hog": 4}
    ask(it, GUEST, 1, name="guest urgent", priority=-1)
    it.step()
    assert num_running(it) == {"guest": 1, "hog": 3}


@pytest.mark.parametrize("client", [None, ClientShare("free", 20)])
def test_without_shares_nobody_is_preempted_for_another(it, client):
    for number in range(4):
        it.ask(f"first {number}", (*PROMPT, number), client=client, max_tokens=40, ignore_eos=True)
    it.step()
    ask(it, GUEST, 1)
    it.step()
    assert num_running(it) == {"first": 4}
