"""`onebox bench mixed`: random arrivals, lengths and aborts against the engine on this GPU."""

import json
import time
from typing import Annotated, Any

import typer

from onebox.cli.shared_options import KVCacheDtype, MaxNumSeqs, StateCacheDtype
from onebox.cli.vllm_flags import own_kv_name
from onebox.engine.remote.spawn import EarlyProcess
from onebox.spec.errors import UnsupportedError, UsageError

__all__ = ["mixed"]


def mixed(
    shape: Annotated[str, typer.Option(help="A known model, such as qwen3.5-122b-a10b.")] = "qwen3.5-122b-a10b",
    seconds: Annotated[float, typer.Option(help="How long the clients send.")] = 60,
    clients: Annotated[int, typer.Option(help="Requests open at a time.")] = 12,
    max_num_seqs: MaxNumSeqs = 8,
    kv_cache_dtype: KVCacheDtype = "auto",
    mamba_ssm_cache_dtype: StateCacheDtype = "auto",
) -> None:
    """Load the complete engine at full size with requests that differ in all ways: waits by percentile, and memory.

    Starts the engine with random weights in a process of its own, as serve does. Each client sends one request after
    the other: prompts of 10 to 20,000 tokens (log-uniform), answers of 16 to 300, a fifth of them aborted, a tenth with
    log-probabilities or penalties. Prints lines of JSON: the start, the figures so far after each minute, so that a run
    that is cut off is not lost, and those of the whole run.
    """
    began = time.time()
    with EarlyProcess("auto") as early:
        from onebox.engine.api import EngineOptions
        from onebox.lab.mixed import MixedLoad
        from onebox.spec.hardware import detect_box
        from onebox.spec.shapes import SHAPES

        if shape not in SHAPES:
            raise UsageError(f"--shape {shape} is not known: use {', '.join(SHAPES)}.")
        if seconds <= 0 or clients < 1:
            raise UsageError("--seconds and --clients must be above 0.")
        if not detect_box().compute_capability:
            raise UnsupportedError("onebox bench mixed needs a CUDA GPU, and this machine has none.")
        options = EngineOptions(
            load_format="dummy",
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=own_kv_name(kv_cache_dtype),
            mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        )
        with MixedLoad.open(shape, options, began, early) as load:
            _print({"shape": shape, "start": load.start})
            _print(load.run(clients, seconds, lambda so_far: _print({"so_far": so_far})))


def _print(figures: dict[str, Any]) -> None:
    typer.echo(json.dumps(figures))
