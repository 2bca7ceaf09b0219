"""The promise of every kernel: a row's bits do not depend on the other rows."""

from collections.abc import Callable, Sequence

import torch


def assert_rows_stand_alone(outputs: Callable[[slice], Sequence[torch.Tensor]], counts: Sequence[int]) -> None:
    """`outputs(rows)` computes a slice of fixed rows; the first, second and last of each count also run alone."""
    for count in counts:
        together = outputs(slice(0, count))
        for row in {0, 1, count - 1}:
            for alone, among in zip(outputs(slice(row, row + 1)), together, strict=True):
                assert torch.equal(alone[0], among[row])
