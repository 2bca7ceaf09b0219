"""A hub that has the small sources of one model, and a process to run commands in."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import HubServer
from tests.setup.nursery import Ended, Nursery
from tests.synthetic import tiny_config, write_checkpoint


@pytest.fixture(scope="session")
def tiny_sources(tmp_path_factory) -> Path:
    """A directory with one small model twice: `int4` as AutoRound writes it, and `fp8`."""
    root = tmp_path_factory.mktemp("tiny_sources")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = tiny_config(**layers, num_experts=2, num_experts_per_tok=1)
    write_checkpoint(root / "int4", "autoround", shards=2, config=config)
    write_checkpoint(root / "fp8", "fp8", shards=2, config=config)
    return root


@pytest.fixture(scope="session")
def small_hub(tiny_sources) -> Iterator[HubServer]:
    """A hub with the small sources as Intel/Small-int4 and Qwen/Small-FP8. Tests heal what they break."""
    with HubServer() as hub:
        hub.add("Intel/Small-int4", tiny_sources / "int4")
        hub.add("Qwen/Small-FP8", tiny_sources / "fp8")
        yield hub


@pytest.fixture(scope="session")
def nursery(small_hub, tmp_path_factory) -> Iterator[Nursery]:
    """Its commands use the small hub, and a cache that stays empty."""
    environment = small_hub.environment(tmp_path_factory.mktemp("home"))
    with Nursery(tmp_path_factory.mktemp("nursery"), environment) as nursery:
        yield nursery


RECIPE = """
summary = "hybrid of small checkpoints"
model = "small"
[sources]
base = "Intel/Small-int4"
fp8 = "Qwen/Small-FP8"
[build]
lm_head = "int8"
mtp = "int4"
[serve]
max_model_len = 2048
"""


class Box:
    """A bare box: a directory, a recipe file, and `onebox up`."""

    def __init__(self, directory: Path, hub: HubServer, nursery: Nursery) -> None:
        self.directory, self.hub = directory, hub
        self._nursery = nursery
        self.write_recipe()

    @property
    def built(self) -> Path:
        return self.directory / "models" / "small-hybrid"

    @property
    def digest(self) -> dict[str, str]:
        """The bytes of the build."""
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(self.built.iterdir())}

    def write_recipe(self, before: str = "", after: str = "") -> None:
        """The recipe, with one text of it replaced by another."""
        assert before in RECIPE
        (self.directory / "hybrid.toml").write_text(RECIPE.replace(before, after) if before else RECIPE)

    def up(self, *arguments: str, serves: bool = False, **how: Any) -> Ended:
        """Runs `onebox up`; `how` are options of `Nursery.run`."""
        own = ("up", "small", "--recipe", "hybrid.toml", *(() if serves else ("--no-serve",)))
        return self._nursery.run(self.directory, *own, *arguments, **how)


@pytest.fixture
def box(tmp_path, small_hub, nursery) -> Iterator[Box]:
    yield Box(tmp_path, small_hub, nursery)
    small_hub.heal()
