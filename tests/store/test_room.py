"""Bytes, eviction, other processes, and disks that refuse."""

import errno
import os
import time

import pytest

from benchmarks.prefix_store.contend import BUDGET_BYTES, contend
from benchmarks.prefix_store.kill import kill_writer, leftovers
from benchmarks.prefix_store.making import files_in, keys_of, opened, payload_of, read_back, store
from onebox.store.directory import NotStoredError
from onebox.store.room import ORPHAN_GRACE_S

ENTRY_BYTES = 53_248
"""Of an entry of 20 pages with its files."""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "prefixes"


def age(root, directory, keys, seconds):
    """Has an entry last used so long ago, as another process would see it."""
    moment = time.time() - seconds
    os.utime(root / directory.fingerprint / "entries" / keys[-1].hex(), (moment, moment))


def test_the_least_recently_used_goes_first_and_the_budget_holds(root):
    directory = opened(root, 3 * ENTRY_BYTES)
    prefixes = [keys_of(seed, 20) for seed in range(5)]
    for keys in prefixes[:3]:
        store(directory, keys)
    assert directory.stats().total_bytes == 3 * ENTRY_BYTES
    directory.touch(prefixes[0][-1])
    store(directory, prefixes[3])
    assert [directory.has(keys[-1]) for keys in prefixes[:4]] == [True, False, True, True]
    store(directory, prefixes[4])
    assert [directory.has(keys[-1]) for keys in prefixes] == [True, False, False, True, True]
    assert directory.stats().num_evicted == 2
    assert directory.stats().total_bytes == 3 * ENTRY_BYTES
    assert not leftovers(root)


def test_what_another_process_used_last_is_kept(root):
    mine, other = opened(root, 2 * ENTRY_BYTES), opened(root, 2 * ENTRY_BYTES)
    first, second, third = (keys_of(seed, 20) for seed in range(3))
    store(mine, first)
    store(mine, second)
    age(root, mine, first, 100)
    age(root, mine, second, 50)
    fresh = opened(root, 2 * ENTRY_BYTES)
    assert fresh.touch(first[-1])
    store(other, third)
    assert [fresh.find(keys) is not None for keys in (first, second)] == [True, True]
    assert [opened(root).has(keys[-1]) for keys in (first, second, third)] == [True, False, True]


def test_pinned_entries_go_last(root):
    directory = opened(root, 2 * ENTRY_BYTES)
    first, second, third, fourth = (keys_of(seed, 20) for seed in range(4))
    store(directory, first)
    assert directory.pin(first[-1])
    store(directory, second)
    store(directory, third)
    assert [directory.has(keys[-1]) for keys in (first, second, third)] == [True, False, True]
    assert directory.pin(third[-1])
    assert directory.stats().num_pinned == 2
    store(directory, fourth)  # nothing else is left to evict
    assert [directory.has(keys[-1]) for keys in (first, third, fourth)] == [False, True, True]
    assert not opened(root).pin(first[-1])
    assert directory.unpin(third[-1])
    assert not directory.unpin(third[-1])


def test_families_that_nobody_uses_go_first(root):
    old = opened(root, 9 * ENTRY_BYTES, {"weights": "old"})
    store(old, keys_of(1, 20))
    mine = opened(root, 2 * ENTRY_BYTES, {"weights": "new"})
    store(mine, keys_of(2, 20))
    age(root, mine, keys_of(2, 20), 1000)
    old.close()
    store(mine, keys_of(3, 20))
    assert [mine.has(keys_of(seed, 20)[-1]) for seed in (2, 3)] == [True, True]
    assert mine.stats().total_bytes == 2 * ENTRY_BYTES


def test_a_family_in_use_is_evicted_by_age_like_the_own_one(root):
    other = opened(root, 9 * ENTRY_BYTES, {"weights": "other"})
    store(other, keys_of(1, 20))
    mine = opened(root, 2 * ENTRY_BYTES, {"weights": "mine"})
    store(mine, keys_of(2, 20))
    age(root, mine, keys_of(2, 20), 1000)
    mine.close()
    mine = opened(root, 2 * ENTRY_BYTES, {"weights": "mine"})
    store(mine, keys_of(3, 20))
    assert [mine.has(keys_of(seed, 20)[-1]) for seed in (2, 3)] == [False, True]
    read_back(other, other.find(keys_of(1, 20)))


def test_a_family_without_entries_that_nobody_uses_is_removed(root):
    old = opened(root, parts={"weights": "old"})
    store(old, keys_of(1, 20))
    old.remove(keys_of(1, 20)[-1])
    old.close()
    assert (root / old.fingerprint).is_dir()
    opened(root)
    assert not (root / old.fingerprint).exists()


def test_an_entry_that_is_being_read_is_not_evicted(root):
    directory = opened(root, ENTRY_BYTES)
    entry = store(directory, keys_of(1, 20))
    with directory.read(entry) as reader:
        with pytest.raises(NotStoredError) as caught:
            directory.write(keys_of(2, 20))
        assert caught.value.reason == "no_room"
        for chunk in entry.chunks:
            reader.read_chunk(chunk, memoryview(bytearray(chunk.num_bytes)))
    store(directory, keys_of(2, 20))
    assert not directory.has(entry.key)


def test_what_is_larger_than_the_budget_is_refused_before_anything_is_evicted(root):
    directory = opened(root, ENTRY_BYTES)
    store(directory, keys_of(1, 20))
    with pytest.raises(NotStoredError) as caught:
        directory.write(keys_of(2, 80))
    assert caught.value.reason == "too_large"
    assert directory.has(keys_of(1, 20)[-1])
    assert directory.is_writing


def test_a_smaller_budget_holds_from_the_start(root):
    directory = opened(root)
    for seed in range(5):
        store(directory, keys_of(seed, 20))
    directory.close()
    assert opened(root, 2 * ENTRY_BYTES).stats().total_bytes == 2 * ENTRY_BYTES


def abandon(directory, keys):
    """Writes an entry's chunks and a temporary file as a process does that is then killed."""
    writer = directory.write(keys)
    for chunk in writer.missing:
        writer.write_chunk(chunk, [memoryview(payload_of(chunk))])


def test_chunks_of_no_entry_go_at_the_start_if_nobody_else_uses_the_family(root):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    abandon(directory, keys_of(2, 20))
    assert leftovers(root)
    directory._room.use.release()  # what the kernel does when the process ends
    again = opened(root)
    assert not leftovers(root)
    read_back(again, again.find(keys_of(1, 20)))


def test_chunks_of_no_entry_wait_while_another_process_may_be_writing_them(root):
    writing = opened(root)
    store(writing, keys_of(1, 20))
    abandon(writing, keys_of(2, 20))
    opened(root).close()
    assert len(leftovers(root)) == 4
    old = time.time() - ORPHAN_GRACE_S - 1
    for name in leftovers(root):
        os.utime(root / writing.fingerprint / name, (old, old))
    opened(root)
    assert not leftovers(root)


def test_a_temporary_file_goes_with_its_writer_and_no_sooner(root):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    pending = root / directory.fingerprint / "tmp" / ("0" * 32)
    pending.write_bytes(b"half")
    foreign = root / directory.fingerprint / "tmp" / "notes"
    foreign.write_bytes(b"not ours")
    opened(root)
    assert not pending.exists()
    assert foreign.exists()


def test_an_entry_whose_chunk_was_removed_meanwhile_is_not_committed(root):
    directory = opened(root)
    keys = keys_of(1, 20)
    with directory.write(keys) as writer:
        for chunk in writer.missing:
            writer.write_chunk(chunk, [memoryview(payload_of(chunk))])
        next((root / directory.fingerprint / "chunks").rglob("*-kv16")).unlink()
        with pytest.raises(NotStoredError) as caught:
            writer.commit()
    assert caught.value.reason == "lost"
    assert directory.find(keys) is None
    assert not leftovers(root)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_disk_that_refuses_stops_writing_with_one_sentence_and_reading_goes_on(root, monkeypatch, caplog, code, call):
    directory = opened(root)
    entry = store(directory, keys_of(1, 20))

    def refuse(*given):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(f"onebox.store.chunk_file.os.{call}", refuse)
        with pytest.raises(NotStoredError) as caught:
            store(directory, keys_of(2, 20))
        assert caught.value.reason == "failed"
        for seed in (2, 3):
            with pytest.raises(NotStoredError) as caught:
                directory.write(keys_of(seed, 20))
            assert caught.value.reason == "paused"
    assert not directory.is_writing
    assert [os.strerror(code) in record.message for record in caplog.records] == [True]
    assert directory.stats().not_stored == {"failed": 1, "paused": 2}
    assert not leftovers(root)
    read_back(directory, entry)
    monkeypatch.setattr("onebox.store.pause.time.monotonic", lambda: time.perf_counter() + 1e9)
    assert directory.is_writing
    store(directory, keys_of(2, 20))
    assert "again" in caplog.records[-1].message


def test_the_disk_is_not_filled_to_the_brim(root, monkeypatch):
    directory = opened(root)
    for seed in range(3):
        store(directory, keys_of(seed, 20))
    real = os.statvfs(root)
    block = real.f_frsize
    spare = min(1 << 30, real.f_blocks * block // 20) // block

    def nearly_full(path):
        return os.statvfs_result((*real[:3], spare, spare, *real[5:]))

    monkeypatch.setattr("onebox.store.room.os.statvfs", nearly_full)
    store(directory, keys_of(3, 20))
    assert [directory.has(keys_of(seed, 20)[-1]) for seed in range(4)] == [False, True, True, True]


def test_a_directory_that_cannot_be_written_is_read(root, monkeypatch):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    directory.close()

    def read_only(path, flags, *given, real=os.open):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *given)

    for module in ("files", "use"):
        monkeypatch.setattr(f"onebox.store.{module}.os.open", read_only)
    again = opened(root)
    read_back(again, again.find(keys_of(1, 20)))
    with pytest.raises(NotStoredError):
        again.write(keys_of(2, 20))
    assert not again.is_writing


def test_a_directory_that_is_removed_while_it_is_used_is_made_again(root):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    store(directory, keys_of(2, 20))
    assert directory.find(keys_of(1, 20)) is None
    read_back(directory, directory.find(keys_of(2, 20)))


def test_processes_that_share_a_directory_read_right_bytes_or_miss(memory_path):
    root = memory_path / "prefixes"
    contend(root, num_processes=3, num_steps=25)
    for family in "ab":
        directory = opened(root, BUDGET_BYTES, {"weights": family})
        assert directory.stats().total_bytes <= BUDGET_BYTES
        directory.close()
    assert not leftovers(root)


def test_a_killed_writer_leaves_whole_entries_and_nothing_else(root):
    assert max(kill_writer(root, seed) for seed in range(4)) > 0


def test_opening_writes_nothing_but_a_lock(root):
    opened(root)
    assert files_in(root) == ["lock"]


def test_a_disk_that_others_filled_costs_nothing_that_is_kept(root, monkeypatch, caplog):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    real = os.statvfs(root)
    monkeypatch.setattr("onebox.store.room.os.statvfs", lambda _: os.statvfs_result((*real[:3], 0, 0, *real[5:])))
    with pytest.raises(NotStoredError) as caught:
        directory.write(keys_of(2, 20))
    assert caught.value.reason == "failed"
    assert not directory.is_writing
    assert os.strerror(errno.ENOSPC) in caplog.text
    read_back(directory, directory.find(keys_of(1, 20)))
