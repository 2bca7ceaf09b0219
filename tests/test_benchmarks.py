"""Benchmarks run by hand, some only on a GPU: what they take from the package is there all the same."""

import runpy
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_all_that_it_imports(path):
    assert callable(runpy.run_path(str(path))["main"])
