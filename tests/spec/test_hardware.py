"""Boxes by name, and what is made of a machine's own reports."""

import subprocess

import pytest

from onebox.spec import hardware
from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.hardware import BOXES, GIB, box_from_reports, detect_box, named_box

MEMINFO = "MemTotal:       127600000 kB\nMemFree:         1000000 kB\nMemAvailable:   100000000 kB\n"


def test_a_spark_is_what_its_owners_see():
    box = named_box("dgx-spark")
    assert box.unified
    assert box.memory_bytes / GIB == pytest.approx(121.7)
    assert box.peak.bytes_per_second == 273e9
    assert box.compute_capability == "12.1"


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_every_figure_of_a_named_box_has_a_source(box):
    assert box.memory_source
    assert box.peak.source
    assert box.usable.source
    assert box.flops_source
    assert box.usable.bytes_per_second < box.peak.bytes_per_second


def test_an_unknown_box_is_refused_by_flag():
    with pytest.raises(UsageError, match="--box 'h100' is not known; the known ones are dgx-spark, h200 and auto"):
        named_box("h100")


def test_a_gb10_reports_no_memory_of_its_own_and_so_shares_the_hosts():
    box = box_from_reports("NVIDIA GB10, 12.1, [N/A], [N/A]\n", MEMINFO)
    assert box.unified
    assert box.memory_bytes == 127600000 * 1024
    assert box.available_bytes == 100000000 * 1024
    assert box.peak == BOXES["dgx-spark"].peak


def test_a_discrete_gpu_counts_its_own_memory():
    box = box_from_reports("NVIDIA H200, 9.0, 143771, 143000\nNVIDIA H200, 9.0, 143771, 1\n", MEMINFO)
    assert not box.unified
    assert box.memory_bytes == 143771 * 1024**2
    assert box.available_bytes == 143000 * 1024**2
    assert box.usable == BOXES["h200"].usable


def test_a_gpu_nobody_measured_gets_no_invented_bandwidth():
    box = box_from_reports("NVIDIA H200 NVL, 9.0, 143771, 143000\n", MEMINFO)
    assert box.peak is None
    assert box.usable is None
    assert box.peak_bf16_flops is None


@pytest.mark.parametrize("smi", [None, "", "\n"])
def test_without_a_gpu_the_box_is_the_host(smi):
    box = box_from_reports(smi, MEMINFO)
    assert box.device == "CPU only"
    assert box.unified
    assert box.peak is None


def test_a_meminfo_without_a_line_names_it():
    with pytest.raises(UnreadableError, match="no MemAvailable line"):
        box_from_reports(None, "MemTotal: 1 kB\n")


def test_this_machine_can_be_detected(monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda _: None)
    box = detect_box()
    assert 0 < box.available_bytes <= box.memory_bytes


@pytest.mark.parametrize(("visible", "device"), [("", "CPU only"), ("-1", "CPU only"), ("0", "NVIDIA GB10")])
def test_a_gpu_that_is_hidden_on_purpose_is_not_there(monkeypatch, visible, device):
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: "NVIDIA GB10, 12.1, [N/A], [N/A]\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_box().device == device


def test_a_failing_nvidia_smi_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    failed = subprocess.CompletedProcess([], 9, stdout="NVIDIA-SMI has failed\nmore\n", stderr="")
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UnreadableError, match=r"nvidia-smi failed \(NVIDIA-SMI has failed\); repair"):
        named_box("auto")
