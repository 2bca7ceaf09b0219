"""Tries the launch options of the prefill kernels of INT4 experts on a GPU, one at a time, at full size.

    python benchmarks/prefill_options.py [--tokens 8000] [--shape 122b|35b]

`onebox tune` times decode steps only; these kernels run for milliseconds and do not depend on their neighbours, so each
is timed alone. Prints milliseconds of the whole operation (grouping, gate_up, down, sum over slots) for the defaults
and for each option. Every result is compared with the default's: an option must not change a bit.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.kernels.common.tuning import launched, set_options
from onebox.kernels.experts import prefill_experts_int4
from onebox.lab.tune import trials

SHAPES = {"122b": (256, 3072, 1024), "35b": (256, 2048, 512)}
"""Experts, hidden size, an expert's inner size."""


def arguments(tokens: int, experts: int, hidden: int, inner: int) -> dict[str, torch.Tensor]:
    device = torch.device("cuda")

    def tiles(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (experts, rows // 16, columns // 128, 1024), dtype=torch.uint8, device=device)
        return codes, torch.rand(*codes.shape[:3], 16, device=device).half() * 0.02

    gate_up, gate_up_scale = tiles(2 * inner, hidden)
    down, down_scale = tiles(hidden, inner)
    logits = torch.rand(tokens, experts, device=device)
    weights, ids = logits.topk(8, dim=1)
    return {
        "x": torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16),
        "ids": ids.to(torch.int32),
        "weights": weights / weights.sum(1, keepdim=True),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
    }


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--shape", choices=SHAPES, default="122b")
    given = parser.parse_args()
    tensors = arguments(given.tokens, *SHAPES[given.shape])
    launched(forget=True)
    expected = prefill_experts_int4(**tensors)
    kernels = launched()
    taken = milliseconds(lambda: prefill_experts_int4(**tensors))
    print(f"{given.shape}, {given.tokens} tokens, defaults: {taken:.3f} ms", flush=True)
    for key, option in trials(kernels):
        set_options({key: option})
        same = torch.equal(prefill_experts_int4(**tensors), expected)
        taken = milliseconds(lambda: prefill_experts_int4(**tensors))
        print(f"{key} {option}: {taken:.3f} ms{'' if same else ', AND ANOTHER RESULT'}", flush=True)
    set_options({})


if __name__ == "__main__":
    main()
