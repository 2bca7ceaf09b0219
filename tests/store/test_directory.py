import stat
import threading

import pytest

from benchmarks.prefix_store.making import LAYOUT, files_in, keys_of, opened, payload_of, read_back, store
from onebox.store.chunk import ChunkError, Damage
from onebox.store.directory import NotStoredError
from onebox.store.entry import RUN_PAGES, plan_chunks


@pytest.fixture
def root(tmp_path):
    return tmp_path / "prefixes"


def test_what_was_written_is_found_and_read_after_a_restart(root):
    keys = keys_of(1, 40)
    with_first = opened(root)
    assert with_first.find(keys) is None
    entry = store(with_first, keys)
    read_back(with_first, with_first.find(keys))
    with_first.close()
    again = opened(root)
    assert again.find(keys) == entry
    assert again.has(keys[-1])
    assert not again.has(keys[-2])
    read_back(again, entry)
    assert again.stats().read_bytes == entry.num_bytes


def test_the_deepest_entry_on_the_path_is_found(root):
    directory = opened(root)
    long = keys_of(1, 40)
    for depth in (3, 17, 33):
        store(directory, long[:depth])
    assert [directory.find(long[:depth]).num_pages for depth in (3, 16, 17, 32, 33, 40)] == [3, 3, 17, 17, 33, 33]
    assert directory.find(long[:2]) is None
    assert directory.find(long, deeper_than=33) is None
    assert directory.find(long, deeper_than=32).num_pages == 33
    assert directory.find(keys_of(2, 40)) is None


def test_prefixes_share_the_files_of_their_common_runs(root):
    directory = opened(root)
    store(directory, keys_of(1, 40, shared_pages=35))
    with directory.write(keys_of(2, 40, shared_pages=35)) as writer:
        assert [chunk.first_page for chunk in writer.missing] == [2 * RUN_PAGES, 0, 0]
        for chunk in writer.missing:
            writer.write_chunk(chunk, [memoryview(payload_of(chunk))])
        read_back(directory, writer.commit())


def test_an_entry_counts_only_once_it_is_committed(root):
    directory = opened(root)
    keys = keys_of(1, 20)
    with directory.write(keys) as writer:
        for chunk in writer.missing:
            writer.write_chunk(chunk, [memoryview(payload_of(chunk))])
        assert directory.find(keys) is None
    assert directory.find(keys) is None
    assert not [name for name in files_in(root) if "chunks" in name or "tmp" in name]
    with pytest.raises(NotStoredError, match="before"):
        writer.commit()


def test_only_the_owner_may_look(root):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    family = root / directory.fingerprint
    for path in (family, *family.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_another_fingerprint_never_reads_what_this_one_wrote(root):
    keys = keys_of(1, 20)
    store(opened(root), keys)
    assert opened(root, parts={"weights": "b"}).find(keys) is None


def test_several_threads_read_and_write_at_once(root):
    directory = opened(root)
    failures = []

    def work(seed):
        try:
            for step in range(5):
                entry = store(directory, keys_of(100 * seed + step, 20, shared_pages=16))
                read_back(directory, entry)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert directory.stats().num_entries == 30
    assert opened(root).stats().num_entries == 30


def test_a_removed_entry_is_a_miss_and_no_damage(root):
    directory = opened(root)
    keys = keys_of(1, 20)
    entry = store(directory, keys)
    with directory.read(entry) as reader:
        assert opened(root).remove(keys[-1])
        chunk = plan_chunks(keys, LAYOUT)[0]
        with pytest.raises(ChunkError) as caught:
            reader.read_chunk(chunk, memoryview(bytearray(chunk.num_bytes)))
    assert caught.value.reason is Damage.EVICTED
    assert directory.find(keys) is None
