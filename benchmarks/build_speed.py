"""How fast `onebox build` moves tensors, as a ratio to `cp` of the same files in the same run.

    python benchmarks/build_speed.py [--gb 4] [--rounds 3] [--directory DIR]

Both sides start from files that the page cache holds and end with their output flushed to disk. `cp` copies; the build
copies, hashes every tensor and writes a header of its own. A second line gives the speed of the hybrid recipe, which
repacks INT4 as well. The last line is JSON.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.header import write_header
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.shapes import SHAPES
from onebox.spec.weights import PARTS, Geometry, Layout, StoredTensor, tensor_bytes

INT4 = {ModuleClass.EXPERTS, ModuleClass.ATTENTION, ModuleClass.DELTA, ModuleClass.DELTA_GATES}
GOAL = 0.7


def layered_config(layers: int) -> dict:
    """The 122B model with fewer layers and a small vocabulary: real matrices, fewer of them."""
    config = json.loads(json.dumps(SHAPES["qwen3.5-122b-a10b"]))
    config["text_config"] |= {"num_hidden_layers": layers, "vocab_size": 32768, "mtp_num_hidden_layers": 0}
    config.pop("vision_config")
    config["quantization_config"] = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    return config


def write_autoround(directory: Path, gigabytes: float) -> int:
    """An AutoRound checkpoint of about `gigabytes` with random bytes for codes; returns its exact size in bytes."""
    layers = max(1, round(gigabytes / 1.3))
    config = layered_config(layers)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    total = 0
    by_layer: dict[str, list] = {}
    for module in modules(spec_from_config(config)):
        parts = [(module.plain_tensor, StoredTensor("BF16", module.shape))]
        if module.module_class in INT4 and module.is_matrix:
            rows, columns = module.shape
            shape = Geometry(rows, columns, columns // 128, 4)
            gptq = [part for part in PARTS[Layout.GPTQ] if part.required]
            parts = [(f"{module.name}.{p.suffix}", StoredTensor(p.dtypes[0], p.shapes(shape)[0])) for p in gptq]
        key = module.name.split(".mlp")[0] if ".layers." in module.name else "rest"
        by_layer.setdefault(key.rpartition(".")[0] or key, []).extend(parts)
    # Bits that are finite as bfloat16 and as float16, whatever tensor they end up in.
    noise = (torch.randint(0, 1 << 15, (1 << 22,), dtype=torch.int16) & 0x3F7F).view(torch.uint8).numpy().tobytes()
    for number, tensors in enumerate(by_layer.values()):
        sized = [(name, stored, tensor_bytes(stored)) for name, stored in tensors]
        with (directory / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(write_header(sized, {"format": "pt"}))
            for name, _, size in sized:
                pattern = b"\x77" * size if name.endswith("qzeros") else noise * (size // len(noise) + 1)
                file.write(pattern[:size])
            total += file.tell()
    return total


def seconds(work: Callable[[], object], out: Path) -> float:
    """Wall time of `work`, output flushed to disk, with `out` absent before and removed after."""
    os.sync()
    begin = time.perf_counter()
    work()
    subprocess.run(["sync", "-f", str(out.parent)], check=True)
    taken = time.perf_counter() - begin
    shutil.rmtree(out)
    return taken


def main() -> None:
    """Runs the rounds, interleaved so that both sides see the same machine, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="onebox-bench-"))
    try:
        total = write_autoround(root / "base", arguments.gb)
        sources = BuildSources(open_source("base", root / "base"))
        out = root / "out"
        runs = {
            "cp": lambda: subprocess.run(["cp", "-r", str(root / "base"), str(out)], check=True),
            "move": lambda: run_build(plan_build(Recipe(), sources), out),
            "hybrid": lambda: run_build(
                plan_build(Recipe(shared=TargetFormat.FP8, lm_head=TargetFormat.INT8), sources), out
            ),
        }
        print(f"{total / 1e9:.2f} GB in {len(list((root / 'base').glob('*.safetensors')))} files; goal: {GOAL} of cp")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(arguments.rounds):
            for name, work in runs.items():
                times[name].append(seconds(work, out))
        result = {name: statistics.median(values) for name, values in times.items()}
        for name, taken in result.items():
            speed, ratio = total / taken / 1e9, result["cp"] / taken
            rounds = ", ".join(f"{value:.2f}" for value in times[name])
            print(f"{name:7} {taken:7.2f} s  {speed:5.2f} GB/s  {ratio:5.2f} of cp  (rounds: {rounds})")
        ratio = result["cp"] / result["move"]
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        print(
            json.dumps({"bytes": total, "seconds": result, "move_over_cp": ratio, "reached": ratio >= GOAL, **machine})
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
