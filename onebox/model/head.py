"""The LM head in two planes, so that a decode step reads three quarters of it and of the rest what can be sampled.

On a GPU whose memory is slow enough (`planes_pay`) an INT8 head is stored so, in the same bytes
(`onebox.formats.head_planes`). Its logits are defined as the high plane's sum plus the low plane's, each rounded by
itself: those of an INT8 matrix in two float32 sums.

    start        logits without the low plane
    candidates   completes those that a row may sample: at temperature 0, or with a top_k of at most 64
    complete     completes all: for log-probabilities, penalties, biases, grammars, other sampling
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_ROWS, from_fragments, rows_of_tiles, tile_index
from onebox.formats.head_planes import HIGH_TILE_BYTES, split_planes
from onebox.kernels import int_linear
from onebox.kernels.head import complete_candidates, complete_logits
from onebox.kernels.head.reference import LowPlane
from onebox.model.linear import DecodeActivations, IntLinear, RowLinear, same_kind

__all__ = ["HighRows", "PlaneHead", "SampledRows"]

_TILES_AT_ONCE = 1024
"""Tiles of all groups that are split at once: what is made on the way takes several times their bytes."""


class SampledRows(NamedTuple):
    """How the rows of incomplete logits are sampled."""

    temperature: Tensor
    """[R]."""
    top_k: Tensor
    """[R]."""
    num_rows: Tensor | None
    """int32 [1]: rows from this number on are blank; None where none is."""
    is_complete: Tensor
    """int32 [1]: not 0 where `PlaneHead.complete` was called for these logits."""


@dataclass(frozen=True)
class HighRows:
    """Some rows of a head in two planes, by their high plane alone: enough for drafts, which need not be exact."""

    high: Tensor
    """uint8 [H/128, ceil(N/16), 1536]."""
    scales: Tensor
    """[N]."""

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        """[R, N]; at most 128 rows."""
        return int_linear.int6_linear(*rows.fixed_point, self.high, self.scales, out_dtype or rows.x.dtype)

    def blank(self, num_rows: int) -> "HighRows":
        groups, _, width = self.high.shape
        high = self.high.new_zeros(groups, -(-num_rows // TILE_ROWS), width)
        return HighRows(high, self.scales.new_empty(num_rows))

    def copy_rows(self, source: RowLinear, rows: Tensor, places: Tensor) -> None:
        """Of another of its kind, or of a head in two planes."""
        given = source.high_rows() if isinstance(source, PlaneHead) else same_kind(self, source)
        rows_of_tiles(self.high)[tile_index(places)] = rows_of_tiles(given.high)[tile_index(rows)]
        self.scales[places] = given.scales[rows]


@dataclass(frozen=True)
class PlaneHead:
    """y = x W^T for an INT8 matrix [V, H] with a scale a row."""

    high: Tensor
    """uint8 [H/128, ceil(V/16), 1536]."""
    plane: LowPlane

    @classmethod
    def of(cls, linear: IntLinear) -> "PlaneHead":
        """Of an INT8 linear, whose tensors can be dropped."""
        groups, num_tiles, _ = linear.tiles.shape
        new = linear.tiles.new_empty
        num_rows = num_tiles * TILE_ROWS
        high, low = new(groups, num_tiles, HIGH_TILE_BYTES), new(num_rows, groups * 32)
        radius = new(num_rows, dtype=torch.float32)
        for start in range(0, num_tiles, _TILES_AT_ONCE):
            tiles = slice(start, start + _TILES_AT_ONCE)
            rows = slice(start * TILE_ROWS, (start + _TILES_AT_ONCE) * TILE_ROWS)
            high[:, tiles], low[rows], radius[rows] = split_planes(from_fragments(linear.tiles[:, tiles], 8))
        return cls(high, LowPlane(low, radius, linear.scales))

    def decode(self, rows: DecodeActivations, out_dtype: torch.dtype | None = None) -> Tensor:
        """[R, V], complete; at most 128 rows."""
        logits = self.start(rows)
        self.complete(rows, logits)
        return logits.to(out_dtype or rows.x.dtype)

    def prefill(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        parts = [self.decode(DecodeActivations(some), out_dtype) for some in torch.split(x, 128)]
        return torch.cat(parts)

    def high_rows(self) -> HighRows:
        """All its rows by their high plane, without a copy."""
        return HighRows(self.high, self.plane.scale)

    def blank(self, num_rows: int) -> HighRows:
        """So many rows into which rows of this head can be copied; their numbers are anything."""
        return self.high_rows().blank(num_rows)

    def copy_rows(self, source: RowLinear, rows: Tensor, places: Tensor) -> None:
        """Of another head in two planes, complete."""
        given = same_kind(self, source)
        rows_of_tiles(self.high)[tile_index(places)] = rows_of_tiles(given.high)[tile_index(rows)]
        for own, other in zip(self.plane, given.plane, strict=True):
            own[places] = other[rows]

    def start(self, rows: DecodeActivations) -> Tensor:
        """float32 [R, V], incomplete."""
        return int_linear.int6_linear(*rows.fixed_point, self.high, self.plane.scale)

    def complete(self, rows: DecodeActivations, logits: Tensor) -> None:
        """Completes all logits, in place."""
        complete_logits(logits, *rows.fixed_point, self.plane)

    def complete_candidates(self, rows: DecodeActivations, logits: Tensor, sampled: SampledRows) -> None:
        """Completes what may be sampled, in place; nothing where all is complete."""
        temperature, top_k, num_rows, is_complete = sampled
        complete_candidates(logits, *rows.fixed_point, self.plane, temperature, top_k, num_rows, is_complete)
