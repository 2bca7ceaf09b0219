"""Every kernel equals its twin on every case, with poisoned memory: on a GPU, or in the interpreter for small cases."""

from importlib import import_module
from inspect import signature

import pytest
import torch

from onebox.kernels.common.dispatch import Operation
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import cases, forms, operations, packages
from tests.kernels.tolerance import assert_same

SMALL = [case for case in cases() if not case.is_full]
ON_CPU = [case for case in cases() if operations()[case.op].has_cpu_form]


def run(kind: str, case, device: torch.device):
    arguments = case.make(device)
    result = getattr(forms(kind), case.op)(**arguments)
    return result, {name: arguments[name] for name in case.mutates}


def check(case, device, kind="kernel"):
    expected = run("reference", case, torch.device("cpu"))
    found = run(kind, case, device)
    assert_same(found[0], expected[0], operation=case.op)
    assert_same(found[1], expected[1], "written arguments", case.op)


@pytest.mark.skipif(
    HAS_GPU, reason="the interpreter is for machines without a GPU; there test_on_the_gpu runs all cases"
)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_in_the_interpreter(case, poison):
    check(case, torch.device("cpu"))


@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_a_form_for_the_cpu_equals_its_twin(case):
    check(case, torch.device("cpu"), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=str)
def test_on_the_gpu(case, poison, device):
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    check(case, device)


@pytest.mark.parametrize("package", packages())
def test_a_package_offers_operations_and_each_has_a_small_and_a_full_case(package):
    offered = import_module(package).__all__
    assert offered
    own = import_module(f"{package}.cases").CASES
    for name in offered:
        assert isinstance(getattr(import_module(package), name), Operation)
        assert {case.is_full for case in own if case.op == name} == {True, False}, f"{name} lacks a case"


@pytest.mark.parametrize("operation", operations().values(), ids=lambda operation: operation.name)
def test_every_form_of_an_operation_takes_the_twins_arguments(operation):
    expected = [(p.name, p.default) for p in signature(operation.twin).parameters.values()]
    for form in (operation.kernel, operation.cpu):
        assert [(p.name, p.default) for p in signature(form).parameters.values()] == expected
