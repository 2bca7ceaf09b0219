"""Prefixes on disk under an engine that was put together by hand."""

import time
from collections.abc import Callable
from pathlib import Path

from onebox.engine.api import Engine, PrefixDiskConfig
from onebox.engine.disk.layout import PrefixLayout
from onebox.engine.disk.rates import DiskRates
from onebox.engine.disk.tier import DiskTier
from onebox.engine.disk.transfer import PrefixTransfer
from onebox.engine.runner import ModelRunner
from onebox.store.directory import PrefixDirectory

BUDGET_BYTES = 1 << 34


class EagerRates(DiskRates):
    """Whatever is on disk is read: which of both is faster depends on the machine."""

    def compute_seconds(self, num_tokens: int) -> float | None:
        return 10.0 * num_tokens

    def read_pays(self, num_tokens: int, num_bytes: int) -> bool:
        return num_tokens > 0 and num_bytes > 0


def disk_config(root: Path, flush_s: float = 60.0) -> PrefixDiskConfig:
    return PrefixDiskConfig(str(root), BUDGET_BYTES, flush_s)


def open_tier(runner: ModelRunner, root: Path, parts: dict[str, str], rates: DiskRates | None = None) -> DiskTier:
    """Over the runner's memory; `parts` are the fingerprint's."""
    layout = PrefixLayout(runner.memory, runner.first_checkpoint)
    directory = PrefixDirectory(root, parts, layout.chunks, BUDGET_BYTES)
    return DiskTier(directory, PrefixTransfer(layout, runner.memory.hidden.device), 3, rates or EagerRates())


def wait_written(engine: Engine, then: Callable[[], None] = lambda: None) -> None:
    """Until an engine that computes nothing has written all that it holds; then calls, while its thread waits."""
    scheduler, limit = engine._scheduler, time.monotonic() + 120
    while True:
        with engine._changed:
            is_waiting = bool(engine._changed._waiters)
            if is_waiting and scheduler.is_idle and not scheduler._prefix._unwritten and not scheduler._disk.is_busy:
                then()
                return
        assert time.monotonic() < limit, "it is never written"
        time.sleep(0.002)


def forget_memory(engine: Engine) -> None:
    """Evicts every prefix from memory, once all are on disk."""
    wait_written(engine, engine._scheduler._prefix.clear)


def damage_files(root: Path) -> int:
    """Spoils every other chunk: a bit, the end, all of it in turns; returns how many."""
    paths = sorted(root.glob("*/chunks/*/*"))[::2]
    for place, path in enumerate(paths):
        content = bytearray(path.read_bytes())
        if place % 3 == 0:
            content[len(content) * 2 // 3] ^= 1
            path.write_bytes(content)
        elif place % 3 == 1:
            path.write_bytes(content[: len(content) - 1000])
        else:
            path.unlink()
    return len(paths)
