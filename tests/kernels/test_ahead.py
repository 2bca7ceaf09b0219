"""Every kernel, at the published models' shapes, compiles for sm_90 and sm_121 and fits both."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.catalogue import cases, operations, packages

SHARED_BYTES = {90: 227 * 1024, 121: 99 * 1024}
"""What a program may have. Where a kernel takes more than the smaller GPU has, it has another shape there."""


@pytest.mark.parametrize("package", packages())
def test_an_operation_compiles_without_a_gpu_and_fits(package, spills):
    full = {str(case) for case in cases() if operations()[case.op].package == package and case.is_full}
    assert full, f"{package} has no case at a published model's shape"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead", package.rpartition(".")[2]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["case"] for report in reports} == full
    assert {report["target"] for report in reports} == {90, 121}
    for report in reports:
        if report["spill_bytes"]:
            spills.append(
                f"{report['kernel']} ({report['case']}, sm_{report['target']}): {report['spill_bytes']} bytes"
            )
        assert report["shared_bytes"] <= SHARED_BYTES[report["target"]], report
