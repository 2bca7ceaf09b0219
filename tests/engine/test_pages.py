"""Pages are held by whoever says so, and free when nobody does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.pages import SCRATCH_PAGE, PagePool


def test_the_lowest_free_pages_are_taken_first_and_never_the_scratch_page():
    pool = PagePool(5)
    assert pool.take(3) == [1, 2, 3]
    assert pool.take(2) == [4, 5]
    assert SCRATCH_PAGE not in range(1, 6)


def test_a_page_is_free_after_its_last_holder():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share(page)
    pool.give_back(page)
    assert (pool.num_free, pool.num_holders(page)) == (2, 1)
    pool.give_back(page)
    assert (pool.num_free, pool.num_holders(page)) == (3, 0)


def test_mistakes_are_errors_and_change_nothing():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(RuntimeError, match="2 pages were taken where 1 are free"):
        pool.take(2)
    with pytest.raises(RuntimeError, match="Page 2 is free"):
        pool.share(2)
    with pytest.raises(RuntimeError, match="Page 2 was given back twice"):
        pool.give_back(2)
    pool.check({1: 1})


def test_wrong_accounts_are_noticed():
    pool = PagePool(3)
    pool.take(2)
    pool.check({1: 1, 2: 1})
    for wrong in ({1: 1}, {1: 2, 2: 1}, {1: 1, 2: 1, 3: 1}):
        with pytest.raises(RuntimeError, match="holders where"):
            pool.check(wrong)
    pool._free.append(1)
    with pytest.raises(RuntimeError, match="list of free pages"):
        pool.check({1: 1, 2: 1})


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give back"]), st.integers(0, 9)), max_size=60))
def test_any_order_of_taking_sharing_and_giving_back_keeps_the_count(actions):
    pool, held = PagePool(6), {}
    for action, number in actions:
        pages = sorted(held)
        if action == "take" and number <= pool.num_free:
            taken = pool.take(number)
            assert not held.keys() & set(taken)
            held |= dict.fromkeys(taken, 1)
        elif pages and action != "take":
            page = pages[number % len(pages)]
            held[page] += 1 if action == "share" else -1
            (pool.share if action == "share" else pool.give_back)(page)
            held = {page: count for page, count in held.items() if count}
        pool.check(held)
        assert pool.num_free == 6 - len(held)
