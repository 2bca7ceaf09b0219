"""Times whole decode steps and a prefill of the model at full size with random weights, on one GPU.

    python benchmarks/step.py [--shape qwen3.5-122b-a10b] [--context 32]

INT4 experts and projections, FP8 shared expert, INT8 head, INT4 MTP layer. A step is the model from token ids to
logits, captured in a CUDA graph; scheduling, sampling and drafting are not in it, so it is no speed of an engine. Each
row tells the bytes a step must read and how near it came to a plain copy's speed; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kernels import copy_speed
from onebox.model.dummy import dummy_model
from onebox.model.linear import Phase
from onebox.model.qwen3_5 import Batch, Memory, Qwen35
from onebox.planner.presets import named_preset
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec
from onebox.spec.traffic import Routing, Step, step_traffic
from onebox.spec.weights import WeightFormat

PAGE = 64
FORMATS = {
    ModuleClass.EXPERTS: WeightFormat.INT4,
    ModuleClass.ATTENTION: WeightFormat.INT4,
    ModuleClass.DELTA: WeightFormat.INT4,
    ModuleClass.DELTA_GATES: WeightFormat.BF16,
    ModuleClass.SHARED: WeightFormat.FP8,
    ModuleClass.LM_HEAD: WeightFormat.INT8,
    ModuleClass.MTP_EXPERTS: WeightFormat.INT4,
    ModuleClass.MTP_SHARED: WeightFormat.FP8,
    ModuleClass.MTP_ATTENTION: WeightFormat.INT4,
}


def batch(model: Qwen35, streams: int, rows: int, context: int, phase: Phase) -> Batch:
    """`streams` sequences of `rows` rows each, the last of them at `context` tokens."""
    device = model.device
    pages = -(-context // PAGE)
    table = torch.arange(streams * pages, dtype=torch.int32, device=device).view(streams, pages)
    places = torch.arange(context - rows, context, device=device).repeat(streams)
    sequence = torch.arange(streams, device=device).repeat_interleave(rows)
    return Batch(
        phase=phase,
        token_ids=torch.randint(0, 500, (streams * rows,), device=device),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=torch.arange(0, streams * rows + 1, rows, dtype=torch.int32, device=device),
        slots=torch.arange(streams, dtype=torch.int32, device=device),
        keep=torch.ones(streams, dtype=torch.int32, device=device),
        seen=torch.full((streams,), context, dtype=torch.int32, device=device),
        page_table=table,
        kv_slots=table[sequence, places // PAGE].to(torch.int64) * PAGE + places % PAGE,
    )


def milliseconds(work, replays: int = 30) -> float:
    """Median time of a graph of `work`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def decode_row(model: Qwen35, streams: int, rows: int, context: int, ceiling: float, kv: KVFormat) -> dict:
    memory = Memory.allocate(model, kv, streams * -(-context // PAGE), streams, rows)
    inputs = batch(model, streams, rows, context, Phase.DECODE)
    taken = milliseconds(lambda: model.logits(model.forward(inputs, memory)))
    stored = named_preset("hybrid").weight_bytes(model.spec)
    step = Step(streams=streams, drafts=rows - 1, context_tokens=context, drafter_is_mtp=False)
    traffic = step_traffic(model.spec, stored, step, kv, Routing.EXPECTED).total_bytes
    share = traffic / ceiling / (taken / 1e3)
    return {
        "streams": streams,
        "rows": rows,
        "context": context,
        "kv": kv.name,
        "ms": round(taken, 3),
        "bytes": traffic,
        "share_of_copy": round(share, 3),
    }


def prefill_row(model: Qwen35, tokens: int, kv: KVFormat) -> dict:
    memory = Memory.allocate(model, kv, -(-tokens // PAGE), 1, 1)
    inputs = batch(model, 1, tokens, tokens, Phase.PREFILL)
    model.forward(inputs, memory)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    hidden = model.forward(inputs, memory)
    model.logits(hidden[-1:])
    torch.cuda.synchronize()
    return {"prefill_tokens": tokens, "seconds": round(time.perf_counter() - begin, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-122b-a10b")
    parser.add_argument("--context", type=int, default=32)
    arguments = parser.parse_args()
    ceiling = copy_speed()
    begin = time.perf_counter()
    spec = named_spec(arguments.shape)
    with torch.inference_mode():
        model = dummy_model(spec, FORMATS, torch.device("cuda"))
        torch.cuda.synchronize()
        made = time.perf_counter() - begin
        held = torch.cuda.memory_allocated() / 1e9
        print(
            f"{torch.cuda.get_device_name()}: copy {ceiling / 1e12:.2f} TB/s; {held:.1f} GB of weights in {made:.1f} s"
        )
        kv, rows = KVFormat.parse("bf16"), []
        for streams, count, context in ((1, 1, arguments.context), (1, 3, arguments.context), (4, 1, 32), (1, 1, 8000)):
            rows.append(decode_row(model, streams, count, context, ceiling, kv))
            print(json.dumps(rows[-1]))
        for tokens in (512, 8000):
            rows.append(prefill_row(model, tokens, kv))
            print(json.dumps(rows[-1]))
    print(
        json.dumps(
            {
                "shape": arguments.shape,
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "copy_tb_per_s": round(ceiling / 1e12, 3),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
