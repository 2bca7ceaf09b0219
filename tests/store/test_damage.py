"""Damaged and made-up directories are misses."""

from pathlib import Path

import pytest

from benchmarks.prefix_store.damage import _write_block
from benchmarks.prefix_store.fuzz import Fuzzer
from benchmarks.prefix_store.making import LAYOUT, files_in, keys_of, opened, read_back, store
from onebox.store.chunk import BLOCK_BYTES, Chunk, ChunkError, ChunkKind
from onebox.store.entry import PrefixEntry, encode_entry, plan_chunks

NUM_FUZZED = 25
"""`python -m benchmarks.prefix_store fuzz` runs 10,000."""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "prefixes"


def test_damaged_and_made_up_directories_give_right_bytes_or_a_miss(memory_path):
    fuzzer = Fuzzer(memory_path)
    for seed in range(NUM_FUZZED):
        fuzzer.run(seed)
    assert fuzzer.counts["read"] > NUM_FUZZED
    assert sum(count for name, count in fuzzer.counts.items() if name.startswith("miss:")) > 10


def chunk_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.parent.parent.name == "chunks"]


@pytest.mark.parametrize("index", range(5))
def test_a_damaged_chunk_is_a_miss_once_and_is_written_again(root, caplog, index):
    directory = opened(root)
    keys = keys_of(1, 40)
    entry = store(directory, keys)
    path = root / directory.fingerprint / "chunks" / entry.chunks[index].file_name[:2] / entry.chunks[index].file_name
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChunkError):
        read_back(directory, directory.find(keys))
    assert directory.find(keys) is None
    assert directory.stats().damaged == {"digest": 1}
    assert [str(path) in record.message for record in caplog.records] == [True]
    store(directory, keys)
    read_back(directory, directory.find(keys))


def test_where_one_chunk_is_damaged_the_others_are_written_again_too(root):
    directory = opened(root)
    keys = keys_of(1, 40)
    store(directory, keys)
    for path in chunk_files(root):
        data = bytearray(path.read_bytes())
        data[BLOCK_BYTES] ^= 1
        path.write_bytes(data)
    with pytest.raises(ChunkError):
        read_back(directory, directory.find(keys))
    assert directory.stats().damaged == {"digest": 1}
    store(directory, keys)
    read_back(directory, directory.find(keys))


def test_a_damaged_chunk_takes_every_entry_that_shares_it(root):
    directory = opened(root)
    both = [keys_of(seed, 40, 16) for seed in (1, 2)]
    entries = [store(directory, keys) for keys in both]
    shared = (
        root / directory.fingerprint / "chunks" / entries[0].chunks[0].file_name[:2] / entries[0].chunks[0].file_name
    )
    shared.write_bytes(b"")
    with pytest.raises(ChunkError):
        read_back(directory, entries[0])
    assert [directory.find(keys) for keys in both] == [None, None]


def test_an_entry_that_names_another_prefixs_chunks_is_not_found(root):
    """Its checksums are right: who made it up knew the format."""
    directory = opened(root)
    wanted, other = keys_of(1, 33), keys_of(2, 33)
    store(directory, other)
    store(directory, wanted)
    directory.close()
    family = root / directory.fingerprint
    chunks = (*plan_chunks(other, LAYOUT)[:2], *plan_chunks(wanted, LAYOUT)[2:])
    payload = encode_entry(PrefixEntry(wanted[-1], 33, 0.0, chunks))
    head = Chunk(ChunkKind.ENTRY, wanted[-1], 0, len(payload))
    _write_block(family / "entries" / wanted[-1].hex(), bytes.fromhex(family.name), head, payload)
    again = opened(root)
    assert again.has(wanted[-1])
    assert again.find(wanted) is None
    assert not again.has(wanted[-1])
    read_back(again, again.find(other))


def test_names_that_are_not_ours_stay_when_everything_goes(root):
    directory = opened(root)
    store(directory, keys_of(1, 20))
    family = root / directory.fingerprint
    ours = set(files_in(root))
    for folder in (root, family, family / "entries", family / "chunks", family / "tmp"):
        (folder / "mine.txt").write_text("keep")
    directory.close()
    small = opened(root, 1, {"weights": "b"})
    assert small.stats().total_bytes == 0
    left = set(files_in(root)) - ours
    assert len(left) == 5
    assert all(name.endswith("mine.txt") for name in left)
