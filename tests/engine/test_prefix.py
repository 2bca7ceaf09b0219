"""The prefix cache finds the longest prefix that can be taken up again, and drops what was used longest ago."""

import random
from collections import Counter

import pytest

from onebox.engine.config import EngineConfig
from onebox.engine.pages import PagePool
from onebox.engine.prefix import PrefixCache
from onebox.engine.sequence import checkpoint_positions
from onebox.spec.kv import PAGE_TOKENS


def text(*page_ids, tail=1):
    """A prompt of whole pages, each of one repeated token, and `tail` tokens more."""
    return tuple(page for page in page_ids for _ in range(PAGE_TOKENS)) + (0,) * tail


class Cached:
    """A cache in which requests leave prefixes, as the scheduler does it."""

    def __init__(self, num_pages=20, num_checkpoints=4):
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, num_checkpoints)

    def leave(self, *page_ids, is_pinned=False):
        """A request computes these pages, keeps the state at their end, and goes."""
        number = self.cache.reserve()
        if number is None:
            return None
        pages = self.pool.take(len(page_ids))
        self.cache.insert(text(*page_ids, tail=0), pages, number, is_pinned=is_pinned)
        for page in pages:
            self.pool.give_back(page)
        self.check()
        return number

    def found(self, *page_ids, tail=1):
        hit = self.cache.find(text(*page_ids, tail=tail))
        return hit.num_tokens // PAGE_TOKENS if hit else 0

    def use(self, *page_ids):
        prompt = text(*page_ids)
        self.cache.touch(prompt, self.cache.find(prompt))

    def check(self):
        self.cache.check()
        holders = list(self.cache.holders())
        self.pool.check({page: holders.count(page) for page in holders})


def test_the_deepest_state_on_the_way_is_found_with_its_pages():
    it = Cached()
    number = it.leave(1, 2)
    deeper = it.leave(1, 2, 3, 4)
    hit = it.cache.find(text(1, 2, 3, 4, 5))
    assert (hit.num_tokens, hit.checkpoint) == (4 * PAGE_TOKENS, deeper)
    assert len(set(hit.pages)) == 4
    shallow = it.cache.find(text(1, 2, 3, 9))
    assert (shallow.num_tokens, shallow.checkpoint, shallow.pages) == (2 * PAGE_TOKENS, number, hit.pages[:2])


def test_pages_without_a_state_at_their_end_are_not_found():
    it = Cached()
    it.leave(1, 2, 3)
    assert it.found(1, 2, 9) == 0
    assert it.found(9, 2, 3) == 0
    assert it.found(1, 2, 3) == 3


def test_at_least_one_token_is_left_to_compute():
    it = Cached()
    it.leave(1)
    it.leave(1, 2)
    assert it.found(1, 2, tail=0) == 1
    assert it.found(1, 2, tail=1) == 2
    assert it.found(1, tail=0) == 0


def test_peeking_finds_the_same_and_changes_nothing():
    it = Cached(num_checkpoints=2)
    it.leave(1, 2)
    it.leave(3)
    before = it.cache.stats
    for prompt in (text(1, 2), text(1, 2, tail=0), text(1, 9), text(3, 4), text(tail=0), text(tail=5)):
        hit = it.cache.find(prompt)
        assert it.cache.peek(prompt) == (hit.num_tokens if hit else 0)
    it.cache.peek(text(1, 2))
    assert it.cache.stats == before
    it.leave(5)
    assert (it.found(1, 2), it.found(3)) == (0, 1), "peeking counted as a use"


def test_a_shared_beginning_is_kept_once():
    it = Cached()
    it.leave(1, 2, 3)
    it.leave(1, 2, 4)
    assert it.cache.stats.num_pages == 4
    assert it.pool.num_free == 16


def test_the_same_prefix_computed_twice_is_kept_once():
    it = Cached()
    first, second = it.cache.reserve(), it.cache.reserve()
    for number in (first, second):
        it.cache.insert(text(1, tail=0), it.pool.take(1), number, is_pinned=False)
    assert it.cache.find(text(1)).checkpoint == first
    assert (it.cache.stats.num_checkpoints, it.cache.stats.saved) == (1, 1)
    assert it.cache.reserve() == second
    assert it.pool.num_holders(2) == 1, "the second one's page is its own alone"


def test_the_least_recently_used_state_gives_its_number():
    it = Cached(num_checkpoints=3)
    numbers = {page: it.leave(page) for page in (1, 2, 3)}
    it.use(1)
    assert it.leave(4) == numbers[2]
    assert [it.found(page) for page in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert it.cache.stats.evicted == 1


def test_pinned_states_go_last():
    it = Cached(num_checkpoints=2)
    it.leave(1, is_pinned=True)
    it.leave(2)
    it.leave(3)
    assert [it.found(page) for page in (1, 2, 3)] == [1, 0, 1]
    assert it.cache.stats.num_pinned == 1
    it.cache.clear()
    assert (it.cache.stats.num_pinned, it.pool.num_free) == (0, 20)


def test_an_evicted_state_frees_the_pages_that_then_lead_nowhere():
    it = Cached()
    it.leave(1, 2)
    it.leave(1, 2, 3, 4)
    it.use(1, 2)
    assert it.cache.free_pages(18)
    assert (it.found(1, 2, 3, 4), it.pool.num_free) == (2, 18)
    assert it.cache.free_pages(20)
    assert it.found(1, 2) == 0
    it.check()


def test_pages_on_the_way_to_a_deeper_state_stay():
    it = Cached()
    it.leave(1)
    it.leave(1, 2)
    it.cache.reserve(), it.cache.reserve(), it.cache.reserve()
    assert it.found(1, 2) == 2
    assert it.found(1, 9) == 0, "its state is gone"
    assert it.pool.num_free == 18


def test_nothing_is_evicted_where_it_would_not_be_enough():
    it = Cached(num_pages=6)
    it.leave(1, 2)
    held = it.pool.take(2)
    assert not it.cache.free_pages(5)
    assert it.found(1, 2) == 2
    assert it.cache.free_pages(4)
    assert it.found(1, 2) == 0
    assert len(held) == 2


def hold(it, *page_ids):
    """A sequence that runs on this prefix; returns its pages."""
    pages = it.cache.find(text(*page_ids)).pages
    for page in pages:
        it.pool.share(page)
    return pages


def test_a_prefix_that_is_held_is_not_evicted_for_pages_though_it_is_the_oldest():
    it = Cached(num_pages=6)
    it.leave(1, 2)
    it.leave(3, 4)
    hold(it, 1, 2)
    assert it.cache.free_pages(3)
    assert (it.found(1, 2), it.found(3, 4)) == (2, 0)
    assert not it.cache.free_pages(5)
    assert it.found(1, 2) == 2


def test_a_held_prefix_gives_way_to_a_state_that_is_needed():
    it = Cached(num_checkpoints=1)
    it.leave(1)
    pages = hold(it, 1)
    assert it.cache.reserve() == 0
    assert it.found(1) == 0
    assert [it.pool.num_readers(page) for page in pages] == [1]


def test_an_older_state_on_the_way_stays_where_its_eviction_frees_nothing():
    it = Cached(num_pages=5)
    it.leave(1, 2)
    it.leave(1, 2, 3)
    it.leave(4)
    assert it.cache.free_pages(2)
    assert [it.found(1, 2), it.found(4)] == [2, 1], "the leaf frees a page, the state before it does not"


def test_what_is_not_finite_is_discarded_with_all_that_leads_to_it_and_nothing_else():
    it = Cached()
    it.leave(1)
    it.leave(1, 2, 3)
    it.leave(1, 5)
    it.cache.discard(text(1, 2, 3, 4))
    assert [it.found(1, 2, 3), it.found(1), it.found(1, 5)] == [0, 0, 2]
    it.check()
    it.cache.discard(text(9))


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_freed_exactly_where_that_is_possible(seed):
    numbers = random.Random(seed)
    it = Cached(num_pages=24, num_checkpoints=8)
    held = []
    for _ in range(60):
        path = tuple(numbers.randrange(3) for _ in range(numbers.randrange(1, 5)))
        match numbers.randrange(4):
            case 0 if it.pool.num_free >= len(path):
                number = it.cache.reserve()
                pages = it.pool.take(len(path))
                it.cache.insert(text(*path, tail=0), pages, number, is_pinned=numbers.random() < 0.2)
                held.append(tuple(pages))  # computed twice, a page may be its sequence's alone
            case 1 if it.cache.find(text(*path)):
                held.append(hold(it, *path))
            case 2 if held:
                for page in held.pop(numbers.randrange(len(held))):
                    it.pool.give_back(page)
            case 3:
                count = numbers.randrange(24)
                is_possible = it.pool.num_free + it.pool.num_cached_only >= count
                before = it.cache.stats.evicted
                assert it.cache.free_pages(count) == is_possible
                assert it.pool.num_free >= count or not is_possible
                assert is_possible or it.cache.stats.evicted == before
        it.cache.check()
        it.pool.check(Counter([*it.cache.holders(), *(page for pages in held for page in pages)]))


def test_a_page_that_a_sequence_reads_outlives_its_eviction():
    it = Cached()
    it.leave(1, 2)
    hit = it.cache.find(text(1, 2))
    for page in hit.pages:
        it.pool.share(page)
    it.cache.clear()
    assert [it.pool.num_holders(page) for page in hit.pages] == [1, 1]
    it.cache.touch(text(1, 2), hit)
    assert it.cache.stats.hit_tokens == 2 * PAGE_TOKENS


def test_reserved_numbers_are_nobodys_until_they_are_used_or_given_back():
    it = Cached(num_checkpoints=2)
    first, second = it.cache.reserve(), it.cache.reserve()
    assert {first, second} == {0, 1}
    assert it.cache.reserve() is None
    it.cache.cancel(first)
    assert it.cache.reserve() == first


def test_without_checkpoints_nothing_is_kept():
    it = Cached(num_checkpoints=0)
    assert it.leave(1) is None
    assert it.found(1) == 0


def test_stats_count_tokens_asked_for_and_found():
    it = Cached()
    it.leave(1, 2)
    it.use(1, 2)
    it.use(3)
    stats = it.cache.stats
    assert (stats.queried_tokens, stats.hit_tokens, stats.saved) == (2 * 64 + 1 + 64 + 1, 2 * 64, 1)


def test_broken_trees_are_noticed():
    it = Cached()
    it.leave(1, 2)
    node = next(node for node in it.cache._nodes() if not node.children)
    node.checkpoint, number = None, node.checkpoint
    with pytest.raises(RuntimeError, match="leads to no checkpoint"):
        it.cache.check()
    del it.cache._owners[number]
    with pytest.raises(RuntimeError, match="lost or held twice"):
        it.cache.check()


# Where states are kept.


def limits(**changes):
    return EngineConfig(max_model_len=9000, num_pages=200, **({"num_checkpoints": 4} | changes))


@pytest.mark.parametrize(
    ("opens", "length", "positions"),
    [
        ((), 63, ()),
        ((), 64, (64,)),
        ((), 200, (192,)),
        ((0, 130), 200, (128, 192)),
        ((0, 130, 300, 500), 700, (128, 448, 640)),
        ((0, 10, 20), 100, (64,)),
        ((), 9000, (4096, 8192, 8448, 8960)),
        # One document and its question: another question finds what is before the earlier cut.
        ((0, 2000), 2047, (1984,)),
        ((0, 2040), 2048, (1472, 1984, 2048)),
        ((0, 130, 3000), 3010, (128, 2432, 2944, 3008)),
    ],
)
def test_states_are_kept_where_prompts_part(opens, length, positions):
    prompt = tuple(1 if place in opens else 0 for place in range(length))
    assert checkpoint_positions(prompt, limits(boundary_token_ids=(1,)), 0) == positions


def test_states_that_are_there_already_are_not_asked_for_again():
    prompt = (0,) * 9000
    assert checkpoint_positions(prompt, limits(), 4096) == (8192, 8448, 8960)
    assert checkpoint_positions(prompt, limits(num_checkpoints=0), 0) == ()
