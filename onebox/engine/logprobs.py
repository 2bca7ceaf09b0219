"""Log-probabilities of tokens, one by one and as arrays."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["LogprobRows", "PackedLogprobs", "TokenLogprob"]


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability under the model itself, before temperature, limits and masks."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, as many as were asked for."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedLogprobs(Sequence[TokenLogprob]):
    """Log-probabilities of a few tokens, float32, as bytes until they are read.

    A stream whose client stops reading is computed to its end all the same: with 20 alternatives, a token that waits
    takes 200 bytes and not 4 kB.
    """

    num_top: int
    rows: bytes
    """For each token: id, logprob, rank, and id and logprob of each alternative."""

    @classmethod
    def pack(cls, rows: Sequence[TokenLogprob]) -> "PackedLogprobs":
        """Of rows with equally many alternatives."""
        num_top = len(rows[0].top) if rows else 0
        values = ((row.token_id, row.logprob, row.rank, *(value for top in row.top for value in top)) for row in rows)
        return cls(num_top, b"".join(_row_struct(num_top).pack(*row) for row in values))

    def __len__(self) -> int:
        return len(self.rows) // _row_struct(self.num_top).size

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprob, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | tuple[TokenLogprob, ...]:
        return tuple(self)[place]

    def __iter__(self) -> Iterator[TokenLogprob]:
        for token_id, logprob, rank, *top in _row_struct(self.num_top).iter_unpack(self.rows):
            yield TokenLogprob(token_id, logprob, rank, tuple(zip(top[::2], top[1::2], strict=True)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, PackedLogprobs) else other)

    __hash__ = None  # type: ignore[assignment]


@lru_cache(maxsize=64)
def _row_struct(num_top: int) -> struct.Struct:
    return struct.Struct("=ifi" + "if" * num_top)


@dataclass(frozen=True, eq=False)
class LogprobRows(Sequence[TokenLogprob]):
    """Log-probabilities of n tokens with k alternatives each, as arrays.

    As tuples they take ten times the memory, and both processes' other threads would wait while they are pickled.
    """

    token_ids: NDArray[np.int32]
    """[n], as are the next two."""
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    """[n, k]."""
    top_logprobs: NDArray[np.float32]
    """[n, k]."""

    @classmethod
    def pack(cls, rows: Sequence[TokenLogprob]) -> "LogprobRows":
        """Of rows with equally many alternatives."""
        num_top = len(rows[0].top) if rows else 0
        tops = [top for row in rows for top in row.top]
        return cls(
            np.array([row.token_id for row in rows], np.int32),
            np.array([row.logprob for row in rows], np.float32),
            np.array([row.rank for row in rows], np.int32),
            np.array([token_id for token_id, _ in tops], np.int32).reshape(len(rows), num_top),
            np.array([logprob for _, logprob in tops], np.float32).reshape(len(rows), num_top),
        )

    @classmethod
    def join(cls, parts: Sequence["LogprobRows"]) -> "LogprobRows":
        """One after the other, with equally many alternatives."""
        if not parts:
            return cls.pack(())
        return cls(*map(np.concatenate, zip(*(part._arrays for part in parts), strict=True)))

    @property
    def num_values(self) -> int:
        return self.token_ids.size + self.top_ids.size

    @property
    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, place: slice) -> "LogprobRows": ...
    def __getitem__(self, place: int | slice) -> "TokenLogprob | LogprobRows":
        if isinstance(place, slice):
            return LogprobRows(*(array[place] for array in self._arrays))
        token_id, logprob, rank, top_ids, top_logprobs = (array[place].tolist() for array in self._arrays)
        return TokenLogprob(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))

    def __iter__(self) -> Iterator[TokenLogprob]:
        # Piece by piece, so that the numbers of all rows are never Python objects at once.
        for start in range(0, len(self), 64):
            lists = (array[start : start + 64].tolist() for array in self._arrays)
            for token_id, logprob, rank, top_ids, top_logprobs in zip(*lists, strict=True):
                yield TokenLogprob(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))
