"""Whether the installed torch can use the GPU in the box, and the line that installs one that can.

Facts and text alone: what torch says about itself is given. Without this, a box with a GPU that torch cannot use would
serve on the CPU, far slower.
"""

from dataclasses import dataclass

from onebox.spec.errors import UnsupportedError
from onebox.spec.hardware import Box

__all__ = ["TorchBuild", "install_line", "refuse_unusable_torch"]

_WHEELS = ((580, "cu130"), (570, "cu128"), (525, "cu126"))
"""The oldest driver of each family of torch's wheels, newest first. CUDA 12 runs on every driver from 525 on, but only
the wheels for 12.8 and later hold code for Blackwell (compute capability 10 and above)."""
_FIRST_BLACKWELL = (10, 0)
_TORCH = "torch>=2.11,<2.14"


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch says about itself."""

    version: str
    """Such as 2.13.0+cpu."""
    cuda_version: str | None
    """The CUDA it was built with; None: a build for CPUs."""
    has_device: bool
    """Whether it can use a GPU here."""
    architectures: tuple[str, ...] = ()
    """GPUs that it holds code for, as sm_90 (machine code) and compute_90 (compiled for later GPUs at their first use);
    empty where it cannot say."""


def refuse_unusable_torch(box: Box, driver: str, build: TorchBuild) -> None:
    """Raises `UnsupportedError`, with what to install, if `box` has a GPU that `build` cannot use.

    `driver`: the version that nvidia-smi prints, "" if unknown.
    """
    if not box.compute_capability:
        return
    gpu = f"{box.device} (compute capability {box.compute_capability}, driver {driver or 'unknown'})"
    otherwise = "or give --device cpu, which is for small models."
    if build.cuda_version is None:
        raise UnsupportedError(
            f"This box has a GPU, {gpu}, but torch {build.version} is a build for CPUs: install one for CUDA with\n"
            f"  {install_line(box, driver)}\n{otherwise}"
        )
    if not build.has_device:
        raise UnsupportedError(
            f"This box has a GPU, {gpu}, but torch {build.version} finds none: "
            f"{_why_not_found(driver, build.cuda_version)}\n  {install_line(box, driver)}\n{otherwise}"
        )
    if build.architectures and not _has_code_for(_capability(box), build.architectures):
        raise UnsupportedError(
            f"This box has a GPU, {gpu}, and torch {build.version} holds no code for it "
            f"({', '.join(build.architectures)}): install one that does with\n"
            f"  {install_line(box, driver)}\n{otherwise}"
        )


def install_line(box: Box, driver: str) -> str:
    """The command that installs a torch for this GPU and driver."""
    major = _driver_major(driver)
    # An unknown driver gets the newest: what ships with a GPU that needs it is new enough.
    wheels = _WHEELS[0][1] if major is None else next((name for oldest, name in _WHEELS if major >= oldest), "")
    if wheels == "cu126" and _capability(box) >= _FIRST_BLACKWELL:
        wheels = ""
    update = "" if wheels else "(after updating the NVIDIA driver to 580 or later) "
    index = f"https://download.pytorch.org/whl/{wheels or _WHEELS[0][1]}"
    return f"{update}pip install --force-reinstall '{_TORCH}' --index-url {index}"


def _why_not_found(driver: str, cuda_version: str) -> str:
    major, needed = _driver_major(driver), 580 if int(cuda_version.split(".")[0]) >= 13 else 525
    if major is not None and major < needed:
        return f"CUDA {cuda_version} needs a driver of {needed} or later; update the driver, or install"
    return (
        "CUDA_VISIBLE_DEVICES may hide it, the process may lack rights on /dev/nvidia*, or torch is for another CUDA "
        "than the driver; check the first two, or install"
    )


def _driver_major(driver: str) -> int | None:
    first = driver.split(".")[0]
    return int(first) if first.isdigit() else None


def _capability(box: Box) -> tuple[int, int]:
    major, _, minor = box.compute_capability.partition(".")
    return int(major), int(minor or 0)


def _has_code_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Machine code runs on later GPUs of the same major version, code for later compilation on all later GPUs."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")  # sm_90a: code for exactly this GPU, or for its family
        if not digits.isdigit():
            continue
        has = (int(digits[:-1]), int(digits[-1]))
        if has <= capability and (kind == "compute" or has[0] == capability[0]):
            return True
    return False
