"""Fixtures that several rooms' tests share."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

# Before any library reads them: no test reaches for the network, and two workers do not fight for two cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# What tests build and serve must not be in the user's `onebox list`.
STATE = tempfile.TemporaryDirectory(prefix="onebox-tests-state-")
os.environ["XDG_STATE_HOME"] = STATE.name
# Kernels run on a GPU if there is one, else in Triton's interpreter. Triton decides when it is first imported, which
# libraries that other tests use may do; so it is said here, before any of them.
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and stop with it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


SPILLS: list[str] = []


@pytest.fixture
def spills() -> list[str]:
    """Lines about kernels that spill registers, printed at the end of the run."""
    return SPILLS


def pytest_sessionfinish(session) -> None:
    """A parallel worker hands its lines to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spills"] = SPILLS


def pytest_terminal_summary(terminalreporter) -> None:
    for line in sorted(SPILLS):
        terminalreporter.write_line(f"spills: {line}")


class Collector:
    """Takes over what parallel workers found; known to pytest only where it runs in parallel."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        SPILLS.extend(getattr(node, "workeroutput", {}).get("spills", []))


def pytest_configure(config) -> None:
    config.pluginmanager.register(Collector())


class CliResult(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch, capsys) -> Callable[..., CliResult]:
    """Runs the `onebox` command in this process: what it printed, and the exit code a shell would see."""

    def run(*arguments: str | Path) -> CliResult:
        from onebox.cli.main import main

        monkeypatch.setattr(sys, "argv", ["onebox", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return CliResult(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """A directory with one small checkpoint of each kind, all of the same model. Tests must not write into it."""
    from tests.synthetic import KINDS, write_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        write_checkpoint(root / kind, kind)
        write_checkpoint(root / f"{kind}-sharded", kind, shards=3)
    write_checkpoint(root / "other-weights", "fp8", seed=1)
    return root


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The tiny random checkpoint that `onebox serve` makes when given none."""
    from onebox.model.random import write_random_checkpoint

    directory = tmp_path_factory.mktemp("random") / "tiny"
    write_random_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def small_sources(checkpoint, tmp_path_factory) -> Path:
    """A directory with one small model three times: `bf16`, `int4` (experts and projections) and `fp8`."""
    from onebox.checkpoint.build import plan_build, run_build
    from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source

    root = tmp_path_factory.mktemp("small_sources")
    (root / "bf16").symlink_to(checkpoint)
    int4, fp8 = TargetFormat.INT4, TargetFormat.FP8
    recipes = {
        "int4": Recipe(experts=int4, attention=int4, delta=int4),
        "fp8": Recipe(experts=fp8, attention=fp8, delta=fp8, shared=fp8, mtp=fp8),
    }
    for name, recipe in recipes.items():
        plan = plan_build(recipe, BuildSources(open_source("base", checkpoint)), shard_bytes=2 << 20)
        run_build(plan, root / name)
        (root / name / "onebox_manifest.json").unlink()
    return root


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    from onebox.text.tokenizer import Tokenizer

    return Tokenizer.load(checkpoint)


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A running hub without repositories, which huggingface_hub and onebox use with an empty cache."""
    from tests.hub_server import HubServer

    with HubServer() as server:
        server.use(monkeypatch, tmp_path_factory.mktemp("hub-home"))
        yield server
