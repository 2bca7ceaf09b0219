"""The index of stored answers does what a dictionary in the order of adding does, without an object for each."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from onebox.server.response_index import ResponseIndex, StoredEntry, is_response_id

IDS = [f"resp_{number:032x}" for number in (0, 1, 1 << 64, (1 << 128) - 1, 5 << 100)]
ENTRIES = st.builds(
    StoredEntry, st.sampled_from(["", "a key", "another"]), st.integers(0, 1 << 40), st.floats(0, 2e9, width=64)
)


@given(st.lists(st.tuples(st.sampled_from(IDS), st.one_of(st.none(), ENTRIES)), max_size=30))
def test_entries_are_found_and_leave_in_the_order_they_came(steps):
    index, expected = ResponseIndex(), {}
    for response_id, entry in steps:
        if entry is None or response_id in expected:
            assert index.remove(response_id) == expected.pop(response_id, None)
        if entry is not None:
            index.add(response_id, entry)
            expected[response_id] = entry
        assert len(index) == len(expected)
        assert {each: index.get(each) for each in IDS} == {each: expected.get(each) for each in IDS}
        assert index.oldest() == next(iter(expected.items()), None)


def test_more_entries_than_rows_make_room():
    index = ResponseIndex()
    for number in range(300):
        index.add(f"resp_{number:032x}", StoredEntry("me", number, float(number)))
    assert [index.get(f"resp_{number:032x}").num_bytes for number in (0, 63, 64, 299)] == [0, 63, 64, 299]
    assert index.oldest() == (IDS[0], StoredEntry("me", 0, 0.0))


def test_only_ids_of_our_own_are_ids():
    assert is_response_id(IDS[0])
    for wrong in ("resp_", IDS[0] + "0", IDS[0].upper(), "resp_../../etc/passwd", f"{IDS[0]}\n"):
        assert not is_response_id(wrong)
        assert ResponseIndex().get(wrong) is None


def test_an_entry_is_no_object_of_its_own():
    index = ResponseIndex()
    before = sys.getallocatedblocks()
    for number in range(2000):
        index.add(f"resp_{number:032x}", StoredEntry("me", 10**6 + number, number + 0.5))
    assert sys.getallocatedblocks() - before < 200
