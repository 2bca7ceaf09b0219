"""Boxes: a machine's memory size, memory bandwidth and BF16 FLOPS, each with its source.

`peak` is the vendor's figure, an upper bound; `usable` is a measured bandwidth. A figure that is not known is None, and
a plan prints "unknown" for it. Independent of the model. Stdlib only.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from onebox.spec.errors import UnreadableError, UsageError

__all__ = [
    "BOXES",
    "GIB",
    "MIB",
    "Bandwidth",
    "Box",
    "available_memory_bytes",
    "box_from_reports",
    "detect_box",
    "detect_host",
    "named_box",
    "nvidia_driver",
]

MIB = 1024**2
GIB = 1024**3


class Bandwidth(NamedTuple):
    """A rate in bytes per second (1 GB/s = 1e9) and the source of the figure."""

    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Box:
    """One machine with at most one GPU in use. Rates are per second; None: no figure is known."""

    name: str
    device: str
    memory_bytes: int
    """What the operating system (unified memory, no GPU) or the driver (a GPU with its own memory) can allocate."""
    unified: bool
    """True if the operating system, the page cache and the model share one pool. A box without a GPU is unified."""
    memory_source: str
    peak: Bandwidth | None = None
    usable: Bandwidth | None = None
    peak_bf16_flops: float | None = None
    """Dense BF16; a multiply-add counts as two. None: no figure is known."""
    flops_source: str = ""
    available_bytes: int | None = None
    """Free memory when the box was detected; None for a box selected by name."""
    compute_capability: str = ""
    num_sms: int | None = None


BOXES: dict[str, Box] = {
    "dgx-spark": Box(
        name="dgx-spark",
        device="NVIDIA GB10",
        # A Spark owner's vLLM start log: 0.9 of the memory is 110 GiB, of 121.7 GiB.
        memory_bytes=round(121.7 * GIB),
        unified=True,
        memory_source="128 GB LPDDR5x; the OS sees 121.7 GiB",
        peak=Bandwidth(273e9, "NVIDIA: LPDDR5x, 273 GB/s"),
        usable=Bandwidth(225e9, "measured by others: 225-227 GB/s (hasso5703 BENCHMARKS.md, Entrpi's INT8 GEMV)"),
        # NVIDIA publishes only 1 PFLOP of sparse FP4. Halved for dense, and halved twice more for BF16.
        peak_bf16_flops=125e12,
        flops_source="derived: an eighth of NVIDIA's 1 PFLOP of sparse FP4",
        compute_capability="12.1",
        num_sms=48,
    ),
    "h200": Box(
        name="h200",
        device="NVIDIA H200",
        memory_bytes=139 * GIB,
        unified=False,
        memory_source="141 GB HBM3e; about 139 GiB allocatable",
        peak=Bandwidth(4.8e12, "NVIDIA: HBM3e, 4.8 TB/s"),
        usable=Bandwidth(4.25e12, "measured by us: 4.25 TB/s, copy on one H200"),
        peak_bf16_flops=989e12,
        flops_source="NVIDIA: 989 TFLOPS, dense BF16",
        compute_capability="9.0",
        num_sms=132,
    ),
}

_NVIDIA_SMI_FIELDS = "name,compute_cap,memory.total,memory.free"


def named_box(name: str) -> Box:
    """A box by name; `auto` detects this machine."""
    if name == "auto":
        return detect_box()
    if name not in BOXES:
        raise UsageError(f"--box {name!r} is not known; the known ones are {', '.join(BOXES)} and auto.")
    return BOXES[name]


def detect_box() -> Box:
    """The local machine, from nvidia-smi and /proc/meminfo. Creates no CUDA context.

    Without its GPU if CUDA_VISIBLE_DEVICES hides it, which nvidia-smi does not heed.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return detect_host()
    return box_from_reports(_nvidia_smi(), _meminfo())


def detect_host() -> Box:
    """The local machine without its GPU: what a model on the CPU has."""
    return box_from_reports(None, _meminfo())


def nvidia_driver() -> str:
    """The version of the NVIDIA driver, such as 580.95.05; "" without one."""
    return (_nvidia_smi("driver_version") or "").strip().partition("\n")[0]


def available_memory_bytes() -> int:
    """Host memory that can be allocated without swapping, by the kernel's estimate."""
    return _meminfo_bytes(_meminfo(), "MemAvailable")


def box_from_reports(nvidia_smi: str | None, meminfo: str) -> Box:
    """The box described by the output of nvidia-smi and the text of /proc/meminfo.

    `nvidia_smi`: CSV lines of name, compute capability, total and free MiB, one per GPU; None without a GPU. Only
    the first GPU is used.
    """
    total_bytes, free_bytes = _meminfo_bytes(meminfo, "MemTotal"), _meminfo_bytes(meminfo, "MemAvailable")
    lines = [line for line in (nvidia_smi or "").splitlines() if line.strip()]
    if not lines:
        return Box("auto", "CPU only", total_bytes, True, "/proc/meminfo", available_bytes=free_bytes)
    device, capability, total_mib, free_mib = (field.strip() for field in lines[0].rsplit(",", 3))
    known = _known_by_device(device)
    # A GPU that shares the host's memory reports no total of its own: nvidia-smi prints [N/A] on a GB10.
    unified = not total_mib.isdigit()
    found = Box(
        name="auto",
        device=device,
        memory_bytes=total_bytes if unified else int(total_mib) * 1024**2,
        unified=unified,
        memory_source="/proc/meminfo (unified memory)" if unified else "nvidia-smi",
        available_bytes=free_bytes if unified or not free_mib.isdigit() else int(free_mib) * 1024**2,
        compute_capability=capability,
    )
    if known is None:
        return found
    return replace(
        found,
        peak=known.peak,
        usable=known.usable,
        peak_bf16_flops=known.peak_bf16_flops,
        flops_source=known.flops_source,
        num_sms=known.num_sms,
    )


def _known_by_device(device: str) -> Box | None:
    # Exact names only: an "NVIDIA H200 NVL" has different memory, so the H200's figures do not apply to it.
    matches = [box for box in BOXES.values() if box.device == device]
    return matches[0] if matches else None


def _nvidia_smi(fields: str = _NVIDIA_SMI_FIELDS) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnreadableError(f"nvidia-smi could not be run ({error}); name the box with --box instead.") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        why = said[0] if said else f"exit code {done.returncode}"
        raise UnreadableError(f"nvidia-smi failed ({why}); repair the driver or name the box with --box.")
    return done.stdout


def _meminfo() -> str:
    path = Path("/proc/meminfo")
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}); name the box with --box instead.") from None


def _meminfo_bytes(meminfo: str, key: str) -> int:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise UnreadableError(f"/proc/meminfo has no {key} line; name the box with --box instead.")
