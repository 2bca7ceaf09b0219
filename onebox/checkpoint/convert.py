"""Turns choices into units of work: the output tensors of a module, and the function that computes their bytes.

A unit either *moves* byte ranges or *makes* tensors. All names, dtypes and sizes are known before anything is read, so
that a shard's header can be written first and its data streamed after it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.calibrated import Calibration, calibrated_matrix
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.recipe import Action, ModuleChoice, rounded_tensors
from onebox.checkpoint.rounding import SharedScale, TensorChunk, round_matrix, shared_scales
from onebox.checkpoint.tensors import load, to_bytes
from onebox.formats import gptq_to_packed, int8_rows_to_group_int, pack_quantized, unpack_gptq
from onebox.formats.bits import pack_words
from onebox.spec.errors import MismatchError, OneboxError, UnsupportedError
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import INTEGER_BITS, Layout, StoredTensor, tensor_bytes

__all__ = ["OutputTensor", "Unit", "make_units"]


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output; `source` is the byte range it is copied from, or None if it is computed."""

    name: str
    stored: StoredTensor
    source: TensorEntry | None = None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.stored)


@dataclass(frozen=True)
class Unit:
    """The output of one module. `make` yields (index into tensors, bytes), in order per tensor; None: all are moved."""

    tensors: tuple[OutputTensor, ...]
    action: Action
    module_class: ModuleClass
    origin: str
    make: Callable[[], Iterator[TensorChunk]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def make_units(choices: list[ModuleChoice], *, relabel: bool, calibration: Calibration | None = None) -> list[Unit]:
    """The units of all choices in order. `relabel` converts moved modules to compressed-tensors' layout.

    Fused experts stay fused if they are only moved: one unit then covers all experts of a tensor. What `calibration`
    holds of the modules to quantise is written; the others are rounded to nearest.
    """
    units: list[Unit] = []
    fused_done: set[str] = set()
    shared = shared_scales(choices)
    calibrated = calibration.tensors if calibration else {}
    for choice in choices:
        fused = choice.bound.fused
        if choice.action is Action.QUANTIZE and choice.module.name in calibrated:
            units.append(_calibrated_unit(choice, calibrated[choice.module.name]))
        elif fused and choice.action is Action.MOVE:
            if fused.name not in fused_done:
                fused_done.add(fused.name)
                units.append(_move(choice, {fused.name: fused}))
        else:
            units.append(_unit(choice, shared.get(choice.module.name), relabel=relabel))
    return units


def _unit(choice: ModuleChoice, shared: SharedScale | None, *, relabel: bool) -> Unit:
    if choice.action is Action.QUANTIZE:
        tensors = rounded_tensors(choice.target, *choice.module.shape)
        return _make(choice, tensors, Action.QUANTIZE, partial(round_matrix, choice, shared))
    layout = choice.bound.stored.layout
    if relabel and layout is Layout.GPTQ:
        return _gptq_unit(choice)
    if relabel and layout is Layout.NVFP4_MULTIPLIES:
        return _modelopt_unit(choice)
    if relabel and layout is Layout.INT8_ROW:
        return _int8_unit(choice)
    if relabel and layout is Layout.FP8_BLOCK_INV:
        names = {"weight_scale_inv": "weight_scale"}
        entries = {_name(choice, names.get(suffix, suffix)): entry for suffix, entry in choice.bound.tensors.items()}
        return _move(choice, entries, Action.RELABEL)
    return _move(choice, {entry.name: entry for entry in choice.bound.tensors.values()})


def _calibrated_unit(choice: ModuleChoice, found: Mapping[str, TensorEntry]) -> Unit:
    tensors = rounded_tensors(choice.target, *choice.module.shape)
    entries = [found[suffix] for suffix in tensors]
    if [entry.stored for entry in entries] != list(tensors.values()):
        raise MismatchError(f"The calibrated tensors of {choice.module.name} are not those of {choice.target}.")
    return _make(choice, tensors, Action.CALIBRATE, partial(calibrated_matrix, entries))


def _name(choice: ModuleChoice, suffix: str) -> str:
    return f"{choice.module.name}.{suffix}"


def _move(choice: ModuleChoice, entries: dict[str, TensorEntry], action: Action = Action.MOVE) -> Unit:
    tensors = tuple(OutputTensor(name, entry.stored, entry) for name, entry in entries.items())
    return Unit(tensors, action, choice.module.module_class, choice.source.role)


def _make(
    choice: ModuleChoice, tensors: dict[str, StoredTensor], action: Action, make: Callable[[], Iterator[TensorChunk]]
) -> Unit:
    outputs = tuple(OutputTensor(_name(choice, suffix), stored) for suffix, stored in tensors.items())
    named = partial(_named, choice.module.name, make)
    return Unit(outputs, action, choice.module.module_class, choice.source.role, named)


def _named(name: str, make: Callable[[], Iterator[TensorChunk]]) -> Iterator[TensorChunk]:
    """Runs `make`, prefixing error messages with the module's name."""
    try:
        yield from make()
    except OneboxError as error:
        raise type(error)(f"{name}: {error}") from None


def _pieces(tensors: dict[str, torch.Tensor], order: list[str]) -> Iterator[TensorChunk]:
    for index, suffix in enumerate(order):
        yield index, to_bytes(tensors[suffix])


# --- the same values in compressed-tensors' layout ---------------------------------------------------------------


def _gptq_unit(choice: ModuleChoice) -> Unit:
    rows, columns = choice.module.shape
    stored, config = choice.bound.stored, choice.source.checkpoint.quantization_config or {}
    if config.get("desc_act"):
        raise UnsupportedError(
            f"The {choice.source.role} checkpoint was quantised with desc_act (act-order), which compressed-tensors "
            "cannot describe together with other formats: keep its format, or start from the BF16 checkpoint."
        )
    bits = INTEGER_BITS[stored.format]
    groups = -(-columns // (stored.group_size or columns))
    tensors = {
        "weight_packed": StoredTensor("I32", (rows, columns * bits // 32)),
        "weight_scale": StoredTensor(choice.bound.tensors["scales"].dtype, (rows, groups)),
        "weight_shape": StoredTensor("I64", (2,)),
    }
    offset = choice.source.checkpoint.gptq_zeros_offset
    if choice.target.has_zero_points:
        tensors["weight_zero_point"] = StoredTensor("I32", (rows * bits // 32, groups))
        return _make(choice, tensors, Action.RELABEL, partial(_repack_asymmetric, choice.bound, bits, offset))
    return _make(choice, tensors, Action.RELABEL, partial(_repack_symmetric, choice.bound, bits, offset))


def _repack_symmetric(bound: Bound, bits: int, offset: int) -> Iterator[TensorChunk]:
    """Transposes GPTQ words into packed words, which hold the same codes; all zero points must be the middle."""
    _check_trivial_index(bound)
    if not bool((load(bound.tensors["qzeros"]) == _equal_zeros(-offset, bound.module.shape[0], bits)).all()):
        raise MismatchError("its qzeros hold other zero points than the symmetric one, though its config sets sym.")
    tensors = {
        "weight_packed": gptq_to_packed(load(bound.tensors["qweight"])),
        "weight_scale": load(bound.tensors["scales"]).t(),
        "weight_shape": torch.tensor(bound.module.shape, dtype=torch.int64),
    }
    yield from _pieces(tensors, list(tensors))


def _repack_asymmetric(bound: Bound, bits: int, offset: int) -> Iterator[TensorChunk]:
    _check_trivial_index(bound)
    parts = {suffix: load(entry) for suffix, entry in bound.tensors.items()}
    matrix = unpack_gptq(**parts, zeros_offset=offset, bits=bits, group_size=bound.stored.group_size or None)
    tensors = pack_quantized(matrix)
    if matrix.zeros is None:
        rows, groups = matrix.scales.shape
        tensors["weight_zero_point"] = _equal_zeros(0, rows, bits).t().expand(-1, groups).contiguous()
    yield from _pieces(tensors, ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])


def _equal_zeros(zero: int, rows: int, bits: int) -> torch.Tensor:
    """The words [1, rows * bits / 32] of one signed zero point for all rows."""
    return pack_words(torch.full((1, rows), zero, dtype=torch.int8), bits)


def _check_trivial_index(bound: Bound) -> None:
    if "g_idx" in bound.tensors:
        columns = bound.module.shape[1]
        plain = torch.arange(columns, dtype=torch.int32) // (bound.stored.group_size or columns)
        if not torch.equal(load(bound.tensors["g_idx"]), plain):
            raise UnsupportedError("its g_idx reorders the columns, which compressed-tensors cannot describe.")


def _int8_unit(choice: ModuleChoice) -> Unit:
    """Rows of int8 become packed words of four codes; an input scale, which nothing here reads, is left out."""
    rows, columns = choice.module.shape
    tensors = {
        "weight_packed": StoredTensor("I32", (rows, -(-columns // 4))),
        "weight_scale": StoredTensor(choice.bound.tensors["weight_scale"].dtype, (rows, 1)),
        "weight_shape": StoredTensor("I64", (2,)),
    }
    return _make(choice, tensors, Action.RELABEL, partial(_repack_rows, choice.bound))


def _repack_rows(bound: Bound) -> Iterator[TensorChunk]:
    matrix = int8_rows_to_group_int(load(bound.tensors["weight"]), load(bound.tensors["weight_scale"]))
    yield from _pieces(pack_quantized(matrix), ["weight_packed", "weight_scale", "weight_shape"])


def _modelopt_unit(choice: ModuleChoice) -> Unit:
    """ModelOpt's global scale multiplies, compressed-tensors' divides: codes are copied, the scale is inverted."""
    parts = choice.bound.tensors
    tensors = {
        "weight_packed": parts["weight"].stored,
        "weight_scale": parts["weight_scale"].stored,
        "weight_global_scale": StoredTensor("F32", (1,)),
    }
    return _make(choice, tensors, Action.RESCALE, partial(_invert_global_scale, parts))


def _invert_global_scale(parts: dict[str, TensorEntry]) -> Iterator[TensorChunk]:
    yield 0, to_bytes(load(parts["weight"]))
    yield 1, to_bytes(load(parts["weight_scale"]))
    yield 2, to_bytes(load(parts["weight_scale_2"]).reshape(1).reciprocal())
