"""`onebox up` over local directories: every step once, nothing twice, and the same bytes however often it is killed."""

import hashlib
from pathlib import Path

import pytest

RECIPE = """
summary = "hybrid of small checkpoints"
model = "small"
[sources]
base = "{root}/int4"
fp8 = "{root}/fp8"
[build]
lm_head = "int8"
mtp = "int4"
[serve]
max_model_len = 2048
"""


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture
def recipe(small_sources, tmp_path):
    path = tmp_path / "hybrid.toml"
    path.write_text(RECIPE.format(root=small_sources))
    return path


UP = ("up", "small", "--recipe", "hybrid.toml", "--no-serve")


@pytest.fixture(scope="module")
def built(small_sources, nursery, tmp_path_factory):
    """What one undisturbed run builds, with what it printed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "hybrid.toml").write_text(RECIPE.format(root=small_sources))
    ended = nursery.run(directory, *UP)
    assert ended.code == 0, ended.err
    return digest(directory / "models" / "small-hybrid"), ended.out


def test_killed_at_every_step_it_ends_in_the_same_bytes(recipe, nursery, built, tmp_path):
    attempt, steps = 0, set()
    while True:
        attempt += 1
        ended = nursery.run(tmp_path, *UP, kill_at=2 * attempt - 1)
        steps |= {line.split()[0] for line in ended.out.splitlines()[-1:]}
        if ended.code == 0:
            break
        assert ended.code == -9, ended.err
        assert attempt < 100
    assert digest(tmp_path / "models" / "small-hybrid") == built[0]
