"""Compiles all kernels of an engine in parallel processes, before its weights are loaded.

The kernels go to Triton's cache, where the engine finds them. A mark in the cache says that the job is done, so that
the next start does not ask again. Without a mark, workers compile what the cache lacks; if they fail, the engine
compiles the rest itself, one kernel after the other.

Workers are forked, so that they need not import torch again; they never touch the GPU. All of them go through the same
launches in the same order, and each kernel is compiled by the worker that claims it first, by creating a file.
"""

import contextlib
import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from onebox.engine.config import EngineConfig
from onebox.engine.remote.lifetime import end_with_parent
from onebox.engine.warm.launches import launch_all
from onebox.kernels.common.ahead import CompiledLaunch, compile_only, settle_cache_keys
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
from onebox.spec.hardware import GIB, available_memory_bytes

__all__ = ["CompileJob", "WeightSource", "are_compiled", "compile_kernels", "kernel_mark", "run_workers"]

ReportKernels = Callable[[int], None]
"""Called with the number of kernels that were claimed so far."""
T = TypeVar("T")

_MAX_WORKERS = 16
_WORKER_BYTES = GIB
"""Host memory of one worker beyond what it shares with the engine's process: the compiler."""
_POLL_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileJob:
    """What the workers compile, and for which GPU."""

    model: Qwen35
    """On `meta`."""
    memory: Memory
    """On `meta`."""
    config: EngineConfig
    gpu: AbsentGpu


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
    major, minor = torch.cuda.get_device_capability()
    job = CompileJob(*_distinct_layers(model, memory), config, AbsentGpu(10 * major + minor, gpu_name() or ""))
    num_kernels, is_done = run_workers(job, _num_workers(), report)
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


def run_workers(job: CompileJob, num_workers: int, report: ReportKernels) -> tuple[int, bool]:
    """(the number of the job's kernels, whether all workers ended well)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        claims = Path(name)
        workers = [context.Process(target=_work, args=(job, claims), daemon=True) for _ in range(num_workers)]
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                time.sleep(_POLL_S)
                report(len(list(claims.iterdir())))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        num_kernels = len(list(claims.iterdir()))
    num_failed = sum(worker.exitcode != 0 for worker in workers)
    if num_failed:
        _log.warning("%d of %d compile workers failed; the engine compiles the rest", num_failed, num_workers)
    return num_kernels, num_failed == 0


def _num_workers() -> int:
    """One a core, as far as the host's memory goes."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)), available_memory_bytes() // _WORKER_BYTES))


def _work(job: CompileJob, claims: Path) -> None:
    """A worker: compiles what no other worker has claimed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process decides when to stop
    known: set[int] = set()

    def claim(name: str) -> bool:
        try:
            os.close(os.open(claims / hashlib.sha256(name.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def finish(launch: CompiledLaunch) -> None:
        if id(launch.kernel) not in known:
            known.add(id(launch.kernel))
            _build_launcher(launch.kernel)

    compile_only(job.gpu, finish, claim)
    launch_all(job.model, job.memory, job.config)


def _build_launcher(kernel: Any) -> None:
    """Builds the C function that launches the kernel, which Triton otherwise does at the first launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    # Where there is no CUDA driver there is nothing to launch with.
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)
