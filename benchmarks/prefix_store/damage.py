"""Ways to damage a directory of prefixes, each drawn at random. None of them may change what is read, only whether."""

import os
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from benchmarks.prefix_store.making import tokens_of
from onebox.store.chunk import BLOCK_BYTES, Chunk, ChunkKind, make_header
from onebox.store.keys import prefix_keys

__all__ = ["DAMAGES", "damage"]

Damager = Callable[[random.Random, Path], None]


def damage(draw: random.Random, root: Path) -> list[str]:
    """Damages a directory in one to four ways; returns their names."""
    chosen = draw.choices(DAMAGES, k=draw.randint(1, 4))
    for each in chosen:
        # What an earlier one removed cannot be damaged.
        with suppress(OSError, IndexError):
            each(draw, root)
    return [each.__name__ for each in chosen]


def _files(root: Path) -> list[Path]:
    """Regular files that can be damaged further."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "lock")
    return sorted(path for path in found if 0 < path.stat().st_size < 1 << 20)


def _blocks(root: Path, *names: str) -> list[Path]:
    """Entry and chunk files that have a header at least."""
    found = [path for path in _files(root) if path.parent.name in names or path.parent.parent.name in names]
    return [path for path in found if path.stat().st_size >= BLOCK_BYTES and len(path.name) >= 40]


def _any_block(draw: random.Random, root: Path) -> Path:
    return draw.choice(_blocks(root, "entries", "chunks"))


def _put(path: Path, data: bytes) -> None:
    if path.is_fifo():  # opening it would wait for a reader
        path.unlink()
    path.write_bytes(data)


def flip_bit(draw: random.Random, root: Path) -> None:
    path = draw.choice(_files(root))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(draw: random.Random, root: Path) -> None:
    path = draw.choice(_files(root))
    size = path.stat().st_size
    os.truncate(path, draw.choice([0, 1, BLOCK_BYTES, BLOCK_BYTES - 1, size - 1, draw.randrange(size)]))


def lengthen(draw: random.Random, root: Path) -> None:
    with draw.choice(_files(root)).open("ab") as file:
        file.write(draw.randbytes(draw.choice([1, 100, BLOCK_BYTES])) if draw.random() < 0.7 else bytes(BLOCK_BYTES))


def make_huge(draw: random.Random, root: Path) -> None:
    os.truncate(_any_block(draw, root), 1 << draw.randint(31, 43))


def tear(draw: random.Random, root: Path) -> None:
    """A block that never reached the disk."""
    path = _any_block(draw, root)
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES * draw.randrange(path.stat().st_size // BLOCK_BYTES))
        file.write(bytes(BLOCK_BYTES) if draw.random() < 0.5 else draw.randbytes(BLOCK_BYTES))


def exchange(draw: random.Random, root: Path) -> None:
    one, other = _any_block(draw, root), _any_block(draw, root)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def copy_over(draw: random.Random, root: Path) -> None:
    """Another's content under this name, of another family too."""
    shutil.copyfile(_any_block(draw, root), _any_block(draw, root))


def remove(draw: random.Random, root: Path) -> None:
    draw.choice(_files(root)).unlink()


def fill_with_noise(draw: random.Random, root: Path) -> None:
    draw.choice(_files(root)).write_bytes(draw.randbytes(draw.choice([0, 10, BLOCK_BYTES, 3 * BLOCK_BYTES])))


def put_directory(draw: random.Random, root: Path) -> None:
    path = draw.choice(_files(root))
    path.unlink()
    path.mkdir()
    if draw.random() < 0.5:
        (path / "inside").write_text("not ours")


def put_link(draw: random.Random, root: Path) -> None:
    path, target = draw.choice(_files(root)), draw.choice(_files(root))
    path.unlink()
    path.symlink_to(draw.choice([target, Path("/dev/zero"), root.parent / "canary", Path("nowhere"), path, root]))


def put_pipe(draw: random.Random, root: Path) -> None:
    path = draw.choice(_files(root))
    path.unlink()
    os.mkfifo(path)


def forbid(draw: random.Random, root: Path) -> None:
    draw.choice(_files(root)).chmod(0)


def _family(draw: random.Random, root: Path) -> Path:
    return draw.choice(sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()))


def replace_folder(draw: random.Random, root: Path) -> None:
    path = _family(draw, root) / draw.choice(["entries", "chunks", "pins", "tmp", "."])
    elsewhere = root.parent / f"moved-{draw.randrange(1 << 30)}"
    path.resolve().rename(elsewhere)
    target = path.parent / path.name if path.name else path
    if draw.random() < 0.5:
        target.symlink_to(elsewhere)
    else:
        target.write_text("no directory")


def add_foreign_names(draw: random.Random, root: Path) -> None:
    family = _family(draw, root)
    for folder in (root, family, family / "entries", family / "chunks", family / "tmp", family / "pins"):
        name = draw.choice(
            ["notes.txt", "ä" * 40, "f" * 41, "F" * 40, "..x", "a b", "0" * 39, os.fsdecode(b"\xff\xfe")]
        )
        _put(folder / name, b"not ours")


def make_up_header(draw: random.Random, root: Path) -> None:
    """A header whose own checksum is right and that says something else."""
    path = _any_block(draw, root)
    data = bytearray(path.read_bytes())
    offset, form = draw.choice([(0, "8s"), (8, "<I"), (12, "<I"), (16, "20s"), (36, "20s"), (56, "<I"), (64, "<Q")])
    size = struct.calcsize(form)
    huge = draw.choice([0, 1, (1 << 8 * size) - 1, draw.randrange(1 << 8 * size)])
    data[offset : offset + size] = huge.to_bytes(size, "little")
    data[4064:4096] = sha256(data[:4064]).digest()
    path.write_bytes(data)


def make_up_entry(draw: random.Random, root: Path) -> None:
    """An entry whose checksums are right and whose content is made up: other chunks, sizes, counts."""
    path = draw.choice(_blocks(root, "entries"))
    payload = bytearray(path.read_bytes()[BLOCK_BYTES:])
    size = struct.unpack_from("<Q", path.read_bytes(), 64)[0]
    payload = payload[:size] if size <= len(payload) else payload
    for _ in range(draw.randint(1, 3)):
        offset = draw.choice(
            [0, 8, 16, 20, 24 + 32 * draw.randrange(4), 44 + 32 * draw.randrange(4), draw.randrange(200)]
        )
        width = draw.choice([1, 4, 8, 20])
        payload[offset : offset + width] = draw.choice(
            [draw.randbytes(width), b"\xff" * width, bytes(width), *_other_keys(draw, root)]
        )[:width]
    payload = payload[: draw.choice([len(payload), len(payload), len(payload) - 1, 24, 5])] + bytes(
        draw.choice([0, 0, 32])
    )
    key, fingerprint = bytes.fromhex(path.name), bytes.fromhex(path.parent.parent.name)
    _write_block(path, fingerprint, Chunk(ChunkKind.ENTRY, key, 0, len(payload)), bytes(payload))


def _other_keys(draw: random.Random, root: Path) -> list[bytes]:
    return [bytes.fromhex(_any_block(draw, root).name[:40])]


def _write_block(path: Path, fingerprint: bytes, chunk: Chunk, payload: bytes) -> None:
    header = make_header(fingerprint, chunk, sha256(payload).digest())
    path.write_bytes(header + payload + bytes(-len(payload) % BLOCK_BYTES))


def make_up_json(draw: random.Random, root: Path) -> None:
    values = [
        "",
        "{",
        "[]",
        "null",
        '{"parts": 1}',
        '{"parts": {"weights": "z"}}',
        "[" * 100_000,
        '{"read": NaN}',
        "9" * 70_000,
    ]
    values += ['{"prefill": -1, "read": 1e999, "x": "y"}', '{"parts": {"a": ["b"]}, "label": 3}', '"\\ud800"']
    _put(_family(draw, root) / draw.choice(["about.json", "rates.json"]), draw.choice(values).encode())


def make_up_family(draw: random.Random, root: Path) -> None:
    family = root / draw.randbytes(20).hex()
    for name in draw.sample(["entries", "chunks/ab", "tmp", "pins"], draw.randint(0, 4)):
        (family / name).mkdir(parents=True)
        for _ in range(draw.randint(0, 3)):
            (family / name / draw.randbytes(draw.choice([16, 20])).hex()).write_bytes(
                draw.randbytes(draw.randrange(9000))
            )


def make_up_files(draw: random.Random, root: Path) -> None:
    """Names that are ours with content that is not."""
    family = _family(draw, root)
    key = draw.choice([draw.randbytes(20), prefix_keys(tokens_of(99, 3))[-1]]).hex()
    places = [family / "entries" / key, family / "pins" / key, family / "tmp" / draw.randbytes(16).hex()]
    places.append(family / "chunks" / key[:2] / f"{key}-kv{draw.randrange(30):02d}")
    path = draw.choice(places)
    path.parent.mkdir(exist_ok=True)
    _put(path, draw.randbytes(draw.choice([0, 100, 2 * BLOCK_BYTES])))


def change_times(draw: random.Random, root: Path) -> None:
    path = draw.choice(_files(root))
    os.utime(path, (0, draw.choice([0, 1, 4_000_000_000, 1_500_000_000])))


DAMAGES: list[Damager] = [
    flip_bit,
    flip_bit,
    truncate,
    lengthen,
    make_huge,
    tear,
    exchange,
    copy_over,
    remove,
    fill_with_noise,
    put_directory,
    put_link,
    put_pipe,
    forbid,
    replace_folder,
    add_foreign_names,
    make_up_header,
    make_up_entry,
    make_up_entry,
    make_up_json,
    make_up_family,
    make_up_files,
    change_times,
]
