"""The experts of a block as branches: the rows of the stream that each one reads, and the factors of its output.

The shared expert is a branch of all rows. A block's output is its stream plus the sum of its branches, so each branch
can be computed, tuned and exchanged by itself. Streams are float32 [rows, hidden] in host memory; what is computed is
computed on the weights' device, some rows at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.model.reference import WeightScope, route, swiglu, zero_centred_norm
from onebox.spec.model import ModelSpec

__all__ = ["CHUNK_ROWS", "PARTS", "Branch", "ExpertInput", "Matrices", "branch_sum", "row_chunks"]

CHUNK_ROWS = 8192
"""Rows that are computed at a time."""
PARTS = ("gate_proj", "up_proj", "down_proj")

Matrices = tuple[Tensor, Tensor, Tensor]
"""The gate, up and down matrices of an expert."""


class Branch(NamedTuple):
    """One expert of a block, its rows int64 [n], ascending, and the factors of its output float32 [n]."""

    name: str
    rows: Tensor
    factors: Tensor

    @property
    def modules(self) -> list[str]:
        """The names of its three matrices."""
        return [f"{self.name}.{part}" for part in PARTS]

    def before(self, end: int) -> "Branch":
        """The branch of the rows before `end` alone."""
        count = int(torch.searchsorted(self.rows, end))
        return Branch(self.name, self.rows[:count], self.factors[:count])


@dataclass(frozen=True)
class ExpertInput:
    """The stream that a block's experts read, before its norm: float32 [rows, hidden]. `w` are the block's weights."""

    spec: ModelSpec
    w: WeightScope
    stream: Tensor

    def at(self, rows: Tensor | slice) -> Tensor:
        """The normed rows, on the weights' device."""
        norm = self.w["post_attention_layernorm.weight"]
        return zero_centred_norm(self.stream[rows].to(norm.device), norm, self.spec.rms_norm_eps)

    def branches(self, name: str) -> list[Branch]:
        """The shared expert of the block `name`, then every routed expert, with the rows that the router sends it."""
        shares, chosen, gates = [], [], []
        for rows in row_chunks(len(self.stream)):
            x = self.at(rows)
            part = route(self.spec, self.w.under("mlp"), x)
            shares.append(part[0].cpu())
            chosen.append(part[1].cpu())
            gates.append(F.linear(x, self.w["mlp.shared_expert_gate.weight"]).sigmoid().squeeze(-1).cpu())
        shared = Branch(f"{name}.mlp.shared_expert", torch.arange(len(self.stream)), torch.cat(gates))
        return [shared, *_routed(f"{name}.mlp.experts", self.spec.num_experts, torch.cat(shares), torch.cat(chosen))]

    def add(self, out: Tensor, branch: Branch, matrices: Matrices, factor: float = 1.0) -> None:
        """Adds `factor` times the branch's output to `out`, float32 [rows, hidden] in host memory."""
        for part in row_chunks(len(branch.rows)):
            rows, factors = branch.rows[part], branch.factors[part]
            found = branch_sum(self.at(rows), [(torch.arange(len(rows)), factors)], [matrices])
            out[rows] += factor * found.to(out.device)


def _routed(name: str, num_experts: int, shares: Tensor, chosen: Tensor) -> Iterator[Branch]:
    """The experts' branches, of each row's shares and chosen experts [rows, k]."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=num_experts).tolist()
    for expert, places in enumerate(order.split(counts)):  # type: ignore[no-untyped-call]
        yield Branch(f"{name}.{expert}", places // chosen.shape[1], shares.flatten()[places])


def branch_sum(x: Tensor, parts: Sequence[tuple[Tensor, Tensor]], matrices: Sequence[Matrices]) -> Tensor:
    """The sum of some branches for x [n, hidden]; each part is (rows of x, their factors), in host memory."""
    out = torch.zeros_like(x)
    for (rows, factors), weights in zip(parts, matrices, strict=True):
        at, by = rows.to(x.device), factors.to(x.device)
        # A row occurs once in a branch, so the order of these additions is fixed.
        out = out.index_add(0, at, by[:, None] * swiglu(x[at], *weights))
    return out


def row_chunks(num_rows: int) -> Iterator[slice]:
    return (slice(begin, min(num_rows, begin + CHUNK_ROWS)) for begin in range(0, num_rows, CHUNK_ROWS))
