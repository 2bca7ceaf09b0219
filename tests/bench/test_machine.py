"""The machine is described by what it tells itself; what it does not tell is absent."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.bench import machine
from onebox.bench.machine import PowerMeter, commit, gpu_memory_bytes, hardware, resident_bytes, versions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program of that name that reports two GPUs, drawing more with each call."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        f"counter = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "calls = int(counter.read_text()) if counter.exists() else 0\n"
        "counter.write_text(str(calls + 1))\n"
        "draw = f'{10 + 50 * calls}.00'\n"
        "told = {'name': 'GPU A\\nGPU B', 'power.draw': f'{draw}\\n{draw}', 'memory.used': '512\\n[N/A]'}\n"
        "print(told[sys.argv[1].partition('=')[2]])\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_INTERVAL_S", 0.01)
    return tmp_path / "calls"


def metered(meter, until):
    async def run():
        async with meter.running():
            while not until():
                await asyncio.sleep(0.01)

    asyncio.run(run())
    return meter.power


def test_power_is_the_sum_of_all_gpus_before_and_during_the_run(nvidia_smi):
    meter = PowerMeter(is_local=True)
    power = metered(meter, lambda: meter.power is not None and meter.power.num_samples >= 3)
    # 20 W before, then 120, 220 and so on.
    assert power.idle_w == 20
    assert power.num_samples >= 2
    assert power.peak_w == 20 + 100 * power.num_samples
    assert power.mean_w == pytest.approx(20 + 100 * (1 + power.num_samples) / 2)


def test_a_server_elsewhere_has_no_power_of_ours(nvidia_smi):
    assert metered(PowerMeter(is_local=False), lambda: True) is None
    assert not nvidia_smi.exists()


def test_gpus_are_named_where_there_are_any(nvidia_smi, monkeypatch):
    assert hardware().gpus == ("GPU A", "GPU B")
    assert gpu_memory_bytes() == {"GPU 0 in use": 512 << 20}
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware().gpus == ()
    assert gpu_memory_bytes() == {}
    assert metered(PowerMeter(is_local=True), lambda: True) is None


def test_the_machine_is_what_the_system_says():
    found = hardware()
    assert found.num_cores == os.cpu_count()
    assert found.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.cpu
    assert versions()["python"] == sys.version.split()[0]


def test_the_commit_is_gits(monkeypatch):
    command = [shutil.which("git"), "-C", ROOT, "rev-parse", "HEAD"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert commit().rstrip("+") == told.strip()[:12]
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit() == ""


def test_memory_of_a_process_holds_that_of_its_children():
    child = "import time; held = bytearray(50 << 20); print('held', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            assert resident_bytes(process.pid) > 50 << 20
        finally:
            found = subprocess.run(
                [shutil.which("pgrep"), "-P", str(process.pid)], capture_output=True, text=True, check=False
            )
            for process_id in map(int, found.stdout.split()):
                os.kill(process_id, 9)
            process.kill()
    assert resident_bytes(process.pid) == 0
