"""Every recipe that ships, as it is, over small checkpoints in the formats of the published ones."""

import json

import pytest

from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.setup.recipe_file import find_recipe, shipped_recipes
from tests.hub_server import HubServer

PUBLISHED = {
    "Intel/Qwen3.5-122B-A10B-int4-AutoRound": "autoround-sharded",
    "Qwen/Qwen3.5-122B-A10B-FP8": "fp8-sharded",
    "Qwen/Qwen3.5-122B-A10B": "bf16-fused-sharded",
    "txn545/Qwen3.5-122B-A10B-NVFP4": "nvfp4-modelopt-sharded",
    "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4": "gptq-sharded",
    "Qwen/Qwen3.5-35B-A3B-FP8": "fp8-sharded",
}
SHIPPED = [(model, name) for model, names in shipped_recipes().items() for name in names]
# The formats of experts, shared experts, attention, LM head and MTP experts in what is served.
SERVED = {
    ("qwen3.5-122b-a10b", "hybrid"): ("int4", "fp8", "int4", "int8", "int4"),
    ("qwen3.5-122b-a10b", "hybrid-fp8"): ("int4", "fp8", "fp8", "int8", "int4"),
    ("qwen3.5-122b-a10b", "int4"): ("int4", "bf16", "int4", "bf16", "bf16"),
    ("qwen3.5-122b-a10b", "nvfp4-mtp"): ("nvfp4", "bf16", "bf16", "bf16", "nvfp4"),
    ("qwen3.5-35b-a3b", "hybrid"): ("int4", "fp8", "fp8", "int8", "int4"),
}


@pytest.fixture(scope="module")
def published(checkpoints):
    with HubServer() as hub:
        for repository, kind in PUBLISHED.items():
            hub.add(repository, checkpoints / kind)
        yield hub


@pytest.mark.parametrize(("model", "name"), SHIPPED)
def test_a_recipe_that_ships_makes_what_it_says(published, nursery, tmp_path, model, name):
    environment = published.environment(tmp_path / "home")
    published.requests.clear()
    ended = nursery.run(tmp_path, "up", model, "--recipe", name, "--no-serve", environment=environment)
    assert ended.code == 0, ended.err
    recipe = find_recipe(model, name)
    output = recipe.output_name if recipe.formats else "sources/Intel--Qwen3.5-122B-A10B-int4-AutoRound"
    report = inspect_checkpoint(tmp_path / "models" / output)
    assert report.is_servable
    assert report.mtp.is_complete
    formats = {row.module_class.value: " ".join(row.formats).lower() for row in report.rows}
    kinds = ("experts", "shared expert", "attention", "lm head", "mtp experts")
    for kind, expected in zip(kinds, SERVED[model, name], strict=True):
        assert formats[kind].startswith(expected), (kind, formats[kind])
    asked = {"/".join(served.path.split("/")[1:3]) for served in published.requests if "/resolve/" in served.path}
    assert asked == {source.hub_id.repo for source in recipe.sources}
    assert json.loads((tmp_path / "models" / f".{recipe.output_name}.json").read_text())["verified"]
