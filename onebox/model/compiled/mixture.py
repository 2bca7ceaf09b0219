"""The experts of a layer, compiled: the router's choice, the chosen experts, the shared expert."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.kernels.arrays import Array, Stored
from onebox.model.compiled.arithmetic import exp, product, sigmoid, silu
from onebox.model.compiled.jit import compiled, inner

__all__ = ["ExpertArrays", "mixture_step", "routed"]

_NOT_YET = np.int64(-1)


class ExpertArrays(NamedTuple):
    """E experts of inner size I, a shared one of inner size J."""

    gate_up: Stored
    """[E, H * 2I]: each in blocks, the gate's columns first."""
    down: Stored
    """[E, I * H]: each in blocks."""
    shared_gate_up: Stored
    """[H, 2J] in blocks."""
    shared_down: Stored
    """[J, H] in blocks."""


@compiled
def mixture_step(x: Array, logits: Array, arrays: ExpertArrays, k: int) -> Array:
    """What the experts add to rows x [R, H] with the router's logits [R, E + 1], the last of them the shared gate's."""
    ids, shares = _route(logits, k)
    out = routed(x, ids, shares, arrays.gate_up, arrays.down)
    shared = product(_gated(product(x, arrays.shared_gate_up)), arrays.shared_down)
    for row in range(len(out)):
        gate = sigmoid(logits[row, len(arrays.gate_up)])
        for i in range(out.shape[1]):
            out[row, i] += gate * shared[row, i]
    return out


@compiled
def routed(x: Array, ids: NDArray[np.int64], shares: Array, gate_up: Stored, down: Stored) -> Array:
    """Each row [H] of x through its k experts, weighted and summed in the order of ids [R, k].

    The rows of an expert go through it together; what they find waits until all of a row's are there.
    """
    (rows, hidden), k = x.shape, ids.shape[1]
    own = np.empty((rows, k, hidden), dtype=np.float32)
    places = np.empty(rows * k, dtype=np.int64)
    for expert in range(len(gate_up)):
        count = 0
        for place in range(len(places)):
            if ids[place // k, place % k] == expert:
                places[count] = place
                count += 1
        if count:
            some = np.empty((count, hidden), dtype=np.float32)
            for i in range(count):
                for j in range(hidden):
                    some[i, j] = x[places[i] // k, j]
            found = product(_gated(product(some, gate_up[expert])), down[expert])
            for i in range(count):
                for j in range(hidden):
                    own[places[i] // k, places[i] % k, j] = found[i, j]
    out = np.zeros((rows, hidden), dtype=np.float32)
    for row in range(rows):
        for slot in range(k):
            for i in range(hidden):
                out[row, i] += own[row, slot, i] * shares[row, slot]
    return out


@inner
def _route(logits: Array, k: int) -> tuple[NDArray[np.int64], Array]:
    """(ids, shares) [R, k] of the k largest of all but the last of logits [R, E + 1]; of equal ones the first."""
    num_experts = logits.shape[1] - 1
    ids = np.empty((len(logits), k), dtype=np.int64)
    shares = np.empty((len(logits), k), dtype=np.float32)
    for row in range(len(logits)):
        is_taken = np.zeros(num_experts, dtype=np.bool_)
        whole = np.float32(0)
        for slot in range(k):
            best = _NOT_YET
            for expert in range(num_experts):
                if not is_taken[expert] and (best < 0 or logits[row, expert] > logits[row, best]):
                    best = np.int64(expert)
            ids[row, slot] = best
            is_taken[best] = True
            shares[row, slot] = exp(logits[row, best] - logits[row, ids[row, 0]])
            whole += shares[row, slot]
        for slot in range(k):
            shares[row, slot] /= whole
    return ids, shares


@inner
def _gated(both: Array) -> Array:
    """SiLU of the first half times the second: [R, I] of [R, 2I]."""
    half = both.shape[1] // 2
    out = np.empty((len(both), half), dtype=np.float32)
    for row in range(len(both)):
        for i in range(half):
            out[row, i] = silu(both[row, i]) * both[row, half + i]
    return out
