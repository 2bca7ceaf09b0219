"""Compiles kernels for a GPU that is not there, through their own host functions. Runs as a process of its own.

    python -m tests.kernels.ahead [PACKAGE ...]

A stand-in for Triton's driver says which GPU to compile for; each launch stops after compilation. Prints a JSON object
per kernel and target: registers, bytes of spill and of shared memory.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.catalogue import cases, operations

TARGETS = (90, 121)


class AbsentGpu:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device, so each target is its own

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


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
    compiled: list[tuple[str, object]] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    wanted = sys.argv[1:]
    for case in cases():
        operation = operations()[case.op]
        if not case.is_full or (wanted and operation.package.rpartition(".")[2] not in wanted):
            continue
        for capability in TARGETS:
            driver.set_active(AbsentGpu(capability))
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
