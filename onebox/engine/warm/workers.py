"""Processes that compile kernels at the same time and leave them in Triton's cache.

Workers are forked, so that they need not import torch again; they never touch the GPU. All of them go through the same
launches in the same order, and each kernel is compiled by the worker that claims it first, by creating a file.
"""

import contextlib
import hashlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from onebox.engine.remote.lifetime import end_with_parent
from onebox.kernels.common.ahead import CompiledLaunch, compile_only
from onebox.kernels.common.target import AbsentGpu
from onebox.spec.hardware import GIB, available_memory_bytes

__all__ = ["CompileJob", "ReportKernels", "run_workers"]

ReportKernels = Callable[[int], None]
"""Called with the number of kernels that were claimed so far."""

_MAX_WORKERS = 16
_WORKER_BYTES = GIB
"""Host memory of one worker beyond what it shares with the engine's process: the compiler."""
_POLL_S = 0.5
_log = logging.getLogger(__name__)


class CompileJob(Protocol):
    """What the workers compile, and for which GPU."""

    @property
    def gpu(self) -> AbsentGpu: ...

    def launch(self) -> None:
        """Makes the launches, on tensors without memory (`meta`); those that take longest to compile come first."""


def run_workers(job: CompileJob, report: ReportKernels, num_workers: int | None = None) -> tuple[int, bool]:
    """(the number of the job's kernels, whether all workers ended well); one worker a core if not said otherwise."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        claims = Path(name)
        count = num_workers or _num_workers()
        workers = [context.Process(target=_work, args=(job, claims), daemon=True) for _ in range(count)]
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
        _log.warning("%d of %d compile workers failed; the engine compiles the rest", num_failed, count)
    return num_kernels, num_failed == 0


def _work(job: CompileJob, claims: Path) -> None:
    """A worker: compiles what no other worker has claimed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
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
    job.launch()


def _build_launcher(kernel: Any) -> None:
    """Builds the C function that launches the kernel, which Triton otherwise does at the first launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    # Where there is no CUDA driver there is nothing to launch with.
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)


def _num_workers() -> int:
    """One a core, as far as the host's memory goes."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)), available_memory_bytes() // _WORKER_BYTES))
