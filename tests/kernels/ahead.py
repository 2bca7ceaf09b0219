"""Compiles kernels for GPUs that are not there, through their own host functions. Runs as a process of its own.

    python -m tests.kernels.ahead [PACKAGE ...]

For sm_121 every case at a published model's shape. For sm_90, where all of them also run (`-m gpu`), each kernel once
for each list of argument types, and whatever is launched otherwise there than on sm_121. Prints a JSON object per
kernel and target: registers, bytes of spill and of shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

from onebox.kernels.common.ahead import CompiledLaunch, compile_only
from onebox.kernels.common.case import Case
from onebox.kernels.common.target import AbsentGpu, use_absent_gpu
from tests.kernels.catalogue import cases, operations

TARGETS = (121, 90)
META = torch.device("meta")


def arguments(case: Case) -> dict[str, Any]:
    """Without numbers: checks of all of them pass; where one decides something, they are drawn and then dropped."""
    try:
        with META, patch.multiple(torch.Tensor, all=lambda *_: True, any=lambda *_: False):
            return case.make(META)
    except (NotImplementedError, RuntimeError):
        return case.make(META)


class Choice:
    """What is compiled for the target at hand, by the keys of Triton's specialisations."""

    def __init__(self) -> None:
        self.target = TARGETS[0]
        self._elsewhere: set[str] = set()
        self._types: set[tuple[str, ...]] = set()

    def wants(self, key: str) -> bool:
        if self.target == TARGETS[0]:
            self._elsewhere.add(key)
            return True
        # The kernel, and of each argument "('*bf16'" or, if it is a constant string, "('constexpr', 'e4m3'".
        types = (key.split()[0], *re.findall(r"\('(?:\*?\w+)'(?:, '\w\w+')?", key))
        is_new = types not in self._types
        self._types.add(types)
        return is_new or key not in self._elsewhere


@cache
def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of spill (stack and local) of a cubin, as cuobjdump tells them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1 and part.split(":")[1].isdigit())
    return {"registers": int(fields["REG"]), "spill_bytes": int(fields["STACK"]) + int(fields["LOCAL"])}


def main() -> None:
    compiled: list[CompiledLaunch] = []
    choice = Choice()
    compile_only(AbsentGpu(TARGETS[0]), compiled.append, choice.wants)
    wanted = sys.argv[1:]
    full = [(case, operations()[case.op]) for case in cases() if case.is_full]
    chosen = [
        (case, operation, arguments(case))
        for case, operation in full
        if not wanted or operation.package.rpartition(".")[2] in wanted
    ]
    for capability in TARGETS:
        choice.target = capability
        use_absent_gpu(AbsentGpu(capability))
        for case, operation, inputs in chosen:
            compiled.clear()
            operation.kernel(**inputs)
            for name, kernel in compiled:
                report = {
                    "case": str(case),
                    "kernel": name,
                    "target": capability,
                    "shared_bytes": kernel.metadata.shared,
                }
                sys.stdout.write(json.dumps({**report, **resources(kernel.asm["cubin"])}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
