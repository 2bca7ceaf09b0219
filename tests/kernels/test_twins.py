"""Every kernel equals its twin on every case, with poisoned memory: on a GPU, or in the interpreter for small cases."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.kernels.catalogue import cases, operations
from tests.kernels.tolerance import assert_same

SMALL = [(package, case) for package, case in cases() if not case.is_full]
ON_CPU = [(package, case) for package, case in cases() if find_spec(f"{package}.cpu")]


def run(package: str, module: str, case, device: torch.device):
    arguments = case.make(device)
    result = getattr(import_module(f"{package}.{module}"), case.op)(**arguments)
    return result, {name: arguments[name] for name in case.mutates}


def check(package, case, device, module="kernel"):
    expected = run(package, "reference", case, torch.device("cpu"))
    found = run(package, module, case, device)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1], "written arguments")


@pytest.mark.skipif(
    HAS_GPU, reason="the interpreter is for machines without a GPU; there test_on_the_gpu runs all cases"
)
@pytest.mark.parametrize(("package", "case"), SMALL, ids=[str(case) for _, case in SMALL])
def test_in_the_interpreter(package, case, poison):
    check(package, case, torch.device("cpu"))


@pytest.mark.parametrize(("package", "case"), ON_CPU, ids=[str(case) for _, case in ON_CPU])
def test_a_form_for_the_cpu_equals_its_twin(package, case):
    check(package, case, torch.device("cpu"), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("package", "case"), cases(), ids=[str(case) for _, case in cases()])
def test_on_the_gpu(package, case, poison, device):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    check(package, case, device)


@pytest.mark.parametrize("package", operations())
def test_an_operation_has_its_four_files_and_says_what_it_offers(package):
    offered = import_module(package).__all__
    assert offered
    for name in offered:
        assert callable(getattr(import_module(package), name))
        assert callable(getattr(import_module(f"{package}.reference"), name))
        assert callable(getattr(import_module(f"{package}.kernel"), name))
        assert any(case.op == name for case in import_module(f"{package}.cases").CASES), f"{name} has no case"
