"""Compiles all kernels of an engine in parallel processes, before its weights are loaded.

The kernels go to Triton's cache, where the engine finds them. A mark in the cache says that the job is done, so that
the next start does not ask again. Without a mark, workers compile what the cache lacks; if they fail, the engine
compiles the rest itself, one kernel after the other.
"""

import contextlib
import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import triton

from onebox.engine.config import EngineConfig
from onebox.engine.warm.launches import launch_all
from onebox.engine.warm.workers import ReportKernels, run_workers
from onebox.kernels.common.ahead import settle_cache_keys
from onebox.kernels.common.target import AbsentGpu, gpu_name
from onebox.kernels.common.tuning import known_options
from onebox.model.build import trim_model
from onebox.model.drafter import attach_drafter, load_drafter
from onebox.model.layers.fused import FusedStack
from onebox.model.layers.plain import PlainStack
from onebox.model.load import LoadFormat, model_without_weights
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.conversion import AS_STORED, LoadConversion

__all__ = ["EngineLaunches", "WeightSource", "are_compiled", "compile_kernels", "kernel_mark"]

T = TypeVar("T")


@dataclass(frozen=True)
class EngineLaunches:
    """A `CompileJob` of all kernels that an engine launches."""

    model: Qwen35
    """On `meta`."""
    memory: Memory
    """On `meta`."""
    config: EngineConfig
    gpu: AbsentGpu

    def launch(self) -> None:
        launch_all(self.model, self.memory, self.config)


class WeightSource(NamedTuple):
    """Where a model's weights come from, and the formats that they get while they are loaded."""

    directory: Path
    load_format: LoadFormat
    conversion: LoadConversion = AS_STORED
    drafter: Path | None = None
    """The directory of a block drafter."""


def compile_kernels(
    weights: WeightSource,
    dtype: torch.dtype,
    memory_shape: MemoryShape,
    config: EngineConfig,
    report: ReportKernels,
) -> int:
    """Compiles what this engine launches on this machine's GPU; the number of its kernels, 0 if all were there."""
    if are_compiled(weights, dtype, memory_shape, config):
        return 0
    mark = kernel_mark(_digest(weights, dtype, memory_shape, config))
    directory, load_format, conversion, drafter = weights
    with_mtp = config.speculation.with_mtp
    model = model_without_weights(directory, dtype, load_format, with_mtp=with_mtp, conversion=conversion)
    if drafter:
        meta = torch.device("meta")
        model = attach_drafter(model, load_drafter(drafter, model.spec, meta, dtype, load_format))
    if size := config.speculation.draft_vocab_size:
        model = trim_model(model, torch.empty(size, dtype=torch.int64, device="meta"))
    memory = Memory.allocate(model.spec, memory_shape, dtype, torch.device("meta"))
    job = EngineLaunches(*_distinct_layers(model, memory), config, AbsentGpu.of_this_machine())
    num_kernels, is_done = run_workers(job, report)
    if is_done:
        # A full or read-only disk: the next start asks again.
        with contextlib.suppress(OSError):
            mark.touch()
    return num_kernels


def are_compiled(weights: WeightSource, dtype: torch.dtype, memory_shape: MemoryShape, config: EngineConfig) -> bool:
    """Whether all kernels of this engine are in Triton's cache."""
    settle_cache_keys()
    return kernel_mark(_digest(weights, dtype, memory_shape, config)).exists()


def kernel_mark(digest: str) -> Path:
    """The file that says that all kernels of a job are in Triton's cache; it lies in that cache and goes with it."""
    return Path(triton.knobs.cache.dir) / f"onebox-{digest}"


def _digest(weights: WeightSource, dtype: torch.dtype, memory_shape: MemoryShape, config: EngineConfig) -> str:
    """A digest of everything that decides which kernels are compiled."""
    directories = [weights.directory, *([weights.drafter] if weights.drafter else [])]
    files = [sorted((path.name, path.stat().st_size) for path in d.glob("*.safetensors")) for d in directories]
    parts = (
        [(directory / "config.json").read_bytes() for directory in directories],
        files,
        (
            weights.load_format,
            weights.conversion,
            dtype,
            memory_shape.kv,
            memory_shape.max_pending,
            memory_shape.with_mtp,
            memory_shape.ring_tokens,
        ),
        (config.max_num_seqs, config.speculation, config.num_checkpoints > 0),
        (gpu_name(), sorted(known_options().items()), triton.__version__, torch.__version__),
        [source.read_bytes() for source in _sources()],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _sources() -> Iterator[Path]:
    """The code that decides what is launched."""
    package = Path(str(resources.files("onebox")))
    for room in ("formats", "kernels", "model", "engine"):
        yield from sorted((package / room).rglob("*.py"))


def _distinct_layers(model: Qwen35, memory: Memory) -> tuple[Qwen35, Memory]:
    """The model and its memory with one layer of each kind: the others make the same launches."""
    stack = model.stack
    if not isinstance(stack, FusedStack | PlainStack):
        return model, memory
    kinds: dict[bytes, int] = {}
    for place, layer in enumerate(stack.layers):
        # Without weights a layer is its shapes and formats, so equal layers are equal bytes.
        kinds.setdefault(pickle.dumps(layer), place)

    def kept(layers: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(layers[place] for place in kinds.values())

    if isinstance(stack, FusedStack):
        stack = replace(stack, plain=replace(stack.plain, layers=kept(stack.plain.layers)), layers=kept(stack.layers))
    else:
        stack = replace(stack, layers=kept(stack.layers))
    # Taps behind the first layer have the shapes of those behind others.
    taps = (0,) * len(model.tap_ids)
    return replace(model, stack=stack, tap_ids=taps), replace(memory, layers=kept(memory.layers))
