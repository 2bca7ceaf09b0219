"""`python -m tests.engine.disk.killed CHECKPOINT ROOT CHUNKS`: an engine that is killed after so many chunks."""

import os
import signal
import sys
from pathlib import Path

from onebox.engine.api import EngineOptions, Request, SamplingParams, TokenInfo, plan_engine, start_engine
from onebox.engine.disk.rates import DiskRates
from onebox.store.writer import EntryWriter

OPTIONS = EngineOptions(
    device="cpu",
    dtype="float32",
    max_model_len=2048,
    kv_cache_memory_bytes=16 << 20,
    max_num_batched_tokens=64,
    speculation="none",
)
REQUEST = Request("asked", tuple(range(1, 41)) * 30, SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True, seed=1))


def main(checkpoint: str, root: str, num_chunks: str) -> None:
    left = iter(range(int(num_chunks)))
    write_chunk = EntryWriter.write_chunk

    def write_and_die(writer, chunk, parts):
        write_chunk(writer, chunk, parts)
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    EntryWriter.write_chunk = write_and_die  # type: ignore[method-assign]
    DiskRates.read_pays = lambda *_: True  # type: ignore[assignment,method-assign]
    plan = plan_engine(Path(checkpoint), EngineOptions(**{**vars(OPTIONS), "prefix_dir": root}), TokenInfo())
    with start_engine(plan, TokenInfo()) as engine:
        for _ in engine.submit(REQUEST):
            pass
    raise SystemExit("It was not killed.")


if __name__ == "__main__":
    main(*sys.argv[1:])
