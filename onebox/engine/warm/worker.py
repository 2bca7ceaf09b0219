"""A process that compiles kernels: reads a `CompileJob` from its input, writes a line for each kernel it compiled.

    python -m onebox.engine.warm.worker

All workers of a job go through the same launches in the same order. Each kernel is compiled by the worker that claims
it first, by creating a file. Needs no GPU.
"""

import contextlib
import hashlib
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.engine.config import EngineConfig
from onebox.engine.warm.launches import launch_all
from onebox.kernels.common.ahead import CompiledLaunch, compile_only
from onebox.kernels.common.target import AbsentGpu
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35

__all__ = ["CompileJob"]


@dataclass(frozen=True)
class CompileJob:
    """What the workers compile, and for which GPU."""

    model: Qwen35
    """On `meta`."""
    memory: Memory
    """On `meta`."""
    config: EngineConfig
    capability: int
    gpu_name: str
    claims: Path
    """A directory: a kernel belongs to the worker that creates its file here."""


class Claims:
    """Which of the job's kernels this worker compiles."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_seen = 0

    def take(self, name: str) -> bool:
        """Whether this worker is the first to ask for that kernel."""
        self.num_seen += 1
        path = self._directory / hashlib.sha256(name.encode()).hexdigest()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def compile_claimed(job: CompileJob) -> None:
    """Compiles what nobody else has claimed."""
    claims, known = Claims(job.claims), set[int]()

    def finish(launch: CompiledLaunch) -> None:
        if id(launch.kernel) not in known:
            known.add(id(launch.kernel))
            _build_launcher(launch.kernel)
            _say(f"compiled {launch.name}")

    compile_only(AbsentGpu(job.capability, job.gpu_name), finish, claims.take)
    launch_all(job.model, job.memory, job.config)
    _say(f"seen {claims.num_seen}")


def _build_launcher(kernel: Any) -> None:
    """Builds the C function that launches the kernel, which Triton otherwise does at the first launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    # Where there is no CUDA driver there is nothing to launch with.
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    compile_claimed(pickle.load(sys.stdin.buffer))  # noqa: S301 - written by the process that started this one
