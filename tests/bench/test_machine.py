"""The machine is described by what it tells itself; what it does not tell is absent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.bench.machine import commit, gpu_memory_bytes, hardware, resident_bytes, versions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program of that name that reports two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "told = {'name': 'GPU A\\nGPU B', 'memory.used': '512\\n[N/A]'}\n"
        "print(told[sys.argv[1].partition('=')[2]])\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_gpus_are_named_where_there_are_any(nvidia_smi, monkeypatch):
    assert hardware().gpus == ("GPU A", "GPU B")
    assert gpu_memory_bytes() == {"GPU 0 in use": 512 << 20}
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware().gpus == ()
    assert gpu_memory_bytes() == {}


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
