"""The promise of every kernel: a row's bits do not depend on the other rows."""

from collections.abc import Callable, Sequence

import torch


def assert_rows_stand_alone(outputs: Callable[[slice], Sequence[torch.Tensor]], counts: Sequence[int]) -> None:
    """`outputs(rows)` computes a slice of fixed rows; the first, second and last of each count also run alone."""
    alone = {row: [part[0].clone() for part in outputs(slice(row, row + 1))] for row in _rows(counts)}
    for count in counts:
        together = outputs(slice(0, count))
        for row in _rows([count]):
            for single, among in zip(alone[row], together, strict=True):
                assert torch.equal(single, among[row])


def _rows(counts: Sequence[int]) -> set[int]:
    return {0, 1, *(count - 1 for count in counts)}
