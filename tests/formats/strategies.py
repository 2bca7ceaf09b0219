"""Weights for property tests: ordinary ones and the kinds that break quantisers."""

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("normal", "zeros", "tiny", "denormal", "huge", "wide", "one spike", "constant", "levels")


def make_weight(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    """A float32 matrix [rows, columns] of the given kind; the first row of most kinds is left at zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if kind == "zeros":
        return torch.zeros(rows, columns)
    if kind == "tiny":
        weight = weight * 1e-9
    elif kind == "denormal":
        weight = weight * 1e-42
    elif kind == "huge":
        weight = weight * 1e4
    elif kind == "wide":
        weight = weight * torch.exp2(torch.randint(-20, 11, (rows, columns), generator=generator))
    elif kind == "one spike":
        weight = torch.zeros(rows, columns)
        weight[-1, -1] = -3.0
    elif kind == "constant":
        weight = torch.full((rows, columns), -0.75)
    elif kind == "levels":  # quotients that fall on ties
        weight = torch.randint(-15, 16, (rows, columns), generator=generator) / 2
    if rows > 1 and kind != "constant":
        weight[0] = 0
    return weight


@st.composite
def weights(draw: st.DrawFn, *, max_rows: int = 9, max_columns: int = 70, multiple: int = 1) -> Tensor:
    """Float32 matrices; columns are a multiple of `multiple`."""
    columns = draw(st.integers(1, max(1, max_columns // multiple))) * multiple
    return make_weight(
        draw(st.integers(1, max_rows)), columns, draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**31))
    )
