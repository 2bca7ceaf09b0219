"""Importing torch, which takes seconds, and what a starting process can do beside it. Imports nothing slow itself."""

import contextlib
import ctypes
import threading
import time
from functools import cache

__all__ = ["import_engine", "initialise_triton"]


@cache
def import_engine(device: str) -> float:
    """Imports the model, its kernels and torch for an engine on this device (`--device`); the seconds that it took."""
    if device != "cpu":
        _initialise_cuda()
    began = time.perf_counter()
    import onebox.engine.runner  # noqa: F401 - for its own sake

    return time.perf_counter() - began


def _initialise_cuda() -> None:
    """Creates the CUDA context that torch will use on a thread of its own; does nothing where there is no GPU."""
    threading.Thread(target=_create_context, name="onebox-cuda", daemon=True).start()


def initialise_triton() -> None:
    """Computes on a thread of its own what Triton computes once a process: the digest of its library, for its cache."""
    threading.Thread(target=_compute_key, name="onebox-triton", daemon=True).start()


def _compute_key() -> None:
    # A function of Triton's own: where it is missing, the first launch takes longer.
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _create_context() -> None:
    # Errors are left to torch, which reports them with their reason.
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")  # releases Python's lock during its calls
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
