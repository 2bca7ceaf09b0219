"""Times every full-size kernel case on a GPU: microseconds, and bytes of inputs and outputs per second.

    python benchmarks/kernels.py [PACKAGE ...]

Each case is captured in a CUDA graph over several copies of its inputs, together larger than the L2 cache, so that
weights come from memory as in a real step. The ceiling, a plain copy, is measured first. The last line is JSON. A
kernel alone is no speed of the engine: this says where a step's time can go, not how long it takes.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.lab.decode import copy_speed
from tests.kernels.catalogue import cases, operations

ROTATION_BYTES = 256 << 20
REPLAYS = 20


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in an argument or result, however nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return tensors_in(vars(value)) if hasattr(value, "__dataclass_fields__") else []


def nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of one call, from replays of a graph that makes all calls once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def measure(case: Any) -> dict[str, Any]:
    device = torch.device("cuda")
    first = case.make(device)
    size = nbytes(first)
    copies = [first] + [case.make(device) for _ in range(min(63, ROTATION_BYTES // max(1, size)))]
    function = operations()[case.op].kernel
    size += nbytes(function(**first))
    taken = microseconds([lambda arguments=arguments: function(**arguments) for arguments in copies])
    return {"case": str(case), "microseconds": round(taken, 2), "bytes": size, "tb_per_s": round(size / taken / 1e6, 3)}


def main() -> None:
    wanted = sys.argv[1:]
    ceiling = copy_speed()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_per_s": round(ceiling / 1e12, 3),
    }
    print(f"{machine['gpu']}: copy {ceiling / 1e12:.2f} TB/s")
    rows = []
    for case in cases():
        if case.is_full and (not wanted or operations()[case.op].package.rpartition(".")[2] in wanted):
            try:
                row = measure(case)
            except Exception as error:
                row = {"case": str(case), "failed": f"{type(error).__name__}: {error}"}
            rows.append(row)
            print(json.dumps(row))
    print(json.dumps({**machine, "rows": rows}))


if __name__ == "__main__":
    main()
