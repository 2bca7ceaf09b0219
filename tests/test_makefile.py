"""The two commands of the README, as make would run them, and that installing the tests leaves torch as it is."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TRITON_OF_TORCH = {"2.11": "3.6", "2.13": "3.7"}
"""What torch's builds for GPUs bring."""


def commands(*words):
    """What make would run where nothing is installed yet."""
    line = [shutil.which("make"), "--no-print-directory", "--dry-run", "--always-make", *words]
    # Not what a make that runs the tests hands on.
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_serve_takes_the_port_the_model_and_further_options():
    command = [".venv/bin/onebox", "serve"]
    assert commands("serve")[-1].split() == [*command, "--port", "8000"]
    given = commands("serve", "PORT=9000", "MODEL=models/hybrid", "ARGS=--max-num-seqs 4")[-1]
    assert given.split() == [*command, "models/hybrid", "--port", "9000", "--max-num-seqs", "4"]


def test_torch_is_installed_first_and_stays_when_the_tests_are_installed():
    installs = [line for line in commands(".venv/.installed-dev") if " pip install " in line]
    (asked,) = (
        Requirement(text)
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if Requirement(text).name == "torch"
    )
    assert Requirement(re.search(r"'(torch.+?)'", installs[0]).group(1)) == asked
    assert all("-c .venv/torch.txt" in line for line in installs[1:])
    assert any("torch.__version__" in line and "> .venv/torch.txt" in line for line in commands(".venv/.installed-dev"))


def test_kernels_are_compiled_ahead_with_the_triton_that_a_user_gets():
    told = [Requirement(text) for text in requires("torch") or () if Requirement(text).name == "triton"]
    if told:  # a build for GPUs
        assert version("triton") in told[0].specifier
        return
    series = ".".join(version("torch").split(".")[:2])
    if series not in TRITON_OF_TORCH:
        pytest.skip(f"NOT RUN: which Triton comes with torch {series} is not known here")
    assert version("triton").startswith(f"{TRITON_OF_TORCH[series]}.")
