"""`onebox doctor`: each line is good or says what to do; on machines that are played by a false nvidia-smi too."""

import contextlib
import os
import pty
import socket
import subprocess
import sys
import termios
from importlib import import_module

import pytest
import torch

from onebox.cli import doctor_machine
from onebox.cli.doctor_machine import DoctorMark, c_compiler_problem, largest_processes, machine_checks
from onebox.cli.doctor_report import environment_lines
from onebox.cli.doctor_trial import check_answer, check_kernels, compare

SPARK = """#!/bin/sh
case "$1" in
*driver_version*) echo DRIVER ;;
*clocks.max.sm*) echo "3003, CAP" ;;
*power.draw*) echo "0, 30, 50, [N/A], 2400, [N/A], REASONS" ;;
*) echo "NVIDIA GB10, 12.1, [N/A], [N/A]" ;;
esac
"""


@pytest.fixture
def spark(tmp_path, monkeypatch):
    """A machine with a GB10: `spark(driver=..., cap=..., reasons=...)`."""

    def play(driver="580.95.05", cap="[N/A]", reasons="0x0000000000000000"):
        program = tmp_path / "nvidia-smi"
        program.write_text(SPARK.replace("DRIVER", driver).replace("CAP", cap).replace("REASONS", reasons))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return play


def test_this_machine_is_checked_and_told_line_by_line(run_cli, tmp_path):
    report = tmp_path / "report.md"
    result = run_cli("doctor", "--quick", "--dir", tmp_path, "--report", report)
    names = [line.split()[1] for line in result.out.splitlines() if line[:4] in ("good", "note", "BAD ")]
    wanted = ["onebox", "GPU", "driver", "torch", "Triton", "compiler", "memory", "disk", "port", "caches", "clocks"]
    assert names[: len(wanted)] == wanted
    text = report.read_text()
    assert all(f"## {part}" in text for part in ("Findings", "System", "nvidia-smi", "Environment", "Packages"))
    assert "torch" in text.partition("## Packages")[2]


def test_lines_are_broken_between_words_at_the_width_of_a_terminal(tmp_path):
    """In a real one of 60 columns."""
    command = [sys.executable, "-m", "onebox", "doctor", "--quick", "--dir", str(tmp_path)]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode in (0, 1)
    lines = shown.decode().splitlines()
    assert len(lines) > 12
    # A path is not broken.
    assert [line for line in lines if len(line) > 60 and "/" not in line] == []


def test_a_report_that_cannot_be_written_is_a_sentence(run_cli, tmp_path):
    result = run_cli("doctor", "--quick", "--report", tmp_path / "none" / "report.md")
    assert (result.code, "cannot be written: No such file" in result.err) == (1, True)


def test_a_report_holds_no_keys():
    given = {"ONEBOX_API_KEY": "sk-secret", "HF_HUB_TOKEN": "hf_secret", "ONEBOX_PORT": "9", "HOME_ADDRESS": "street"}
    lines = list(environment_lines(given))
    assert "ONEBOX_PORT=9" in lines
    assert not any(word in " ".join(lines) for word in ("secret", "street"))


def findings(tmp_path):
    return {found.name: found for found in (check() for check in machine_checks(1, tmp_path))}


def test_a_spark_with_a_torch_for_cpus_is_told_what_to_install(spark, tmp_path, run_cli):
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    spark()
    found = findings(tmp_path)
    assert found["GPU"].health is DoctorMark.GOOD
    assert "GB10" in found["GPU"].text
    assert found["driver"].text == "580.95.05"
    assert found["torch"].health is DoctorMark.BAD
    assert "pip install" in found["torch"].advice
    assert "unified memory" in found["memory"].text
    assert found["tuning"].health is DoctorMark.NOTE
    assert "onebox tune" in found["tuning"].advice
    assert "onebox warm" in found["tuning"].advice
    result = run_cli("doctor", "--quick", "--dir", tmp_path)
    assert result.code == 1
    assert "1 to change" in result.out


def test_an_old_driver_a_clock_cap_and_a_weak_supply_are_told(spark):
    spark(driver="550.10", cap="2200")
    assert "Update NVIDIA's driver" in doctor_machine.check_driver().advice
    clocks = doctor_machine.check_clocks()
    assert "capped at 2200 MHz" in clocks.text
    assert "nvidia-smi -rgc" in clocks.advice
    spark(reasons="0x0000000000000080")
    assert "hardware power brake" in doctor_machine.check_clocks().text
    spark()
    assert doctor_machine.check_clocks().health is DoctorMark.GOOD


def test_a_compiler_or_header_that_triton_would_miss_is_named(spark, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert "could not be run" in c_compiler_problem()
    monkeypatch.setattr(doctor_machine.sysconfig, "get_paths", lambda *_: {"include": str(tmp_path)})
    assert c_compiler_problem() == f"{tmp_path} has no Python.h"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler_problem() == "no C compiler (gcc or clang) is installed"
    assert doctor_machine.check_compiler().health is DoctorMark.GOOD, "without a GPU none is needed"
    spark()
    found = doctor_machine.check_compiler()
    assert found.health is DoctorMark.BAD
    assert "sudo apt install gcc python3." in found.advice


def test_a_port_in_use_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor_machine.check_port(port).health is DoctorMark.NOTE
    assert doctor_machine.check_port(port).health is DoctorMark.GOOD


def test_a_full_disk_is_told(monkeypatch, tmp_path):
    full = doctor_machine.shutil._ntuple_diskusage(10**9, 10**9, 0)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: full)
    assert doctor_machine.check_disk(tmp_path / "not" / "there").health is DoctorMark.NOTE


def test_the_largest_processes_are_named(tmp_path):
    for number, name, kilobytes in ((1, "init", 10), (20, "desktop", 3_000_000), (30, "browser", 2_000_000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "status").write_text(f"Name:\t{name}\nVmRSS:\t{kilobytes} kB\n")
    (tmp_path / "99").mkdir()  # it ended meanwhile
    assert [holder.name for holder in largest_processes(2, tmp_path)] == ["desktop", "browser"]


def test_the_kernels_equal_their_twins_and_a_wrong_one_is_named():
    assert check_kernels().health is DoctorMark.GOOD
    norm = import_module("onebox.kernels.norm")
    case = next(case for case in import_module("onebox.kernels.norm.cases").CASES if case.op == norm.rms_norm.name)
    wrong = compare(case, norm.rms_norm.twin, lambda **given: norm.rms_norm.twin(**given) * 1.5, torch.device("cpu"))
    assert "times the difference that is allowed" in wrong


def test_a_check_that_fails_is_a_finding(run_cli, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("the bus\nfell off")

    monkeypatch.setattr(doctor_machine, "largest_processes", fail)
    result = run_cli("doctor", "--quick", "--dir", tmp_path)
    assert "BAD   memory      failed after 0 s: the bus fell off" in result.out
    assert result.code == 1


def test_the_pocket_model_answers_the_same_twice():
    found = check_answer()
    assert found.health is DoctorMark.GOOD, found.text
    assert "Hi -> " in found.text
