"""Reading through the staging buffer: the right bytes, each tensor once, in pieces, and nothing left in memory."""

import ctypes
import errno
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from onebox.checkpoint.fast import FastReader
from onebox.checkpoint.header import TensorEntry, read_header
from onebox.checkpoint.pieces import NUM_PIECES, PieceRing, plan_pieces
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.staging import StagedReader
from onebox.spec.errors import DoesNotFitError, MismatchError, UnreadableError, UsageError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Two files with tensors of many dtypes and sizes: nothing, one number, off every alignment, several pieces."""
    root, generator = tmp_path_factory.mktemp("files"), torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    first = {
        "large": drawn(300, 301, dtype=torch.float32),
        "fp8": drawn(5, 7, dtype=torch.float32).to(torch.float8_e4m3fn),
        "odd": drawn(3, 5, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    second = {"m.weight_shape": torch.tensor([3, 4]), "words": drawn(1000, 9, dtype=torch.int32)}
    second |= {f"small.{number}": drawn(number, 3, dtype=torch.bfloat16) for number in range(1, 40)}
    for name, tensors in (("first", first), ("second", second)):
        save_file(tensors, root / f"{name}.safetensors")
    return [root / "first.safetensors", root / "second.safetensors"]


def entries_of(files: list[Path]) -> list[TensorEntry]:
    return [entry for path in files for entry in read_header(path)]


def stored_in(files: list[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def read_all(groups: list[list[TensorEntry]], piece_bytes: int = 32 << 20) -> dict[str, torch.Tensor]:
    with StagedReader(groups, CPU, piece_bytes) as reader:
        return {entry.name: reader.read(entry) for group in groups for entry in group}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where a number is not equal to itself."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_all(files: list[Path], groups: list[list[TensorEntry]], asked: list[TensorEntry], piece_bytes: int) -> None:
    expected = stored_in(files)
    with StagedReader(groups, CPU, piece_bytes) as reader:
        for entry in asked:
            assert same_bytes(reader.read(entry), expected[entry.name]), entry.name


@pytest.mark.gpu
@pytest.mark.parametrize("piece_bytes", [4096, 16384, 32 << 20])
def test_tensors_on_a_gpu_are_those_that_safetensors_reads(files, piece_bytes):
    """Buffers of one page are overwritten as soon as they may be: a copy that was not waited for would show."""
    entries, expected = entries_of(files), stored_in(files)
    with StagedReader([[entry] for entry in entries], torch.device("cuda"), piece_bytes) as reader:
        found = {entry.name: reader.read(entry) for entry in entries}
    for name, tensor in found.items():
        assert tensor.is_cuda == (name != "m.weight_shape")
        assert same_bytes(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("piece_bytes", [4096, 16384, 32 << 20])
def test_tensors_are_those_that_safetensors_reads(files, piece_bytes):
    entries = entries_of(files)
    check_all(files, [[entry] for entry in entries], entries, piece_bytes)


@pytest.mark.parametrize("piece_bytes", [4096, 32 << 20])
def test_the_order_of_asking_need_not_be_the_order_of_reading(files, piece_bytes):
    entries = entries_of(files)
    groups = [entries[::3], entries[1::3], entries[2::3]]
    check_all(files, groups, sorted(entries, key=lambda entry: entry.name), piece_bytes)


def test_a_slice_of_a_tensor_is_read_alone(files):
    whole = next(entry for entry in entries_of(files) if entry.name == "words")
    rows = replace(whole, name="rows", shape=(10, 9), begin=whole.begin + 7 * 36, nbytes=360)
    with StagedReader([[rows]], CPU) as reader:
        assert reader.read(rows).equal(stored_in(files)["words"][7:17])


def test_tensors_outlive_the_buffer(files):
    """What was handed out is no view of memory that the next piece overwrites."""
    entries = entries_of(files)
    found = read_all([[entry] for entry in entries], 4096)
    for name, tensor in stored_in(files).items():
        assert same_bytes(found[name], tensor), name


@st.composite
def layouts(draw) -> list[list[TensorEntry]]:
    """Tensors back to back in a few files, in groups of any order."""
    entries = []
    for file in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(8, 9000))
        for number in range(draw(st.integers(0, 6))):
            nbytes = draw(st.integers(0, 40_000))
            entries.append(TensorEntry(f"{file}.{number}", "U8", (nbytes,), Path(f"{file}"), begin, nbytes))
            begin += nbytes + draw(st.sampled_from([0, 0, 8, 1_000_000]))
    shuffled = draw(st.permutations(entries))
    cut = draw(st.integers(0, len(shuffled)))
    return [shuffled[:cut], shuffled[cut:]]


@given(layouts(), st.sampled_from([4096, 8192, 65536]))
def test_pieces_hold_every_byte_once_and_fit(groups, piece_bytes):
    covered: dict[str, int] = {}
    for piece in plan_pieces(groups, piece_bytes):
        assert piece.begin % 4096 == 0
        assert 0 < piece.end - piece.begin <= piece_bytes
        place = piece.begin
        for stretch in piece.stretches:
            assert stretch.entry.path == piece.path
            assert place <= stretch.begin <= stretch.begin + stretch.nbytes <= piece.end
            assert stretch.offset == covered.get(stretch.entry.name, 0), "the parts of a tensor come in their order"
            covered[stretch.entry.name] = stretch.offset + stretch.nbytes
            place = stretch.begin + stretch.nbytes
    assert covered == {entry.name: entry.nbytes for group in groups for entry in group if entry.nbytes}


def test_neighbours_are_read_together_over_groups(files):
    entries = entries_of(files[1:])
    assert len(list(plan_pieces([[entry] for entry in entries]))) == 1


def refuse_flag(monkeypatch) -> None:
    """No file can be opened for direct reads, as on some file systems."""
    opened = os.open

    def open_plainly(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_plainly)


def refuse_direct_reads(monkeypatch) -> None:
    """Files open for direct reads and then refuse them, as on other file systems."""
    import fcntl

    read = os.preadv

    def read_plainly(file, buffers, position):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(file, buffers, position)

    monkeypatch.setattr(os, "preadv", read_plainly)


@pytest.mark.parametrize("refuse", [refuse_flag, refuse_direct_reads])
def test_a_file_system_without_direct_reads_gives_the_same(files, monkeypatch, refuse):
    refuse(monkeypatch)
    entries = entries_of(files)
    check_all(files, [[entry] for entry in entries], entries, 16384)


class FakeCuda:
    """The part of CUDA that pins memory and tells when copies are done; `code` is what pinning answers."""

    def __init__(self, monkeypatch, code: int = 0) -> None:
        self.code, self.pinned, self.events = code, {}, []
        fake = self

        class Event:
            def __init__(self, **_options) -> None:
                self.was_waited_for = False

            def record(self, _stream) -> None:
                fake.events.append(self)

            def synchronize(self) -> None:
                self.was_waited_for = True

        monkeypatch.setattr("onebox.checkpoint.pieces._cuda_runtime", lambda: self)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)

    def cudaHostRegister(self, pointer: int, nbytes: int, _flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.pinned[pointer] = nbytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 (CUDA's name)
        del self.pinned[pointer]
        return 0


def test_a_buffer_is_pinned_and_filled_again_only_when_its_copies_are_done(files, monkeypatch):
    cuda = FakeCuda(monkeypatch)
    ring = PieceRing(plan_pieces([entries_of(files)], 4096), torch.device("cuda"), 4096)
    assert list(cuda.pinned.values()) == [4096] * NUM_PIECES
    num_pieces = 0
    while ring.take(lambda _piece, _staged: None):
        num_pieces += 1
    ring.close()
    assert num_pieces > 50
    waited = [event.was_waited_for for event in cuda.events]
    assert waited == [True] * (num_pieces - NUM_PIECES) + [False] * NUM_PIECES
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_told(files, monkeypatch):
    FakeCuda(monkeypatch, code=2)
    with pytest.raises(DoesNotFitError, match=r"32 MiB could not be pinned .* CUDA error 2"):
        StagedReader([entries_of(files)], torch.device("cuda"))


def resident_pages(path: Path) -> int:
    """Pages of a file that the page cache holds, as the kernel tells."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        code = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), flags)
        del start
    assert code == 0
    return sum(flag & 1 for flag in flags)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about its page cache")
@pytest.mark.parametrize("is_direct", [True, False])
def test_reading_leaves_nothing_in_the_page_cache(tmp_path, monkeypatch, is_direct):
    path = tmp_path / "large.safetensors"
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, path)
    entries = read_header(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path):
        pytest.skip("this file system lives in memory")
    if not is_direct:
        refuse_flag(monkeypatch)
    read_all([entries], 1 << 20)
    # What the system reads ahead of a plain read may come after its pages were given back.
    assert resident_pages(path) <= (0 if is_direct else 512), "of 2049"


def test_a_second_request_is_an_error(files):
    entry, *_ = entries_of(files)
    reader = StagedReader([[entry]], CPU)
    reader.read(entry)
    with pytest.raises(MismatchError, match=f"^{entry.name} was asked for a second time"), reader:
        reader.read(entry)


def test_a_tensor_outside_the_order_is_an_error(files):
    one, *others = entries_of(files)
    with pytest.raises(MismatchError, match=f"^{one.name} was asked for"), StagedReader([others], CPU) as reader:
        reader.read(one)


def test_a_tensor_that_nobody_takes_is_an_error(files):
    one, other, *_ = entries_of(files)
    with (
        pytest.raises(MismatchError, match=f"^{other.name} was taken by no part"),
        StagedReader([[one, other]], CPU) as r,
    ):
        r.read(one)


def test_two_wishes_for_one_tensor_are_an_error(files):
    entries = entries_of(files)
    with pytest.raises(MismatchError, match="bound once"):
        StagedReader([entries, entries[:1]], CPU)


def test_an_error_of_the_caller_is_not_hidden_by_leftovers(files):
    with pytest.raises(KeyError, match="mine"), StagedReader([entries_of(files)], CPU):
        raise KeyError("mine")


@pytest.mark.parametrize("refuse", [None, refuse_flag])
@pytest.mark.parametrize("kept_bytes", [8192, 8192 + 77])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, monkeypatch, refuse, kept_bytes):
    if refuse:
        refuse(monkeypatch)
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(10_000)}, path)
    entries = read_header(path)
    os.truncate(path, kept_bytes)
    with pytest.raises(UnreadableError, match=r"cut\.safetensors ended while a was read"):
        read_all([entries])


def test_after_a_failed_read_its_tensors_are_lost_not_waited_for(tmp_path):
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(10_000)}, path)
    entries = read_header(path)
    os.truncate(path, 8192)
    reader = StagedReader([entries], CPU)
    with pytest.raises(UnreadableError, match="ended while"):
        reader.read(entries[0])
    with pytest.raises(UnreadableError, match=f"^{entries[1].name} was lost"), reader:
        reader.read(entries[1])


def test_a_file_that_is_gone_is_named(tmp_path):
    path = tmp_path / "gone.safetensors"
    save_file({"a": torch.ones(10)}, path)
    entries = read_header(path)
    path.unlink()
    with pytest.raises(UnreadableError, match=r"gone\.safetensors cannot be read: No such file"):
        read_all([entries])


@pytest.mark.parametrize("kind", ["bf16-fused-sharded", "autoround", "modelopt-mixed"])
def test_fastsafetensors_gives_the_same_tensors(checkpoints, kind):
    pytest.importorskip("fastsafetensors")
    checkpoint = open_checkpoint(checkpoints / kind)
    entries = list(checkpoint.tensors.values())
    expected = stored_in(list(checkpoint.shards))
    with FastReader(checkpoint, [entries], CPU) as reader:
        for entry in entries:
            assert same_bytes(reader.read(entry), expected[entry.name]), entry.name


def test_without_its_package_fastsafetensors_says_what_to_install(checkpoints, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    with pytest.raises(UsageError, match="pip install fastsafetensors"):
        FastReader(open_checkpoint(checkpoints / "fp8"), [], CPU)
