"""How fast a checkpoint comes off the disk into the model's layout, as a ratio to reading the same files and no more.

    python benchmarks/load_speed.py [--gb 4] [--rounds 3] [--directory DIR] [--checkpoint DIR] [--device cuda]

"disk" reads every shard from end to end with the loader's own direct reads into its buffer and drops the bytes. "load"
on a GPU is `load_model`: headers, reads, copies, repacking, until the last kernel is done. On a CPU it is the reader
alone, every tensor in the model's order into memory of its own and no dequantising: there the model is a float32 twin,
whose making says nothing of disks. Files are dropped from the page cache before each run; the last line is JSON.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onebox.checkpoint.bind import bind
from onebox.checkpoint.header import TensorEntry, write_header
from onebox.checkpoint.pieces import PieceRing, plan_pieces
from onebox.checkpoint.source import open_checkpoint
from onebox.checkpoint.staging import StagedReader
from onebox.model.dummy import HYBRID
from onebox.model.load import load_model, loading_order
from onebox.spec.model import spec_from_config
from onebox.spec.modules import Module, modules
from onebox.spec.shapes import SHAPES
from onebox.spec.weights import PARTS, Geometry, Layout, StoredTensor, WeightFormat, tensor_bytes

LAYOUTS = {
    WeightFormat.INT4: (Layout.PACKED, 128, 4),
    WeightFormat.FP8: (Layout.FP8_BLOCK, 0, 8),
    WeightFormat.INT8: (Layout.INT8_ROW, 0, 8),
}
LAYER_GB = 1.35
GOAL = 0.8


def write_hybrid(directory: Path, gigabytes: float) -> None:
    """The 122B in the formats that `onebox build` makes, with so many layers that it has about `gigabytes`."""
    config = json.loads(json.dumps(SHAPES["qwen3.5-122b-a10b"]))
    layers = max(1, round(gigabytes / LAYER_GB))
    config["text_config"] |= {"num_hidden_layers": layers, "vocab_size": 32768, "mtp_num_hidden_layers": 0}
    config.pop("vision_config")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    # Bits that are finite as bfloat16, whatever tensor they end up in.
    noise = (torch.randint(0, 1 << 15, (1 << 22,), dtype=torch.int16) & 0x3F7F).view(torch.uint8).numpy().tobytes()
    shards: dict[str, list[Module]] = {}
    for module in modules(spec_from_config(config)):
        layer = module.name.partition(".layers.")[2].partition(".")[0]
        shards.setdefault(layer or "rest", []).append(module)
    for name, members in shards.items():
        tensors = {name: value for module in members for name, value in stored(module).items()}
        sized = [(name, value, tensor_bytes(value)) for name, value in tensors.items()]
        shapes = {f"{module.name}.weight_shape": module.shape for module in members}
        with (directory / f"model-{name}.safetensors").open("wb") as file:
            file.write(write_header(sized, {"format": "pt"}))
            for tensor, _, size in sized:
                said = torch.tensor(shapes.get(tensor, ())).numpy().tobytes()
                file.write(said if tensor in shapes else (noise * (size // len(noise) + 1))[:size])
            file.flush()
            os.fsync(file.fileno())


def stored(module: Module) -> dict[str, StoredTensor]:
    """The tensors of a module in its format, by full name."""
    chosen = HYBRID.get(module.module_class) if module.is_matrix else None
    if chosen is None:
        return {module.plain_tensor: StoredTensor("BF16", module.shape)}
    layout, group, bits = LAYOUTS[chosen]
    rows, columns = module.shape
    geometry = Geometry(rows, columns, columns // group if group else 1, bits)
    required = [part for part in PARTS[layout] if part.required]
    return {f"{module.name}.{p.suffix}": StoredTensor(p.dtypes[0], p.shapes(geometry)[0]) for p in required}


def drop_from_cache(shards: tuple[Path, ...]) -> None:
    for shard in shards:
        file = os.open(shard, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_disk(shards: tuple[Path, ...], device: torch.device) -> None:
    whole = [TensorEntry(shard.name, "U8", (0,), shard, 0, shard.stat().st_size) for shard in shards]
    ring = PieceRing(plan_pieces([[entry] for entry in whole]), device)
    try:
        while ring.take(lambda _piece, _staged: None):
            pass
    finally:
        ring.close()


def load(directory: Path, device: torch.device) -> None:
    if device.type == "cuda":
        load_model(directory, device)
        torch.cuda.synchronize()
        return
    checkpoint = open_checkpoint(directory)
    order = loading_order(checkpoint.spec, bind(checkpoint))
    with StagedReader(order, device) as reader:
        for group in order:
            for entry in group:
                reader.read(entry)


def seconds(work: Callable[[], None], shards: tuple[Path, ...]) -> float:
    drop_from_cache(shards)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(directory: Path, device: torch.device, rounds: int) -> None:
    """Interleaved rounds, so that both see the same machine; prints medians."""
    shards = open_checkpoint(directory).shards
    total = sum(shard.stat().st_size for shard in shards)
    what = "load_model" if device.type == "cuda" else "the reader alone"
    print(f"{total / 1e9:.2f} GB in {len(shards)} files to {device} ({what}); goal: {GOAL} of the disk")
    runs = {"disk": lambda: read_disk(shards, device), "load": lambda: load(directory, device)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, work in runs.items():
            times[name].append(seconds(work, shards))
    result = {name: statistics.median(values) for name, values in times.items()}
    for name, taken in result.items():
        listed = ", ".join(f"{value:.2f}" for value in times[name])
        print(f"{name:5} {taken:7.2f} s  {total / taken / 1e9:6.2f} GB/s  (rounds: {listed})")
    ratio = result["disk"] / result["load"]
    print(f"ratio {ratio:.2f}")
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    fields = {"bytes": total, "seconds": result, "load_over_disk": ratio, "reached": ratio >= GOAL, "what": what}
    print(json.dumps({**fields, "device": str(device), **machine}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to write the checkpoint")
    parser.add_argument("--checkpoint", type=Path, default=None, help="one that is there, instead of writing one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.checkpoint:
        measure(arguments.checkpoint, device, arguments.rounds)
        return
    root = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="onebox-bench-"))
    try:
        write_hybrid(root / "hybrid", arguments.gb)
        measure(root / "hybrid", device, arguments.rounds)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
