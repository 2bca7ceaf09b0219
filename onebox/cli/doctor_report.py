"""The file of `onebox doctor --report`: what somebody else needs in order to help, and nothing private."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from onebox.spec.errors import WriteError

__all__ = ["write_report"]

_PREFIXES = ("ONEBOX_", "CUDA_", "TRITON_", "TORCH_", "XDG_CACHE", "HF_HOME", "HF_HUB", "PYTORCH_", "CC", "VIRTUAL_ENV")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH")


def write_report(path: Path, lines: Sequence[str]) -> None:
    sections = {
        "Findings": lines,
        "System": list(_system()),
        "nvidia-smi": _output("nvidia-smi"),
        "Environment": list(environment_lines(dict(os.environ))),
        "Packages": sorted({f"{each.metadata['Name']} {each.version}" for each in distributions()}, key=str.lower),
    }
    text = "".join(f"## {name}\n\n" + "\n".join(content) + "\n\n" for name, content in sections.items())
    try:
        path.write_text(f"# onebox doctor, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n\n{text}", encoding="utf-8")
    except OSError as error:
        raise WriteError(f"--report {path} cannot be written: {error.strerror}.") from None


def environment_lines(environment: dict[str, str]) -> Iterator[str]:
    """Variables that decide something here; of what may be secret only that it is set."""
    for name in sorted(environment):
        if name.startswith(_PREFIXES):
            is_secret = any(word in name for word in _SECRET)
            yield f"{name}={'(set, not shown)' if is_secret else environment[name]}"


def _system() -> Iterator[str]:
    yield platform.platform()
    for path in ("/etc/os-release", "/etc/dgx-release", "/proc/meminfo"):
        if Path(path).is_file():
            yield from (f"{path}: {line}" for line in Path(path).read_text(errors="replace").splitlines()[:12])
    yield f"{os.cpu_count()} CPUs"
    usage = shutil.disk_usage(Path.cwd())
    yield f"{usage.free / 1e9:.0f} of {usage.total / 1e9:.0f} GB free on the disk of the working directory"


def _output(program: str) -> list[str]:
    found = shutil.which(program)
    if found is None:
        return [f"{program} is not installed"]
    try:
        done = subprocess.run([found], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return (done.stdout + done.stderr).splitlines()
