"""Times attention over a long context on one GPU, at the heads of the 122B: a decode step's row and a prefill's chunk.

    python benchmarks/attention.py [--tokens 128000] [--formats bf16 fp8 turboquant] [--chunk 2048]
                                   [--shapes TILE,WARPS,STAGES,REGISTERS ...]

Pages hold random bytes with scales of about one; the page table is shuffled. Decode is one layer as a captured graph,
us and TB/s of the bytes it must read; `--shapes` times a decode of packed KV also with other shapes (0 registers:
no limit). Prefill is the chunk that ends at `--tokens`, ms and TFLOP/s. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.formats.kv_pages import KVPages, allocate
from onebox.kernels.attention import decode, prefill
from onebox.kernels.common.tuning import set_options
from onebox.spec.kv import PAGE_TOKENS, KVFormat

HEADS, KV_HEADS, DIM = 32, 2, 256
DEVICE = torch.device("cuda")


def random_pages(name: str, tokens: int) -> tuple[KVPages, torch.Tensor]:
    """Pages for so many tokens, and their table [1, pages]."""
    count = -(-tokens // PAGE_TOKENS)
    pages = allocate(KVFormat.parse(name), count, PAGE_TOKENS, KV_HEADS, DIM, DEVICE)
    for part in pages[1:]:
        if part is not None and part.dtype == torch.uint8:
            part.random_(0, 127 if name == "fp8" else 256)  # no NaN codes
        elif part is not None:
            part.normal_()
            if part.dtype == torch.float16:
                part.abs_().div_(256 if name == "fp8" else 1)
    table = torch.randperm(count, device=DEVICE).to(torch.int32)[None]
    return pages, table


def time_ms(work, runs: int = 20) -> float:
    """The median of replays of `work` as a graph; the L2 is too small to hold a context."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return statistics.median(triton.testing.do_bench(graph.replay, warmup=20, rep=10 * runs, return_mode="all"))


def time_decode(pages: KVPages, table: torch.Tensor, tokens: int) -> float:
    query = torch.randn(1, HEADS, DIM, device=DEVICE).to(torch.bfloat16)
    context, rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([tokens], [0, 1]))
    return 1e3 * time_ms(lambda: decode.paged_attention(query, pages, table, context, rows, DIM**-0.5, 1))


def time_prefill(pages: KVPages, table: torch.Tensor, tokens: int, chunk: int) -> float:
    query = torch.randn(chunk, HEADS, DIM, device=DEVICE).to(torch.bfloat16)
    start, rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([tokens - chunk], [0, chunk]))
    return time_ms(lambda: prefill.paged_attention_prefill(query, pages, table, start, rows, DIM**-0.5), runs=5)


def with_shape(shape: str, pages: KVPages, work) -> float:
    """What `work` gives with another tile, number of warps, of stages and of registers in decode."""
    tile, warps, stages, registers = map(int, shape.split(","))
    bits = pages.format.key_bits, pages.format.value_bits
    own = decode._decode_shape
    changed = {"TILE": tile, "WARPS": warps, "num_warps": warps, "num_stages": stages}
    decode._decode_shape = lambda query, kv: {**own(query, kv), **changed}
    set_options({f"attention_packed_{HEADS}_{bits[0]}_{bits[1]}": {"maxnreg": registers or 255}})
    try:
        return work()
    finally:
        decode._decode_shape = own
        set_options({})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "turboquant"])
    parser.add_argument("--shapes", nargs="*", default=[])
    asked = parser.parse_args()
    found = []
    for name in asked.formats:
        pages, table = random_pages(name, asked.tokens)
        row = {"format": name, "decode_us": round(time_decode(pages, table, asked.tokens), 1)}
        row["decode_tb_per_s"] = round(pages.total_bytes / row["decode_us"] / 1e6, 2)
        if name != "bf16":
            for shape in asked.shapes:
                work = lambda: time_decode(pages, table, asked.tokens)  # noqa: E731, B023
                row[shape] = round(with_shape(shape, pages, work), 1)
        if asked.chunk:
            row["prefill_ms"] = round(time_prefill(pages, table, asked.tokens, asked.chunk), 3)
            flops = 4 * asked.chunk * (asked.tokens - asked.chunk / 2) * HEADS * DIM
            row["prefill_tflops"] = round(flops / row["prefill_ms"] / 1e9, 1)
        print(row, flush=True)
        found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
