"""Compiles all kernels of an engine in parallel processes, before its weights are loaded.

The kernels go to Triton's cache, where the engine finds them. A mark in the cache says that the job is done, so that
the next start does not ask again. Without a mark, workers compile what the cache lacks; if they fail, the engine
compiles the rest itself, one kernel after the other.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
import triton

from onebox.engine.config import EngineConfig
from onebox.engine.warm.worker import CompileJob
from onebox.kernels.common.target import gpu_name
from onebox.kernels.common.tuning import known_options
from onebox.model.layers.fused import FusedStack
from onebox.model.layers.plain import PlainStack
from onebox.model.load import LoadFormat, model_without_weights
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.hardware import GIB

__all__ = ["compile_kernels", "job_digest", "kernel_mark"]

ReportKernels = Callable[[int], None]
"""Called with the number of kernels compiled so far."""

T = TypeVar("T")

_MAX_WORKERS = 16
_WORKER_BYTES = 3 * GIB // 2
"""Host memory of one worker: Python, torch and LLVM."""
_log = logging.getLogger(__name__)


def compile_kernels(
    directory: Path,
    load_format: LoadFormat,
    dtype: torch.dtype,
    memory_shape: MemoryShape,
    config: EngineConfig,
    report: ReportKernels,
) -> int:
    """Compiles what this engine launches on this machine's GPU; the number of compiled kernels, 0 if all were there."""
    mark = kernel_mark(job_digest(directory, load_format, dtype, memory_shape, config))
    if mark.exists():
        return 0
    model = model_without_weights(directory, dtype, load_format, with_mtp=config.speculation.with_mtp)
    memory = Memory.allocate(model.spec, memory_shape, dtype, torch.device("meta"))
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as claims:
        job = CompileJob(*_distinct_layers(model, memory), config, 10 * major + minor, gpu_name() or "", Path(claims))
        num_compiled, is_done = _run_workers(pickle.dumps(job), report)
    if is_done:
        # A full or read-only disk: the next start asks again.
        with contextlib.suppress(OSError):
            mark.touch()
    return num_compiled


def job_digest(
    directory: Path, load_format: LoadFormat, dtype: torch.dtype, memory_shape: MemoryShape, config: EngineConfig
) -> str:
    """A digest of everything that decides which kernels are compiled."""
    files = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors"))
    parts = (
        (directory / "config.json").read_bytes(),
        files,
        (load_format, dtype, memory_shape.kv, memory_shape.max_pending, memory_shape.with_mtp),
        (config.max_num_seqs, config.speculation, config.num_checkpoints > 0),
        (gpu_name(), sorted(known_options().items()), triton.__version__, torch.__version__),
        [source.read_bytes() for source in _sources()],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def kernel_mark(digest: str) -> Path:
    """The file that says that all kernels of a job are in Triton's cache; it lies in that cache and goes with it."""
    return Path(triton.knobs.cache.dir) / f"onebox-{digest}"


def _distinct_layers(model: Qwen35, memory: Memory) -> tuple[Qwen35, Memory]:
    """The model and its memory with one layer of each kind: the others make the same launches."""
    stack = model.stack
    kinds: dict[bytes, int] = {}
    for place, layer in enumerate(stack.layers if isinstance(stack, FusedStack | PlainStack) else ()):
        # Without weights a layer is its shapes and formats, so equal layers are equal bytes.
        kinds.setdefault(pickle.dumps(layer), place)

    def kept(layers: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(layers[place] for place in kinds.values())

    if isinstance(stack, FusedStack):
        stack = replace(stack, plain=replace(stack.plain, layers=kept(stack.plain.layers)), layers=kept(stack.layers))
    elif isinstance(stack, PlainStack):
        stack = replace(stack, layers=kept(stack.layers))
    return replace(model, stack=stack), replace(memory, layers=kept(memory.layers))


def _sources() -> Iterator[Path]:
    """The code that decides what is launched."""
    package = Path(str(resources.files("onebox")))
    for room in ("kernels", "model", "engine", "formats"):
        yield from sorted((package / room).rglob("*.py"))


def _run_workers(job: bytes, report: ReportKernels) -> tuple[int, bool]:
    """(the number of kernels compiled, whether all workers ended well)."""
    command = [sys.executable, "-P", "-m", "onebox.engine.warm.worker"]
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    # One thread each: the workers themselves use all cores. They must not wait for a GPU.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False, env=env)
        for _ in range(_num_workers())
    ]
    names: list[str] = []

    def read(worker: "subprocess.Popen[bytes]") -> None:
        assert worker.stdin is not None  # noqa: S101 - both are pipes
        assert worker.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(job)
            worker.stdin.close()
        for line in worker.stdout:
            kind, _, name = line.decode().strip().partition(" ")
            if kind == "compiled":
                names.append(name)
                report(len(names))

    readers = [Thread(target=read, args=(worker,), daemon=True) for worker in workers]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        statuses = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(statuses):
        num_failed = sum(map(bool, statuses))
        _log.warning("%d of %d compile workers failed; the engine compiles the rest", num_failed, len(workers))
    return len(names), not any(statuses)


def _num_workers() -> int:
    """One a core, as far as the host's memory goes."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)), available // _WORKER_BYTES))
