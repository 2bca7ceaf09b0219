"""Who comes next, who has to go and who waits, on the fake runner and without threads."""

from onebox.engine.choice import MAX_OVERTAKEN
from onebox.engine.request import ClientShare, Finished, Started
from onebox.engine.turns import QueueTurns
from tests.engine.fake import plain_answer
from tests.engine.small import prompt, running, stand


def test_the_first_to_come_goes_first_among_equals():
    it = stand(max_num_seqs=1)
    for name in "abc":
        it.ask(name, prompt(5), max_tokens=3, ignore_eos=True)
    order = []
    it.scheduler.commit, commit = lambda *step: order.extend(found := commit(*step)) or found, it.scheduler.commit
    it.drain()
    assert [event.request_id for event in order if isinstance(event, Started)] == ["a", "b", "c"]


def test_the_shorter_of_one_clients_requests_goes_first_and_another_clients_not_before_its_turn():
    it = stand(max_num_seqs=1, num_pages=40, max_model_len=2000)
    order = []
    it.scheduler.commit, commit = lambda *step: order.extend(found := commit(*step)) or found, it.scheduler.commit
    shares = {name: ClientShare(name, 10) for name in "ab"}
    it.ask("running", prompt(5), client=shares["a"], max_tokens=3, ignore_eos=True)
    it.step()
    it.ask("a long", prompt(900, seed=1), client=shares["a"], max_tokens=2)
    it.ask("a short", prompt(9, seed=2), client=shares["a"], max_tokens=2)
    it.ask("a urgent", prompt(900, seed=3), client=shares["a"], max_tokens=2, priority=-1)
    it.ask("b short", prompt(5, seed=4), client=shares["b"], max_tokens=2)
    it.drain()
    started = [event.request_id for event in order if isinstance(event, Started)]
    assert started == ["running", "a urgent", "b short", "a short", "a long"]


def test_clients_take_turns_and_nobody_waits_for_all_that_another_has_queued():
    it = stand(max_num_seqs=1)
    order = []
    it.scheduler.commit, commit = lambda *step: order.extend(found := commit(*step)) or found, it.scheduler.commit
    shares = {name: ClientShare(name, 10) for name in "ab"}
    for number in range(4):
        it.ask(f"a{number}", prompt(5), client=shares["a"], max_tokens=3, ignore_eos=True)
    it.step()
    for number in range(2):
        it.ask(f"b{number}", prompt(5), client=shares["b"], max_tokens=3, ignore_eos=True)
    it.drain()
    started = [event.request_id for event in order if isinstance(event, Started)]
    assert started == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_clients_that_come_and_go_are_forgotten_and_those_that_wait_keep_their_turns():
    turns, waiting = QueueTurns(), ClientShare("waiting", 10)
    last = [turns.give(waiting) for _ in range(5000)][-1]
    for number in range(4000):
        turns.serve(turns.give(ClientShare(f"address {number}", 10)))
    assert len(turns._last) < 2000
    assert turns.give(waiting) == last + 1


def test_a_client_that_comes_again_and_again_does_not_keep_another_waiting():
    turns, busy, rare = QueueTurns(), ClientShare("busy", 10), ClientShare("rare", 10)
    waiting = [turns.give(busy) for _ in range(5)]
    for turn in waiting:
        asked = turns.give(rare)
        turns.serve(asked)
        assert asked <= turn + 1
        turns.serve(turn)


def test_the_lower_priority_number_goes_first_whenever_it_came():
    it = stand(max_num_seqs=1)
    it.ask("late", prompt(5), priority=2, max_tokens=2)
    it.ask("soon", prompt(5), priority=1, max_tokens=2)
    it.step()
    assert running(it) == {"soon"}


def test_a_running_request_gives_its_slot_to_a_better_priority_and_goes_on_later_with_the_same_tokens():
    it = stand("mtp", 2, max_num_seqs=2)
    it.ask("first", prompt(70), priority=5, max_tokens=60, ignore_eos=True)
    it.ask("second", prompt(90, seed=1), priority=5, max_tokens=60, ignore_eos=True)
    for _ in range(8):
        it.step()
    before = it.token_ids("second")
    it.ask("urgent", prompt(30, seed=2), priority=0, max_tokens=10, ignore_eos=True)
    it.step()
    assert running(it) == {"first", "urgent"}, "the last one to come has to go"
    it.drain()
    assert it.scheduler.stats().totals.num_preempted == 1
    assert len(before) > 8
    for name, sequence in it.sequences.items():
        assert it.token_ids(name) == plain_answer(sequence.request.prompt, sequence.max_tokens).token_ids
    assert sum(isinstance(event, Started) for event in it.events["second"]) == 1


def test_equals_never_send_each_other_out():
    it = stand(max_num_seqs=1)
    it.ask("running", prompt(5), max_tokens=20, ignore_eos=True)
    it.step()
    it.ask("waiting", prompt(5), max_tokens=20, ignore_eos=True)
    it.drain()
    assert it.scheduler.stats().totals.num_preempted == 0


def test_nobody_is_preempted_where_that_makes_no_room():
    it = stand(num_pages=12, max_num_seqs=4, num_checkpoints=0)
    it.ask("best", prompt(450), priority=0, max_tokens=60, ignore_eos=True)
    it.ask("lesser", prompt(100, seed=1), priority=2, max_tokens=60, ignore_eos=True)
    it.step()
    assert running(it) == {"best", "lesser"}
    it.ask("too large for now", prompt(450, seed=2), priority=1, max_tokens=60, ignore_eos=True)
    while not isinstance(it.events["lesser"][-1], Finished):
        it.step()
        assert "too large for now" not in running(it)
    it.drain()
    assert it.scheduler.stats().totals.num_preempted == 0


def test_pages_that_others_share_do_not_count_as_room():
    it = stand(num_pages=16, max_num_seqs=4, num_checkpoints=4)
    shared = prompt(640)
    it.ask("first", shared, priority=0, max_tokens=100, ignore_eos=True)
    while not it.token_ids("first"):
        it.step()
    it.ask("lesser", (*shared, 1), priority=5, max_tokens=20, ignore_eos=True)
    it.step()
    assert it.sequences["lesser"].num_cached == 640, "it should share the first one's pages"
    it.ask("urgent", prompt(400, seed=3), priority=1, max_tokens=20, ignore_eos=True)
    it.step()
    assert running(it) == {"first", "lesser"}, "the lesser one holds one page of its own; ten more are the first one's"
    it.drain()
    assert it.scheduler.stats().totals.num_preempted == 0


def test_only_those_whose_pages_make_room_are_preempted():
    it = stand(num_pages=14, max_num_seqs=4, num_checkpoints=0)
    it.ask("wide", prompt(500), priority=5, max_tokens=10, ignore_eos=True)
    it.ask("narrow", prompt(20, seed=1), priority=6, max_tokens=10, ignore_eos=True)
    it.step()
    it.ask("urgent", prompt(600, seed=2), priority=0, max_tokens=10, ignore_eos=True)
    it.step()
    assert running(it) == {"narrow", "urgent"}, "the narrow one's page is not needed"
    it.drain()
    for name, sequence in it.sequences.items():
        assert it.token_ids(name) == plain_answer(sequence.request.prompt, 10).token_ids


def test_out_of_pages_the_last_in_order_is_preempted_and_every_answer_is_still_the_plain_one():
    it = stand("ngram", 3, num_pages=9, max_num_seqs=4, num_checkpoints=2)
    for i in range(4):
        it.ask(f"{i}", prompt(50 + i, seed=i), max_tokens=180, ignore_eos=True)
    left = []
    while not it.scheduler.is_idle:
        before = running(it)
        it.step()
        left += [name for name in before - running(it) if not isinstance(it.events[name][-1], Finished)]
    assert it.scheduler.stats().totals.num_preempted > 0
    assert left[0] == "3"
    for name, sequence in it.sequences.items():
        assert it.token_ids(name) == plain_answer(sequence.request.prompt, 180).token_ids


def test_a_preempted_request_goes_on_before_those_that_came_after_it():
    it = stand(num_pages=5, max_num_seqs=2, num_checkpoints=0)
    it.ask("first", prompt(60), max_tokens=200, ignore_eos=True)
    it.ask("second", prompt(60, seed=1), max_tokens=130, ignore_eos=True)
    it.ask("third", prompt(60, seed=2), max_tokens=2, ignore_eos=True)
    while "second" in running(it) or not it.token_ids("second"):
        it.step()
    assert running(it) == {"first"}, "the pages suffice for one"
    while not running(it) & {"second", "third"}:
        it.step()
    assert "second" in running(it)


def test_nobody_overtakes_one_who_has_waited_for_enough_others_though_there_is_room_for_them():
    it = stand(num_pages=10, max_num_seqs=4)
    it.ask("large", prompt(400), max_tokens=60, ignore_eos=True)
    it.step()
    it.ask("too large for now", prompt(500, seed=1), max_tokens=2)
    it.ask("shorter", prompt(10, seed=2), max_tokens=2)
    it.step()
    assert running(it) == {"large", "shorter"}
    it.sequences["too large for now"].num_overtaken = MAX_OVERTAKEN
    while "shorter" in running(it):
        it.step()
    it.ask("would fit", prompt(10, seed=2), max_tokens=2)
    while "large" in running(it):
        assert running(it) == {"large"}
        it.step()
    it.step()
    assert "too large for now" in running(it)
    it.drain()


def test_a_request_that_waits_for_pages_leaves_the_prefix_cache_alone():
    it = stand(num_pages=20, max_num_seqs=4)
    it.ask("cached", prompt(130, seed=1), max_tokens=1)
    it.drain()
    cached = it.scheduler.stats().prefix.num_checkpoints
    it.ask("large", prompt(640), max_tokens=300, ignore_eos=True)
    it.step()
    it.ask("too large for now", prompt(640, seed=2), max_tokens=2)
    for _ in range(5):
        it.step()
    assert it.scheduler.stats().prefix.num_checkpoints >= cached > 0
    assert it.scheduler.stats().num_waiting == 1


def test_a_request_that_waits_for_pages_is_looked_at_again_when_some_came_back(monkeypatch):
    it = stand(num_pages=20, max_num_seqs=4)
    it.ask("short", prompt(64, seed=1), max_tokens=10, ignore_eos=True)
    it.ask("large", prompt(640), max_tokens=30, ignore_eos=True)
    it.step()
    looks, find = [], it.scheduler._prefix.find
    monkeypatch.setattr(it.scheduler._prefix, "find", lambda prompt: looks.append(prompt) or find(prompt))
    it.ask("too large for now", prompt(640, seed=2), max_tokens=2)
    while "too large for now" not in running(it):
        it.step()
    assert running(it) == {"too large for now"}, "it came in before there was room, or late"
    # In its first step, when the large prompt entered the cache, and when the others ended.
    assert len(looks) <= 5
    it.drain()
