"""A file that arrives in pieces, in any order, and survives a kill at any point.

    NAME.part            the bytes, at their final places; what has not arrived is a hole
    NAME.part.journal    one line that identifies the content, then `begin nbytes crc32` of each stretch that arrived

A stretch is written before its line, and a line counts only if the bytes still have its checksum, so neither a kill nor
a loss of power leaves a wrong byte that is taken for a good one.
"""

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onebox.checkpoint.hub_errors import write_error

__all__ = ["PartFile", "Stretch", "gaps"]

RECORD_BYTES = 4 << 20
"""What a kill loses at most of each connection."""
_READ_BYTES = 4 << 20
Stretch = tuple[int, int]
"""Begin and end of bytes in a file."""


@dataclass
class _Arrival:
    """A stretch of bytes that is growing."""

    begin: int
    end: int
    crc32: int = 0


class PartFile:
    """The unfinished form of `path`, `nbytes` long. A part with another `identity` is dropped."""

    def __init__(self, path: Path, nbytes: int, identity: str) -> None:
        self.path = path
        self._nbytes = nbytes
        self._part = path.with_name(f"{path.name}.part")
        self._journal = path.with_name(f"{path.name}.part.journal")
        self._lock = threading.Lock()
        self._arriving: list[_Arrival] = []
        with _writing(self._part):
            self.done = self._restore(identity)
            if not self.done:
                self._journal.unlink(missing_ok=True)
                self._part.unlink(missing_ok=True)
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666)
            os.truncate(self._file, nbytes)
            self._log = self._journal.open("a", encoding="utf-8")
            # A line that a kill cut short ends here.
            self._log.write("\n" if self.done else f"{identity}\n")
            self._log.flush()

    @contextlib.contextmanager
    def writer(self, begin: int) -> Iterator[Callable[[bytes], None]]:
        """A function that takes the bytes from `begin` on, one after the other."""
        arrival = _Arrival(begin, begin)
        with self._lock:
            self._arriving.append(arrival)
        try:
            yield lambda data: self._write(arrival, data)
        finally:
            with _writing(self._journal), self._lock:
                self._record(arrival)

    def _write(self, arrival: "_Arrival", data: bytes) -> None:
        with _writing(self._part), self._lock:
            if self._file < 0:
                raise ValueError(f"{self._part} is closed")
            view = memoryview(data)
            while view:
                count = os.pwrite(self._file, view, arrival.end)
                arrival.crc32 = zlib.crc32(view[:count], arrival.crc32)
                view, arrival.end = view[count:], arrival.end + count
            if arrival.end - arrival.begin >= RECORD_BYTES:
                self._record(arrival)

    def _record(self, arrival: "_Arrival") -> None:
        """Notes what has come of a stretch; what comes after it is another one."""
        if self._file >= 0 and arrival.end > arrival.begin:
            self.done.append((arrival.begin, arrival.end))
            self._log.write(f"{arrival.begin} {arrival.end - arrival.begin} {arrival.crc32}\n")
            self._log.flush()
            arrival.begin, arrival.crc32 = arrival.end, 0

    def finish(self) -> None:
        """Gives the complete file its name."""
        with _writing(self.path):
            os.fsync(self._file)
            self.close()
            self._part.replace(self.path)
            self._journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what has arrived."""
        self.close()
        self._part.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes [begin, end) as they are on disk now."""
        with self._part.open("rb", buffering=0) as file:
            file.seek(begin)
            while begin < end and (data := file.read(min(_READ_BYTES, end - begin))):
                begin += len(data)
                yield data

    def close(self) -> None:
        """Records what is arriving and closes the files; a thread that still writes gets an error."""
        with self._lock:
            if self._file < 0:
                return
            # On a full disk nothing can be recorded: it is fetched again.
            with contextlib.suppress(OSError):
                for arrival in self._arriving:
                    self._record(arrival)
            with contextlib.suppress(OSError):
                self._log.close()
            os.close(self._file)
            self._file = -1

    def _restore(self, identity: str) -> list[Stretch]:
        """The stretches of an earlier run that are on disk as they were written."""
        try:
            first, *lines = self._journal.read_text(encoding="utf-8").splitlines()
            if first != identity or self._part.stat().st_size != self._nbytes:
                return []
        except (OSError, ValueError):
            return []
        return [stretch for line in lines for stretch in self._checked(line)]

    def _checked(self, line: str) -> list[Stretch]:
        numbers = line.split()
        if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            return []  # the line that a kill cut short
        begin, nbytes, expected = map(int, numbers)
        crc32 = 0
        for data in self.read(begin, begin + nbytes):
            crc32 = zlib.crc32(data, crc32)
        return [(begin, begin + nbytes)] if crc32 == expected and begin + nbytes <= self._nbytes else []


def gaps(done: list[Stretch], begin: int, end: int) -> list[Stretch]:
    """The parts of [begin, end) that no stretch of `done` covers, in order."""
    result = []
    for first, last in sorted(done):
        if last <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            result.append((begin, first))
        begin = max(begin, last)
    if begin < end:
        result.append((begin, end))
    return result


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors inside are a disk's, and become its sentence."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error
