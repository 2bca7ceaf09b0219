"""A GPU that torch cannot use is refused with the line that installs a torch that can."""

from dataclasses import replace

import pytest

from onebox.spec.errors import UnsupportedError
from onebox.spec.hardware import BOXES, Box, detect_host
from onebox.spec.torch_build import TorchBuild, install_line, refuse_unusable_torch

SPARK, H200 = BOXES["dgx-spark"], BOXES["h200"]
CPU_BUILD = TorchBuild("2.13.0+cpu", None, has_device=False)


def cuda_build(*architectures: str, cuda_version: str = "13.0", has_device: bool = True) -> TorchBuild:
    return TorchBuild(f"2.11.0+cu{cuda_version.replace('.', '')}", cuda_version, has_device, architectures)


@pytest.mark.parametrize(
    ("box", "build"),
    [
        (detect_host(), CPU_BUILD),
        (SPARK, cuda_build("sm_90", "sm_120")),
        (SPARK, cuda_build("sm_90", "compute_90")),
        (SPARK, cuda_build("sm_121a")),
        (SPARK, cuda_build()),
        (H200, cuda_build("sm_80", "sm_90")),
    ],
)
def test_a_torch_that_fits_the_box_is_accepted(box, build):
    refuse_unusable_torch(box, "580.95.05", build)


@pytest.mark.parametrize(
    ("box", "driver", "build", "says"),
    [
        (SPARK, "580.95.05", CPU_BUILD, r"NVIDIA GB10 .*2\.13\.0\+cpu is a build for CPUs(?s:.*)whl/cu130"),
        (H200, "535.1", cuda_build(has_device=False), r"CUDA 13\.0 needs a driver of 580 or later(?s:.*)whl/cu126"),
        (H200, "580.1", cuda_build(has_device=False), r"finds none: CUDA_VISIBLE_DEVICES may hide it"),
        (SPARK, "580.1", cuda_build("sm_80", "sm_90"), r"holds no code for it \(sm_80, sm_90\)"),
        (H200, "580.1", cuda_build("sm_100", "sm_120", "compute_120"), "holds no code for it"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_refused(box, driver, build, says):
    with pytest.raises(UnsupportedError, match=says):
        refuse_unusable_torch(box, driver, build)


@pytest.mark.parametrize(
    ("box", "driver", "wheels"),
    [
        (SPARK, "580.95.05", "cu130"),
        (SPARK, "", "cu130"),
        (SPARK, "575.1", "cu128"),
        (H200, "550.1", "cu126"),
        (replace(H200, compute_capability="10.0"), "550.1", "cu130"),
        (H200, "470.1", "cu130"),
    ],
)
def test_the_wheels_are_those_that_the_driver_can_run(box: Box, driver: str, wheels: str):
    line = install_line(box, driver)
    assert line.endswith(f"--index-url https://download.pytorch.org/whl/{wheels}")
    can_run = driver == "" or int(driver.split(".")[0]) >= {"cu130": 580, "cu128": 570, "cu126": 525}[wheels]
    assert ("updating the NVIDIA driver" in line) == (not can_run)
