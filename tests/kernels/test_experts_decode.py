"""Routed experts for a few rows: the twin is the model's formula, and a row does not see the others."""

import pytest
import torch
from torch.nn import functional

from onebox.formats.expert_tiles import unpack_down, unpack_gate_up
from onebox.formats.group_int import GroupInt, dequantize
from onebox.kernels.experts import reference
from onebox.kernels.experts.cases import draw_routing, fixed_point, float_experts, int_experts
from tests.kernels.catalogue import forms
from tests.kernels.tolerance import assert_same

OPERATIONS = ("routed_experts_int4", "routed_experts_bf16")
BY_ROW = ("planes", "scale", "x", "ids", "weights")


def kernel(op):
    return getattr(forms("kernel"), op)


def arguments(op, rows, k, experts, hidden, inner, device=None):
    draw = torch.Generator().manual_seed(rows)
    ids, weights = draw_routing(rows, k, experts, draw)
    x = torch.randn(rows, hidden, generator=draw).to(torch.bfloat16)
    if op == "routed_experts_int4":
        planes, scale = fixed_point(x)
        rest = {"planes": planes, "scale": scale, **int_experts(experts, hidden, inner, torch.float16, draw)}
    else:
        rest = {"x": x, **float_experts(experts, hidden, inner, draw)}
    return {name: tensor.to(device) for name, tensor in {"ids": ids, "weights": weights, **rest}.items()}


def take(given, rows):
    """The same call for some of the rows."""
    return {name: tensor[rows] if name in BY_ROW else tensor for name, tensor in given.items()}


def dense(op, given):
    """Every expert's float32 (gate_up, down), from `formats` alone."""
    if op == "routed_experts_bf16":
        return given["gate_up"].to(torch.float32), given["down"].to(torch.float32)
    result = []
    for name, unpack in (("gate_up", unpack_gate_up), ("down", unpack_down)):
        codes, scales = unpack(given[name], given[f"{name}_scale"])
        matrix = GroupInt(codes.flatten(0, 1), scales.flatten(0, 1), None, None, 128, 4)
        result.append(dequantize(matrix).unflatten(0, codes.shape[:2]))
    return result


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_twin_is_the_formula(op):
    given = arguments(op, 5, 2, 4, 128, 128)
    gate_up, down = dense(op, given)
    if "x" in given:
        x = given["x"].float()
    else:
        high, low = given["planes"].double().unbind(1)
        x = ((high * 256 + low) * given["scale"].double().repeat_interleave(128, -1)).float()
    expected = torch.zeros(5, 128)
    for row in range(5):
        for expert, weight in zip(given["ids"][row].tolist(), given["weights"][row], strict=True):
            gate, up = functional.linear(x[row], gate_up[expert]).chunk(2)
            expected[row] += weight * functional.linear(functional.silu(gate) * up, down[expert])
    assert_same(getattr(reference, op)(**given), expected)


def check_rows(function, given, alone, among):
    """Each of the rows `alone` has the same bits alone, and among the first `among` rows."""
    whole = function(**given)
    for row in alone:
        assert torch.equal(function(**take(given, slice(row, row + 1)))[0], whole[row])
    for count in among:
        assert torch.equal(function(**take(given, slice(0, count))), whole[:count])


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_row_does_not_depend_on_the_others(op, device):
    check_rows(kernel(op), arguments(op, 6, 1, 1, 128, 128, device), alone=(0, 5), among=(3,))


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_row_of_the_twin_does_not_depend_on_the_others(op):
    given = arguments(op, 64, 2, 3, 256, 128)
    check_rows(getattr(reference, op), given, alone=range(64), among=(2, 3, 8, 17))


@pytest.mark.parametrize("op", OPERATIONS)
def test_it_does_not_matter_which_experts_the_others_chose(op, device):
    given = arguments(op, 5, 1, 2, 128, 128, device)
    given["ids"] = torch.tensor([[1], [0], [0], [0], [0]], dtype=torch.int32, device=device)
    apart = kernel(op)(**given)
    given["ids"] = torch.ones_like(given["ids"])
    assert torch.equal(kernel(op)(**given)[0], apart[0])


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_nan_stays_in_its_row(op, device):
    given = arguments(op, 3, 1, 1, 128, 128, device)
    whole = kernel(op)(**given)
    given["scale" if op == "routed_experts_int4" else "x"][1, 0] = float("nan")
    found = kernel(op)(**given)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[::2], whole[::2])


@pytest.mark.parametrize("factor", [1e-10, 1e4])
def test_small_and_large_activations_keep_their_precision(factor, device):
    given = arguments("routed_experts_int4", 1, 1, 1, 128, 128, device)
    given["scale"] *= factor
    on_host = {name: tensor.cpu() for name, tensor in given.items()}
    assert_same(kernel("routed_experts_int4")(**given), reference.routed_experts_int4(**on_host))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_a_row_does_not_depend_on_the_others_at_full_size(op, hidden, inner, device):
    given = arguments(op, 64, 8, 16, hidden, inner, device)
    check_rows(kernel(op), given, alone=range(64), among=(2, 3, 8, 17))
