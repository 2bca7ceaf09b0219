"""Compiles kernels for a GPU that is not there, through their own host functions. Runs as a process of its own.

    python -m tests.kernels.ahead [PACKAGE ...]

Prints a JSON object per kernel and target: registers, bytes of spill and of shared memory.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

from onebox.kernels.common.ahead import CompiledLaunch, compile_only
from onebox.kernels.common.target import AbsentGpu, use_absent_gpu
from tests.kernels.catalogue import cases, operations

TARGETS = (90, 121)


def resources(compiled) -> dict[str, int]:
    """Registers and bytes of spill (stack and local) of a cubin, as cuobjdump tells them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    return {"registers": int(fields["REG"]), "spill_bytes": int(fields["STACK"]) + int(fields["LOCAL"])}


def main() -> None:
    compiled: list[CompiledLaunch] = []
    compile_only(AbsentGpu(TARGETS[0]), compiled.append)
    wanted = sys.argv[1:]
    for case in cases():
        operation = operations()[case.op]
        if not case.is_full or (wanted and operation.package.rpartition(".")[2] not in wanted):
            continue
        for capability in TARGETS:
            use_absent_gpu(AbsentGpu(capability))
            compiled.clear()
            operation.kernel(**case.make(torch.device("cpu")))
            for name, kernel in compiled:
                report = {
                    "case": str(case),
                    "kernel": name,
                    "target": capability,
                    "shared_bytes": kernel.metadata.shared,
                }
                sys.stdout.write(json.dumps({**report, **resources(kernel)}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
