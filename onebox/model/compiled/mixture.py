"""The experts of a layer, compiled: the router's choice, the chosen experts, the shared expert."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.kernels.common.array_types import Array, Stored
from onebox.model.compiled.arithmetic import add_norm, copy, exp, product, rounded, sigmoid, silu
from onebox.model.compiled.jit import compiled, inner, never_inline

__all__ = ["ExpertArrays", "mixture_step", "routed"]

_NOT_YET, _ZERO = np.int64(-1), np.float32(0)


class ExpertArrays(NamedTuple):
    """E experts of inner size I, a shared one of inner size J, and their norm and router."""

    norm: Array
    """[H]."""
    router: Stored
    """[H, E + 1] in blocks, the last column the shared expert's gate."""
    gate_up: Stored
    """[E, H * 2I]: each in blocks, the gate's columns first."""
    down: Stored
    """[E, I * H]: each in blocks."""
    shared_gate_up: Stored
    """[H, 2J] in blocks."""
    shared_down: Stored
    """[J, H] in blocks."""


@compiled
def mixture_step(mixed: Array, residual: Array, arrays: ExpertArrays, k: int, eps: float, out: Stored) -> Array:
    """The stream [R, H], mixed + residual; what the experts add to it is written to out [R, H]."""
    x, stream = add_norm(mixed, residual, arrays.norm, eps)
    logits = product(x, arrays.router)
    ids, shares = _route(logits, k)
    total = routed(x, ids, shares, arrays.gate_up, arrays.down)
    shared = product(_gated(product(x, arrays.shared_gate_up)), arrays.shared_down)
    for row in range(len(total)):
        _add(shared[row], sigmoid(logits[row, len(arrays.gate_up)]), total[row])
        _store(total[row], out[row])
    return stream


@compiled
def routed(x: Array, ids: NDArray[np.int64], shares: Array, gate_up: Stored, down: Stored) -> Array:
    """Each row [H] of x through its k experts, weighted and summed in the order of ids [R, k].

    The rows of an expert are computed together; a row is summed when all of its experts are done.
    """
    never_inline()
    (rows, hidden), k = x.shape, ids.shape[1]
    places, edges = _by_expert(ids, len(gate_up))
    own = np.empty((rows * k, hidden), dtype=np.float32)
    for expert in range(len(gate_up)):
        chosen_by = places[edges[expert] : edges[expert + 1]]
        if len(chosen_by):
            some = np.empty((len(chosen_by), hidden), dtype=np.float32)
            for i in range(len(chosen_by)):
                copy(x[chosen_by[i] // k], some[i])
            found = product(_gated(product(some, gate_up[expert])), down[expert])
            for i in range(len(chosen_by)):
                copy(found[i], own[chosen_by[i]])
    out = np.empty((rows, hidden), dtype=np.float32)
    for row in range(rows):
        for i in range(hidden):
            out[row, i] = _ZERO
        for slot in range(k):
            _add(own[row * k + slot], shares[row, slot], out[row])
    return out


@inner
def _by_expert(ids: NDArray[np.int64], num_experts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the places of ids [R * k], expert by expert and then in their order; where each expert's begin [E + 1])."""
    never_inline()
    rows, k = ids.shape
    edges = np.empty(num_experts + 1, dtype=np.int64)
    for expert in range(num_experts + 1):
        edges[expert] = 0
    for row in range(rows):
        for slot in range(k):
            edges[ids[row, slot]] += 1
    for expert in range(num_experts):
        edges[expert + 1] += edges[expert]
    places = np.empty(rows * k, dtype=np.int64)
    # From the last to the first: an expert's end moves down to where it begins.
    for place in range(rows * k - 1, -1, -1):
        expert = ids[place // k, place % k]
        edges[expert] -= 1
        places[edges[expert]] = place
    return places, edges


# Whole rows in functions of their own: a row's address is then computed once, outside of the loop.


@inner
def _store(numbers: Array, out: Stored) -> None:
    for i in range(len(out)):
        out[i] = rounded(numbers[i], out)


@inner
def _add(added: Array, share: float, out: Array) -> None:
    for i in range(len(out)):
        out[i] += added[i] * share


@inner
def _route(logits: Array, k: int) -> tuple[NDArray[np.int64], Array]:
    """(ids, shares) [R, k] of the k largest of all but the last of logits [R, E + 1]; of equal ones the first."""
    never_inline()
    num_experts = logits.shape[1] - 1
    ids = np.empty((len(logits), k), dtype=np.int64)
    shares = np.empty((len(logits), k), dtype=np.float32)
    is_free = np.empty(num_experts, dtype=np.int64)
    for row in range(len(logits)):
        for expert in range(num_experts):
            is_free[expert] = 1
        whole = _ZERO
        for slot in range(k):
            best = _NOT_YET
            for expert in range(num_experts):
                if is_free[expert] and (best < 0 or logits[row, expert] > logits[row, best]):
                    best = np.int64(expert)
            ids[row, slot] = best
            is_free[best] = 0
            shares[row, slot] = exp(logits[row, best] - logits[row, ids[row, 0]])
            whole += shares[row, slot]
        for slot in range(k):
            shares[row, slot] /= whole
    return ids, shares


@inner
def _gated(both: Array) -> Array:
    """SiLU of the first half times the second: [R, I] of [R, 2I]."""
    never_inline()
    half = both.shape[1] // 2
    out = np.empty((len(both), half), dtype=np.float32)
    for row in range(len(both)):
        for i in range(half):
            out[row, i] = silu(both[row, i]) * both[row, half + i]
    return out
