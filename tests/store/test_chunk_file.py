"""One chunk's file: whole bytes or one typed error."""

import os
from pathlib import Path

import pytest

from benchmarks.prefix_store.making import payload_of
from onebox.store.chunk import BLOCK_BYTES, Chunk, ChunkError, ChunkKind, Damage
from onebox.store.chunk_file import aligned_buffer, check_chunk, read_chunk, write_chunk
from onebox.store.files import PendingFile

FINGERPRINT = b"f" * 20


def chunk_of(num_bytes: int) -> Chunk:
    return Chunk(ChunkKind.KV, b"k" * 20, 16, num_bytes)


def write(folder: Path, chunk: Chunk, parts: list[memoryview]) -> Path:
    with PendingFile(folder) as file:
        write_chunk(file.descriptor, FINGERPRINT, chunk, parts)
        file.place(folder / chunk.file_name)
    return folder / chunk.file_name


def aligned(data: bytes) -> memoryview:
    buffer = aligned_buffer(len(data))
    buffer[:] = data
    return buffer


@pytest.mark.parametrize("num_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 1_000_003])
@pytest.mark.parametrize("cut", [None, 1, BLOCK_BYTES, 5000])
def test_what_is_written_from_any_memory_is_read_into_any_memory(tmp_path, num_bytes, cut):
    chunk = chunk_of(num_bytes)
    data = payload_of(chunk)
    parts = [data] if cut is None else [data[start : start + cut] for start in range(0, num_bytes, max(cut, 997))]
    if cut == 1:
        parts = [data[:1], data[1:]]
    path = write(tmp_path, chunk, [aligned(part) for part in (parts if cut != 5000 else [data]) if part])
    assert path.stat().st_size == BLOCK_BYTES * (1 + -(-num_bytes // BLOCK_BYTES))
    for into in (aligned_buffer(num_bytes), memoryview(bytearray(num_bytes + 1))[1:]):
        read_chunk(path, FINGERPRINT, chunk, into)
        assert bytes(into) == data
    check_chunk(path, FINGERPRINT, chunk)
    assert [file.name for file in tmp_path.iterdir()] == [chunk.file_name]


def test_no_bit_of_a_file_can_be_flipped_unnoticed(tmp_path):
    chunk = chunk_of(300)
    path = write(tmp_path, chunk, [memoryview(payload_of(chunk))])
    whole = path.read_bytes()
    for position in range(0, len(whole), 127):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        for check in (
            lambda: read_chunk(path, FINGERPRINT, chunk, aligned_buffer(300)),
            lambda: check_chunk(path, FINGERPRINT, chunk),
        ):
            with pytest.raises(ChunkError):
                check()


@pytest.mark.parametrize(
    ("fingerprint", "chunk"),
    [
        (b"g" * 20, chunk_of(300)),
        (FINGERPRINT, Chunk(ChunkKind.STATE, b"k" * 20, 16, 300)),
        (FINGERPRINT, Chunk(ChunkKind.KV, b"l" * 20, 16, 300)),
        (FINGERPRINT, Chunk(ChunkKind.KV, b"k" * 20, 15, 300)),
        (FINGERPRINT, chunk_of(301)),
    ],
    ids=["family", "kind", "key", "count", "length"],
)
def test_a_whole_file_under_another_name_is_refused(tmp_path, fingerprint, chunk):
    path = write(tmp_path, chunk_of(300), [memoryview(payload_of(chunk_of(300)))])
    with pytest.raises(ChunkError) as caught:
        read_chunk(path, fingerprint, chunk, aligned_buffer(chunk.num_bytes))
    assert caught.value.reason is Damage.OTHER_NAME


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, Damage.MISSING),
        (lambda path: os.truncate(path, 2 * BLOCK_BYTES), Damage.TRUNCATED),
        (lambda path: os.truncate(path, 0), Damage.TRUNCATED),
        (lambda path: os.truncate(path, 1 << 40), Damage.TOO_LONG),
        (lambda path: (path.unlink(), path.mkdir()), Damage.NOT_A_FILE),
        (lambda path: (path.rename(f"{path}x"), path.symlink_to(f"{path}x")), Damage.NOT_A_FILE),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), Damage.NOT_A_FILE),
        (lambda path: (path.unlink(), os.mkfifo(path)), Damage.NOT_A_FILE),
    ],
    ids=["missing", "shorter", "empty", "huge", "directory", "link", "device", "pipe"],
)
def test_what_is_no_whole_file_is_told_by_its_kind(tmp_path, spoil, reason):
    chunk = chunk_of(9000)
    path = write(tmp_path, chunk, [memoryview(payload_of(chunk))])
    spoil(path)
    with pytest.raises(ChunkError) as caught:
        read_chunk(path, FINGERPRINT, chunk, aligned_buffer(9000))
    assert caught.value.reason is reason
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_opened_now_is_no_lasting_damage(tmp_path, monkeypatch):
    chunk = chunk_of(300)
    path = write(tmp_path, chunk, [memoryview(payload_of(chunk))])

    def refuse(*given, **named):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("onebox.store.chunk_file.os.open", refuse)
    with pytest.raises(ChunkError) as caught:
        read_chunk(path, FINGERPRINT, chunk, aligned_buffer(300))
    assert caught.value.reason is Damage.BUSY
    assert not caught.value.reason.is_lasting


def test_direct_access_that_is_refused_on_use_falls_back(tmp_path, monkeypatch):
    """Some file systems take the flag and refuse the read."""
    chunk = chunk_of(3 * BLOCK_BYTES)
    path = write(tmp_path, chunk, [memoryview(payload_of(chunk))])
    real, refused = os.preadv, []

    def once(descriptor, blocks, offset):
        if not refused:
            refused.append(offset)
            raise OSError(22, "Invalid argument")
        return real(descriptor, blocks, offset)

    monkeypatch.setattr("onebox.store.chunk_file.os.preadv", once)
    monkeypatch.setattr("onebox.store.chunk_file._set_direct", lambda _, wanted: wanted)
    into = aligned_buffer(chunk.num_bytes)
    read_chunk(path, FINGERPRINT, chunk, into)
    assert refused
    assert bytes(into) == payload_of(chunk)


def test_a_read_that_comes_in_pieces_is_put_together(tmp_path, monkeypatch):
    chunk = chunk_of(100_000)
    path = write(tmp_path, chunk, [memoryview(payload_of(chunk))])
    real = os.preadv
    monkeypatch.setattr(
        "onebox.store.chunk_file.os.preadv", lambda fd, blocks, offset: real(fd, [blocks[0][:5000]], offset)
    )
    into = memoryview(bytearray(chunk.num_bytes))
    read_chunk(path, FINGERPRINT, chunk, into)
    assert bytes(into) == payload_of(chunk)
