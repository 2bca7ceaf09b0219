"""The image's Dockerfile: what can be checked of it without a container engine."""

import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name):
    """The words of each instruction of this name."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith(f"{name} ")]


def copied():
    return {source for *sources, _ in instructions("COPY") for source in sources}


def test_what_is_copied_exists_and_is_all_that_the_builder_is_sent():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied()
    assert all((ROOT / name).exists() for name in copied())


def test_what_is_copied_is_all_that_a_wheel_is_made_of():
    named = {PROJECT["readme"], "pyproject.toml", *(name.partition("/")[0] for name in PROJECT["license-files"])}
    assert named <= copied()


def test_torch_is_in_the_range_that_the_package_asks_for_and_comes_first():
    (asked,) = (Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch>"))
    lines = [words for words in instructions("RUN") if words[:2] == ["pip", "install"]]
    (torch,) = (Requirement(word) for word in lines[0] if word.startswith("torch"))
    assert torch.specifier == asked.specifier
    assert "." in lines[1]


def test_other_packages_are_the_versions_of_the_tests():
    tested = {Requirement(text).name: Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]}
    pinned = [Requirement(word) for words in instructions("RUN") for word in words if re.fullmatch(r"[\w-]+==.+", word)]
    assert [each.name for each in pinned] == ["vllm-router"]
    assert all(tested[each.name].specifier == each.specifier for each in pinned)
