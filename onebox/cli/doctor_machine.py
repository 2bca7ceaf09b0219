"""The checks of `onebox doctor` that look at the machine and what is installed, and run nothing."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import NamedTuple

import onebox
from onebox.spec.errors import OneboxError
from onebox.spec.hardware import GIB, detect_box, nvidia_driver

__all__ = ["Finding", "Health", "Holder", "c_compiler_problem", "largest_processes", "machine_checks"]

OLDEST_DRIVER = 580
TESTED_TORCH = ("2.11", "2.13")
TESTED_TRITON = ("3.6", "3.7")
TESTED_GPUS = {"NVIDIA H200": "run", "NVIDIA GB10": "compiled for"}
_LARGE_BUILD_BYTES = 160 * 10**9
"""Sources and build of the 122B by its recipe: 77 + 0.5 + 73 GB, and a little."""
_SMALL_BYTES = 2 * 10**9
_MANY_HOLD = 0.1
"""Share of the memory that other programs may hold without a word."""


class Health(StrEnum):
    """How a check came out."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    name: str
    health: Health
    text: str
    advice: str = ""
    """What to do, where something is to be done."""


class Holder(NamedTuple):
    """A process and the memory that it holds."""

    name: str
    process_id: int
    num_bytes: int


def machine_checks(port: int, directory: Path) -> list[Callable[[], Finding]]:
    return [
        check_onebox,
        check_gpu,
        check_driver,
        check_torch_build,
        check_triton,
        check_compiler,
        check_memory,
        partial(check_disk, directory),
        partial(check_port, port),
        check_caches,
        check_clocks,
        check_tuning,
    ]


def check_onebox() -> Finding:
    text = f"{onebox.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("onebox", Health.GOOD, text)


def check_gpu() -> Finding:
    box = detect_box()
    if not box.compute_capability:
        return Finding(
            "GPU",
            Health.NOTE,
            "none: models run on the CPU, which is for small ones.",
            "If this box has one: install NVIDIA's driver, so that nvidia-smi lists it; "
            "CUDA_VISIBLE_DEVICES must not hide it.",
        )
    text = f"{box.device}, compute capability {box.compute_capability}"
    if box.device in TESTED_GPUS:
        return Finding("GPU", Health.GOOD, f"{text}; onebox's tests {TESTED_GPUS[box.device]} it")
    return Finding("GPU", Health.NOTE, f"{text}; onebox was tested on {' and '.join(TESTED_GPUS)}, not on this one.")


def check_driver() -> Finding:
    if not detect_box().compute_capability:
        return Finding("driver", Health.GOOD, "not needed without a GPU")
    version = nvidia_driver()
    major = version.partition(".")[0]
    if major.isdigit() and int(major) >= OLDEST_DRIVER:
        return Finding("driver", Health.GOOD, version)
    advice = f"Update NVIDIA's driver to {OLDEST_DRIVER} or later: torch's builds for CUDA 13 need it."
    return Finding("driver", Health.NOTE, f"{version or 'unknown'}, older than {OLDEST_DRIVER}", advice)


def check_torch_build() -> Finding:
    from onebox.engine.api import check_torch

    try:
        version = check_torch(detect_box())
    except OneboxError as error:
        first, _, rest = str(error).partition(":")
        return Finding("torch", Health.BAD, first, rest.strip())
    import torch

    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA"
    if version.startswith(TESTED_TORCH):
        return Finding("torch", Health.GOOD, f"{version}{cuda}; tested")
    return Finding("torch", Health.NOTE, f"{version}{cuda}; onebox was tested with {' and '.join(TESTED_TORCH)}.")


def check_triton() -> Finding:
    try:
        version = version_of("triton")
    except PackageNotFoundError:
        if not detect_box().compute_capability:
            return Finding("Triton", Health.GOOD, "not installed, and not needed without a GPU")
        advice = f"Install it for the kernels: pip install 'triton>={TESTED_TRITON[0]}'"
        return Finding("Triton", Health.BAD, "not installed.", advice)
    if version.startswith(TESTED_TRITON):
        return Finding("Triton", Health.GOOD, f"{version}; tested")
    return Finding("Triton", Health.NOTE, f"{version}; onebox was tested with {' and '.join(TESTED_TRITON)}.")


def check_compiler() -> Finding:
    """Triton builds a small launcher in C when a kernel first runs on a GPU; nothing else here is compiled."""
    problem = c_compiler_problem()
    if not problem:
        return Finding("compiler", Health.GOOD, "a C compiler and Python.h are here, as Triton needs on a GPU")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    advice = f"Triton builds its launcher with them at the first start on a GPU: sudo apt install gcc {python}"
    if not detect_box().compute_capability:
        return Finding("compiler", Health.GOOD, f"{problem}; not needed without a GPU")
    return Finding("compiler", Health.BAD, f"{problem}.", advice)


def c_compiler_problem() -> str:
    """What keeps Triton from building its launcher; "" if nothing does. Tries it, as Triton would."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler (gcc or clang) is installed"
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(include, "Python.h").is_file():
        return f"{include} has no Python.h"
    with tempfile.TemporaryDirectory(prefix="onebox-doctor-") as directory:
        source = Path(directory, "launcher.c")
        source.write_text("#include <Python.h>\nint launch(void) { return 0; }\n")
        command = [compiler, str(source), "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), f"-I{include}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} could not be run ({error})"
    said = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else f"{compiler} failed ({said[0] if said else done.returncode})"


def check_memory() -> Finding:
    box = detect_box()
    kind = "unified memory, shared by CPU and GPU" if box.unified and box.compute_capability else "memory"
    available = box.available_bytes or 0
    holders = largest_processes()
    large = [holder for holder in holders if holder.num_bytes > GIB]
    held = ", ".join(f"{one.name} ({one.process_id}) {one.num_bytes / GIB:.1f}" for one in large)
    text = f"{available / GIB:.1f} of {box.memory_bytes / GIB:.1f} GiB of {kind} are free"
    text += f"; most is held by {held} GiB" if held else ""
    if available >= (1 - _MANY_HOLD) * box.memory_bytes or not box.compute_capability:
        return Finding("memory", Health.GOOD, text)
    advice = "The plan of a start counts only what is free: end what you do not need, a desktop too, before you serve."
    return Finding("memory", Health.NOTE, text, advice)


def largest_processes(count: int = 3, proc: Path = Path("/proc")) -> list[Holder]:
    """The processes with the largest resident memory, without this one."""
    found = []
    for directory in proc.glob("[0-9]*"):
        try:
            fields = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines() if ":" in line)
        except (OSError, ValueError):
            continue
        if "VmRSS" in fields and int(directory.name) != os.getpid():
            num_bytes = int(fields["VmRSS"].split()[0]) * 1024
            found.append(Holder(fields["Name"].strip(), int(directory.name), num_bytes))
    return sorted(found, key=lambda holder: -holder.num_bytes)[:count]


def check_disk(directory: Path) -> Finding:
    place = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.0f} GB free for {directory.absolute()}"
    needed, what = (_LARGE_BUILD_BYTES, "the 122B's sources and its build take 151 GB")
    if not detect_box().compute_capability:
        needed, what = _SMALL_BYTES, "a small model and its caches take about 2 GB"
    if not os.access(place, os.W_OK):
        return Finding("disk", Health.BAD, f"{place} cannot be written.", "Choose another place with --dir.")
    if free >= needed:
        return Finding("disk", Health.GOOD, text)
    return Finding("disk", Health.NOTE, f"{text}; {what}", "Free some, or choose another place with --dir.")


def check_port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            advice = "`onebox ps` tells if it is a onebox; stop it, or serve with --port."
            return Finding("port", Health.NOTE, f"{port} cannot be used: {error.strerror}.", advice)
    return Finding("port", Health.GOOD, f"{port} is free")


def check_caches() -> Finding:
    from onebox.spec.cache import user_cache_directory

    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton"))
    closed = []
    for directory in (user_cache_directory(), triton):
        place = next(each for each in (directory, *directory.parents) if each.exists())
        if not os.access(place, os.W_OK):
            closed.append(str(directory))
    if not closed:
        return Finding("caches", Health.GOOD, f"{user_cache_directory()} and {triton} can be written")
    advice = "Set XDG_CACHE_HOME or TRITON_CACHE_DIR; without a cache every start compiles all kernels again."
    return Finding("caches", Health.NOTE, f"{' and '.join(closed)} cannot be written.", advice)


def check_clocks() -> Finding:
    """Caps that were set and the reasons for which clocks are reduced now."""
    box = detect_box()
    if not box.compute_capability:
        return Finding("clocks", Health.GOOD, "no GPU, no caps")
    from onebox.sensors.nvidia import read_gpus

    gpu = next(iter(read_gpus()), None)
    highest, capped = _clock_limits()
    text = f"SM clock {gpu.sm_clock_mhz or 0:.0f} MHz now" if gpu else "the GPU does not tell its clocks"
    text += f", {highest:.0f} MHz at most" if highest else ""
    if capped and highest and capped < 0.95 * highest:
        advice = "A cap costs speed in prefill above all: sudo nvidia-smi -rgc -rac removes it."
        return Finding("clocks", Health.NOTE, f"{text}; capped at {capped:.0f} MHz", advice)
    if gpu and gpu.throttled:
        advice = "Look after power supply and cooling; on a DGX Spark use the adapter it came with."
        return Finding("clocks", Health.NOTE, f"{text}; reduced for {', '.join(gpu.throttled)}", advice)
    return Finding("clocks", Health.GOOD, text)


def _clock_limits() -> tuple[float | None, float | None]:
    """The highest SM clock and the one that applications are limited to, in MHz; None: not told."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    query = "--query-gpu=clocks.max.sm,clocks.applications.graphics"
    done = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=False
    )
    cells = [cell.strip() for cell in (done.stdout.splitlines() or [""])[0].split(",")]
    numbers = [float(cell) if cell.replace(".", "", 1).isdigit() else None for cell in cells]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, None)


def check_tuning() -> Finding:
    box = detect_box()
    if not box.compute_capability:
        return Finding("tuning", Health.GOOD, "not needed without a GPU")
    from onebox.kernels.common.tuning import shipped_table, user_table

    tables = [path for path in (user_table(box.device), shipped_table(box.device)) if path.is_file()]
    if tables:
        return Finding("tuning", Health.GOOD, f"the kernels' launches are tuned for this GPU: {tables[0]}")
    advice = "onebox tune (2 minutes; a step gets faster, no answer changes), then onebox warm DIR to compile ahead."
    return Finding("tuning", Health.NOTE, "no table of tuned launches for this GPU; defaults are used.", advice)
