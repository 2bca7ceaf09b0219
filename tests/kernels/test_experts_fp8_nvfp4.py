"""Routed experts in FP8 and NVFP4: the twin is the formula, a row does not see the others, decode and prefill agree."""

import pytest
import torch
from torch.nn import functional

from onebox.formats import Dialect, dequantize_fp8_block, dequantize_fp8_rows, dequantize_nvfp4, pack_e2m1
from onebox.kernels import experts
from onebox.kernels.experts import reference
from onebox.kernels.experts.cases import arguments
from onebox.spec.errors import MismatchError
from tests.kernels.catalogue import forms
from tests.kernels.tolerance import assert_same

KINDS = ("block", "row", "nvfp4")
PHASES = ("routed", "prefill")
BY_ROW = ("x", "ids", "weights")


def operation(module, phase, kind):
    return getattr(module, f"{phase}_experts_{'nvfp4' if kind == 'nvfp4' else 'fp8'}")


def kernel(phase, kind):
    return operation(forms("kernel"), phase, kind)


def take(given, rows):
    """The same call for some of the rows."""
    return {name: tensor[rows] if name in BY_ROW else tensor for name, tensor in given.items()}


def dense(kind, given, expert):
    """(gate, up, down) of an expert as float32, from `formats` alone, each matrix cut out by hand."""
    inner, found = given["gate_up"].shape[1] // 2, []
    blocks = -(-inner // 128)
    for index, (name, first) in enumerate((("gate_up", 0), ("gate_up", 1), ("down", 0))):
        codes, scale = given[name][expert], given[f"{name}_scale"][expert]
        if name == "gate_up":
            step = blocks if kind == "block" else inner
            codes, scale = codes[first * inner :][:inner], scale[first * step :][:step]
        if kind == "nvfp4":
            found.append(dequantize_nvfp4(codes, scale, given["multipliers"][expert, index], Dialect.MODELOPT))
        else:
            found.append((dequantize_fp8_block if kind == "block" else dequantize_fp8_rows)(codes, scale))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_is_the_formula(kind):
    given = arguments(None, kind, 5, 2, 4, 144, 208)
    expected = torch.zeros(5, 144)
    for row in range(5):
        for expert, weight in zip(given["ids"][row].tolist(), given["weights"][row], strict=True):
            gate, up, down = dense(kind, given, expert)
            x = given["x"][row].float()
            inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
            expected[row] += weight * functional.linear(inner, down)
    assert_same(operation(reference, "routed", kind)(**given), expected)


def check_rows(function, given, counts):
    """Rows have the same bits alone, among the first of any count, behind the first 64, and in any order."""
    whole = function(**given)
    rows = len(whole)
    for part in (*(slice(0, count) for count in counts), slice(rows - 1, rows), slice(min(64, rows // 2), rows)):
        assert torch.equal(function(**take(given, part)), whole[part]), part
    backwards = torch.arange(rows - 1, -1, -1, device=whole.device)
    assert torch.equal(function(**take(given, backwards)), whole[backwards])


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_row_does_not_depend_on_the_others(kind, device):
    check_rows(kernel("routed", kind), arguments(device, kind, 10, 1, 1, 272, 48), counts=(1, 3, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefilled_token_does_not_depend_on_the_others(kind, device):
    check_rows(kernel("prefill", kind), arguments(device, kind, 130, 2, 3, 144, 32), counts=(1, 64, 65))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_twin_does_not_depend_on_the_others(phase, kind):
    check_rows(operation(reference, phase, kind), arguments(None, kind, 70, 2, 3, 144, 80), counts=(1, 3, 64, 65))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_which_experts_the_others_chose(phase, kind, device):
    given = arguments(device, kind, 5, 1, 2, 144, 32)
    given["ids"] = torch.tensor([[1], [0], [0], [0], [0]], dtype=torch.int32, device=device)
    apart = kernel(phase, kind)(**given)
    given["ids"] = torch.ones_like(given["ids"])
    assert torch.equal(kernel(phase, kind)(**given)[0], apart[0])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row(phase, kind, device):
    given = arguments(device, kind, 3, 1, 1, 144, 32)
    whole = kernel(phase, kind)(**given)
    given["x"][1, 0] = float("nan")
    found = kernel(phase, kind)(**given)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[::2], whole[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_agree_up_to_the_rounding_of_bfloat16(kind, device):
    given = arguments(device, kind, 3, 2, 2, 144, 208)
    decoded = kernel("routed", kind)(**given)
    found = kernel("prefill", kind)(**given).to(torch.float32)
    assert float((found - decoded).abs().max() / decoded.abs().max()) < 8e-3


def columns_of_down(hidden, **stored):
    """Arguments of 16 rows whose results are the 16 columns of one expert's down, if `stored` has these gate and up:

    a unit matrix times 32, whose SiLU is 32 in float32, and a unit matrix times 1/32.
    """
    x = torch.eye(16, hidden, dtype=torch.bfloat16)
    return {"x": x, "ids": torch.zeros(16, 1, dtype=torch.int32), "weights": torch.ones(16, 1), **stored}


def on(device, given):
    return {name: tensor.to(device) for name, tensor in given.items()}


def test_every_e4m3_code_is_decoded_exactly(device):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127::128] = 0  # the two that are no number
    down = codes.view(torch.float8_e4m3fn).reshape(1, 16, 16)
    gate_up = torch.cat([torch.eye(16) * 32, torch.eye(16) / 32]).to(torch.float8_e4m3fn)[None]
    scales = {"gate_up_scale": torch.ones(1, 32), "down_scale": torch.ones(1, 16)}
    given = columns_of_down(16, gate_up=gate_up, down=down, **scales)
    assert torch.equal(kernel("routed", "row")(**on(device, given)).cpu(), down[0].float().T)


def test_every_e2m1_code_times_every_scale_is_exact(device):
    unit = pack_e2m1(2 * torch.eye(16, 128, dtype=torch.uint8))  # code 2 is one
    multipliers = torch.tensor([[32.0, 1 / 32, 0.5]])
    down = pack_e2m1(torch.arange(16, dtype=torch.uint8).expand(1, 128, 16).contiguous())
    down_scale = torch.arange(128, dtype=torch.uint8).clamp(max=126).view(torch.float8_e4m3fn).reshape(1, 128, 1)
    given = columns_of_down(
        128,
        gate_up=torch.cat([unit, unit])[None],
        gate_up_scale=torch.ones(1, 32, 8).to(torch.float8_e4m3fn),
        down=down,
        down_scale=down_scale,
        multipliers=multipliers,
    )
    found = kernel("routed", "nvfp4")(**on(device, given)).cpu()
    assert torch.equal(found, dequantize_nvfp4(down[0], down_scale[0], multipliers[0, 2], Dialect.MODELOPT).T)


def test_more_row_slots_than_a_step_has_are_refused():
    given = arguments(None, "nvfp4", 129, 8, 8, 32, 16)
    with pytest.raises(MismatchError, match=r"at most 1024 row-slots, not 1032"):
        experts.routed_experts_nvfp4(**given)


def test_scales_of_gate_and_up_together_are_refused():
    given = arguments(None, "block", 2, 1, 2, 144, 48)  # one matrix of 96 rows would have one block, gate and up two
    given["gate_up_scale"] = given["gate_up_scale"][:, :1].contiguous()
    with pytest.raises(MismatchError, match=r"gate_up_scale must be contiguous torch\.float32 \[2, 2, 2\]"):
        experts.routed_experts_fp8(**given)


def test_prefill_refuses_float32_activations():
    with pytest.raises(MismatchError, match=r"bfloat16 activations, not torch\.float32"):
        experts.prefill_experts_fp8(**arguments(None, "row", 2, 1, 2, 32, 16, x_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_a_row_does_not_depend_on_the_others_at_full_size(kind, hidden, inner, device):
    given = arguments(device, kind, 1000, 8, 8, hidden, inner)
    check_rows(kernel("prefill", kind), given, counts=(1, 63, 64, 65))
    check_rows(kernel("routed", kind), take(given, slice(0, 64)), counts=(1, 2, 3, 8, 17))


@pytest.mark.gpu
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_beyond_two_to_the_31_bytes_is_found(phase, kind, device):
    given = arguments(device, kind, 2, 1, 1, 3072, 1024)
    whole = kernel(phase, kind)(**given)
    copies = {name: t if name in BY_ROW else t.repeat(800, *[1] * (t.ndim - 1)) for name, t in given.items()}
    copies["ids"] = torch.tensor([[799], [798]], dtype=torch.int32, device=device)
    assert torch.equal(kernel(phase, kind)(**copies), whole)
