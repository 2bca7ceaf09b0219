"""Whether an MTP head was trained, and with this model: its matrices beside those of the model's own layers.

A head of noise (random, shuffled, wrongly unpacked) has finite values and the right shapes, loads, and drafts tokens
that are always rejected. Three facts show it:

- structure: in a matrix of independent numbers the largest singular value is at the edge of Marchenko and Pastur's law,
  sigma (sqrt(rows) + sqrt(columns)), and the sizes of rows and columns vary no more than chance makes them. Training
  gives outliers in both. A matrix counts as noise only where the same matrix of the model's own layers does not.
- size: the root mean square of a matrix beside that of the model's layers.
- fit: `mtp.fc` reads the model's embedding and its hidden states, so its columns are related to those of the
  embedding and of the LM head. In a head of another model they are related by chance, as after a permutation.

Bounded: a few experts and two layers are sampled, one matrix is in memory at a time, and at most 1,024 rows of it are
used.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.source import Checkpoint
from onebox.checkpoint.weights import can_slice_rows, read_weight, slice_rows

__all__ = ["HeadJudgement", "judge_head"]

_NUM_EXPERTS = 4
_NUM_LAYERS = 2
_MAX_ROWS = 1024
_TABLE_ROWS = 2048
"""Rows of the embedding and of the LM head that are compared with `mtp.fc`."""
_NOISE_EDGE, _NOISE_SPREAD = 1.1, 1.5
"""Below both a matrix is noise, which has 1 in both: within 0.15 from 128 rows on."""
_TRAINED_EDGE, _TRAINED_SPREAD = 1.15, 2.0
"""Above one of these it is not; between, nothing is concluded."""
_OFF_SIZE = 8.0
_NUM_PERMUTATIONS = 24
_FITS = 6.0
_FOREIGN = 4.0
"""Standard deviations over chance: a fit is above the first; below the second there is none."""
_ITERATIONS = 24


@dataclass(frozen=True)
class HeadJudgement:
    """What was found. `complaint` is None where the head looks trained, and where nothing can be said."""

    complaint: str | None
    compared: str
    """What was read, in words."""


@dataclass(frozen=True)
class _Look:
    """One matrix: how far it is from independent numbers, and its size."""

    edge: float
    """Largest singular value over the edge of noise."""
    spread: float
    """Variance of row or column sizes over that of noise, whichever is larger."""
    rms: float

    @property
    def is_noise(self) -> bool:
        return self.edge < _NOISE_EDGE and self.spread < _NOISE_SPREAD

    @property
    def is_trained(self) -> bool:
        return self.edge > _TRAINED_EDGE or self.spread > _TRAINED_SPREAD


def judge_head(checkpoint: Checkpoint, binding: Binding) -> HeadJudgement:
    """Reads about 50 matrices of a checkpoint with a complete head; values must have been checked to be finite."""
    reader = _Reader(checkpoint, binding)
    layers = _sampled(list(checkpoint.spec.full_layers), _NUM_LAYERS)
    experts = _sampled(list(range(checkpoint.spec.num_experts)), _NUM_EXPERTS)
    prefix = checkpoint.spec.text_prefix
    head = reader.looks(["mtp.layers.0"], experts)
    own = reader.looks([f"{prefix}layers.{layer}" for layer in layers], experts)
    compared = (
        f"attention, shared expert and {len(experts)} of {checkpoint.spec.num_experts} experts beside those of "
        f"{'layers ' + ' and '.join(map(str, layers)) if layers else 'no layer'}; mtp.fc beside the embedding"
    )
    return HeadJudgement(_noise(head, own) or _off_size(head, own) or reader.misfit(), compared)


def _sampled(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


Looks = dict[str, list[_Look]]


def _noise(head: Looks, own: Looks) -> str | None:
    """Matrices that look like noise where the model's own do not; None if there are none, or nothing to compare."""
    telling = [kind for kind in head if kind in own and _share([look.is_trained for look in own[kind]]) >= 0.5]
    noisy = [kind for kind in telling if _share([look.is_noise for look in head[kind]]) > 0.5]
    if not noisy:
        return None
    what = "all of its matrices look" if len(noisy) == len(telling) else f"{', '.join(noisy)} look"
    edge, spread = (median(getattr(look, name) for kind in noisy for look in head[kind]) for name in ("edge", "spread"))
    theirs = median(look.spread for kind in noisy for look in own[kind])
    return (
        f"{what} like random numbers (largest singular value {edge:.2f} and sizes of rows and columns {spread:.1f} of "
        f"what chance gives; in the model's layers the sizes vary {theirs:.1f} times as much)"
    )


def _share(marks: list[bool]) -> float:
    return sum(marks) / len(marks)


def _off_size(head: Looks, own: Looks) -> str | None:
    ratios = {
        kind: median(look.rms for look in head[kind]) / median(look.rms for look in own[kind])
        for kind in head
        if kind in own
    }
    off = {kind: ratio for kind, ratio in ratios.items() if not 1 / _OFF_SIZE < ratio < _OFF_SIZE}
    if not off:
        return None
    kind, ratio = max(off.items(), key=lambda item: abs(math.log(item[1])))
    others = f", and {len(off) - 1} other matrices are off by {_OFF_SIZE:g} or more" if len(off) > 1 else ""
    return f"the weights of its {kind} are {ratio:.3g} times as large as those of the model's layers{others}"


class _Reader:
    """Reads matrices of one checkpoint and looks at them, one at a time."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding) -> None:
        self._checkpoint = checkpoint
        self._modules = binding.modules

    def looks(self, layers: list[str], experts: list[int]) -> Looks:
        """By kind of matrix; layers without it are left out."""
        found: Looks = defaultdict(list)
        for layer in layers:
            for kind, name in _matrices(layer, experts):
                if name in self._modules:
                    found[kind].append(_look(self._rows(self._modules[name], _MAX_ROWS)))
        return dict(found)

    def misfit(self) -> str | None:
        """Why `mtp.fc` does not belong to this model; None if it does, or if this model shows no such relation."""
        prefix = self._checkpoint.spec.text_prefix
        embedding, first = self._table(f"{prefix}embed_tokens"), self._first_layer()
        if embedding is None or first is None:
            return None
        # A packed LM head's rows cannot be read alone; the embedding decides then.
        outputs = self._table("lm_head") if "lm_head" in self._modules else embedding
        fc = self._read(self._modules["mtp.fc"]).chunk(2, dim=1)
        fits = [
            _relation(_gram(part * (1 + self._vector(f"mtp.pre_fc_norm_{name}"))), table)
            for part, name, table in zip(fc, ("embedding", "hidden"), (embedding, outputs), strict=True)
            if table is not None
        ]
        own = _relation(first, embedding)
        if own < _FITS or max(fits) >= _FOREIGN:
            return None
        return (
            "it does not belong to this model: mtp.fc is related to the embedding and the LM head by chance only "
            f"({' and '.join(f'{fit:.1f}' for fit in fits)} standard deviations; the model's first layer: {own:.1f})"
        )

    def _first_layer(self) -> Tensor | None:
        """The Gram matrix [H, H] of the first layer's projection of the embedding."""
        layer = f"{self._checkpoint.spec.text_prefix}layers.0"
        name = next(
            (n for n in (f"{layer}.linear_attn.in_proj_qkv", f"{layer}.self_attn.q_proj") if n in self._modules), None
        )
        if name is None:
            return None
        return _gram(self._rows(self._modules[name], _MAX_ROWS) * (1 + self._vector(f"{layer}.input_layernorm")))

    def _table(self, name: str) -> Tensor | None:
        """The Gram matrix [H, H] of rows of a table, their mean taken away; None where rows cannot be read alone."""
        bound = self._modules[name]
        if bound.module.shape[0] > _TABLE_ROWS and not can_slice_rows(bound):
            return None
        rows = self._rows(bound, _TABLE_ROWS)
        return _gram(rows - rows.mean(0))

    def _vector(self, name: str) -> Tensor:
        return self._read(self._modules[name])

    def _rows(self, bound: Bound, count: int) -> Tensor:
        """At most `count` rows, in four stretches where rows can be read alone."""
        rows = bound.module.shape[0]
        if rows <= count:
            return self._read(bound)
        if not can_slice_rows(bound):
            return self._read(bound)[:: -(-rows // count)]
        length = count // 4
        starts = [128 * (place * (rows - length) // (3 * 128)) for place in range(4)]
        return torch.cat([self._read(slice_rows(bound, start, start + length)) for start in starts])

    def _read(self, bound: Bound) -> Tensor:
        return read_weight(bound, zeros_offset=self._checkpoint.gptq_zeros_offset)


def _matrices(layer: str, experts: list[int]) -> Iterator[tuple[str, str]]:
    """(kind, module name) of the matrices of one attention layer that are compared."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield name, f"{layer}.self_attn.{name}"
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"shared expert's {name}", f"{layer}.mlp.shared_expert.{name}"
        for expert in experts:
            yield f"experts' {name}", f"{layer}.mlp.experts.{expert}.{name}"


def _look(weight: Tensor) -> _Look:
    """Of a matrix float32 [rows, columns]."""
    rows, columns = weight.shape
    power = weight.square()
    mean = float(power.mean())
    if not mean:
        return _Look(0.0, 0.0, 0.0)
    # Of independent numbers the mean square of a row of n varies by (kurtosis - 1) / n of itself.
    excess = max(float(power.square().mean()) / mean**2 - 1, 1e-6)
    spreads = [float(sizes.var()) / mean**2 * count / excess for sizes, count in _sizes(power)]
    edge = math.sqrt(mean) * (math.sqrt(rows) + math.sqrt(columns))
    return _Look(_largest_singular_value(weight) / edge, max(spreads), math.sqrt(mean))


def _sizes(power: Tensor) -> list[tuple[Tensor, int]]:
    return [(power.mean(1), power.shape[1]), (power.mean(0), power.shape[0])]


def _largest_singular_value(weight: Tensor) -> float:
    """By power iteration from four vectors: from below, and within a few percent for noise, whose edge is crowded."""
    vectors = torch.randn(weight.shape[1], 4, generator=torch.Generator().manual_seed(0))
    for _ in range(_ITERATIONS):
        vectors, _triangle = torch.linalg.qr(weight.T @ (weight @ vectors))
    return float(torch.linalg.matrix_norm(weight @ vectors, ord=2))


def _gram(rows: Tensor) -> Tensor:
    return rows.T @ rows


def _relation(first: Tensor, second: Tensor) -> float:
    """How far the inner product of two Gram matrices [H, H] is from that of permuted ones, in standard deviations.

    Either way: a projection may attend to the large dimensions of what it reads or even them out.
    """
    draw = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(first), generator=draw) for _ in range(_NUM_PERMUTATIONS)]
    by_chance = torch.stack([(first[order][:, order] * second).sum() for order in orders])
    return float(((first * second).sum() - by_chance.mean()).abs() / by_chance.std())
