"""What it would take: how many boxes hold a model that does not fit one, for each format of its weights."""

from collections.abc import Mapping
from typing import NamedTuple

from onebox.planner.memory import (
    MemoryRequest,
    context_pages_bytes,
    loaded_weight_bytes,
    reserve_bytes,
    slot_bytes,
    workspace_bytes,
)
from onebox.planner.presets import PRESETS
from onebox.planner.roofline import Workload, project
from onebox.spec.hardware import GIB, Box
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["Sizing", "size_formats", "sizing_lines"]

_COUNTS = (1, 2, 4, 8, 16)
"""Boxes among which tensor parallelism divides a model."""


class Sizing(NamedTuple):
    """One format's weights, in GiB with all that must be beside them, and the boxes that hold it."""

    name: str
    weights_bytes: int
    needed_bytes: int
    """Weights, workspace, states and the KV of one sequence of full length, on one box; without the reserve."""
    num_boxes: int | None
    """The least number that holds it, each with its own workspace and reserve; None: more than 16."""
    tokens_per_second: float | None
    """What the memory of all these boxes allows one stream, without the time between them; None: not known."""


def size_formats(
    spec: ModelSpec, stored: Mapping[str, Mapping[ModuleClass, int]], box: Box, request: MemoryRequest, context: int
) -> list[Sizing]:
    """One entry for the weights in `stored`, by name, and for each preset; the smallest first."""
    presets = {name: preset.weight_bytes(spec) for name, preset in PRESETS.items() if name not in stored}
    sizings = [_size(name, spec, sizes, box, request, context) for name, sizes in {**stored, **presets}.items()]
    return sorted(sizings, key=lambda sizing: sizing.weights_bytes)


def _size(
    name: str, spec: ModelSpec, stored: Mapping[ModuleClass, int], box: Box, request: MemoryRequest, context: int
) -> Sizing:
    weights = loaded_weight_bytes(stored, with_mtp=request.with_mtp, with_vision=request.with_vision)
    workspace = workspace_bytes(spec, request)
    memory = request.slots * slot_bytes(spec, request.drafts, request.activation_bytes, request.state_dtype)
    divided = weights + memory + context_pages_bytes(spec, request)
    usable = box.memory_bytes - reserve_bytes(box, request) - workspace
    count = next((count for count in _COUNTS if divided <= count * usable), None)
    workload = Workload(context_tokens=context, state_dtype=request.state_dtype)
    limit = project(spec, stored, box, request.kv, workload).limit
    rate = None if limit is None or count is None else count * limit.tokens_per_second
    return Sizing(name, weights, divided + workspace, count, rate)


def sizing_lines(sizings: list[Sizing], box: Box) -> list[str]:
    """The table, and what follows from it."""
    width = max(len(sizing.name) for sizing in sizings)
    lines = [f"What it would take, {box.name} being {box.memory_bytes / GIB:.1f} GiB:"]
    lines.append(f"  {'weights':<{width}} {'GiB':>8} {'with KV':>9} {'boxes':>6}  one stream, at most")
    for sizing in sizings:
        count = ">16" if sizing.num_boxes is None else str(sizing.num_boxes)
        rate = "-" if sizing.tokens_per_second is None else f"{sizing.tokens_per_second:.0f} tok/s"
        sizes = f"{sizing.weights_bytes / GIB:8.1f} {sizing.needed_bytes / GIB:9.1f}"
        lines.append(f"  {sizing.name:<{width}} {sizes} {count:>6}  {rate}")
    fitting = [sizing.name for sizing in sizings if sizing.num_boxes == 1]
    if fitting:
        lines.append(f"{', '.join(fitting)} would fit: give --weights, or a checkpoint in that format.")
    else:
        lines.append(
            f"No format fits one {box.name}, and onebox runs on one box; vLLM divides a model among several with "
            "--tensor-parallel-size."
        )
    return lines
