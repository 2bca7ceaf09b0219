"""Experts of the fused decode step, in every format and up to 128 rows: a row's bits are its own.

From 17 rows on, each expert's pairs are listed first, and other kernels compute them.
"""

import pytest
import torch

from onebox.formats.expert_tiles import pack_down, pack_gate_up, unpack_down, unpack_gate_up
from onebox.kernels.experts.cases import draw_routing, fused_arguments
from onebox.spec.errors import MismatchError
from tests.kernels.catalogue import forms

KINDS = ("int4", "int3", "int34", "int2", "nvfp4", "block", "row", "bf16")
FORMATS = {"int3": "int4", "int34": "int4", "int2": "int4", "block": "fp8", "row": "fp8"}


def operation(kind):
    return getattr(forms("kernel"), f"routed_experts_{FORMATS.get(kind, kind)}_fused")


def arguments(kind, shape, device, shared="block"):
    return fused_arguments(device, kind, shape, shared, torch.bfloat16)


def take(given, rows):
    """The same call for some of the rows."""
    own = {name: given[name][rows] for name in ("ids", "weights")}
    fixed = given["rows"]
    own["rows"] = fixed._replace(
        **{name: getattr(fixed, name)[rows] for name in ("x", "planes", "scale", "squares")},
    )
    if "shared" in given:
        parts, weight = given["shared"]
        own["shared"] = parts[:, rows].contiguous(), weight
    return given | own


def results(kind, given):
    """Each result with its rows first."""
    slots, inner, down = operation(kind)(**given)
    return [part for part in (slots, inner, None if down is None else down.transpose(0, 1)) if part is not None]


def check_same(kind, given, rows, whole):
    for found, expected in zip(results(kind, take(given, rows)), whole, strict=True):
        assert torch.equal(found, expected[rows]), rows


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_a_row_among_many_does_not_depend_on_the_others_or_their_order_or_experts(kind, device, poison):
    given = arguments(kind, (17, 1, 2, 128, 128), device, None)
    whole = results(kind, given)
    check_same(kind, given, slice(16, 17), whole)
    backwards = take(given, torch.arange(16, -1, -1, device=device))
    backwards["ids"][1:9] = backwards["ids"][0]
    backwards["ids"][9:] = -1
    assert torch.equal(operation(kind)(**backwards)[0][0], whole[0][16])


def check_same_in_tiles_of_four_bits(kind, shape, device):
    given = arguments(kind, shape, device, None)
    found = operation(kind)(**given)[0]
    for name, pack, unpack in (("gate_up", pack_gate_up, unpack_gate_up), ("down", pack_down, unpack_down)):
        codes, scales = unpack(given[name].cpu(), given[f"{name}_scale"].cpu())
        given[name] = pack(codes, scales, 4)[0].to(device)
    assert torch.equal(operation("int4")(**given)[0], found)


@pytest.mark.parametrize("shape", [(1, 1, 1, 256, 128), (17, 1, 1, 128, 128)], ids=str)
def test_codes_of_three_bits_give_the_same_bits_in_tiles_of_three_and_of_four(shape, device, poison):
    check_same_in_tiles_of_four_bits("int3", shape, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int3", "int34", "int2"])
@pytest.mark.parametrize("rows", [1, 4, 12, 16, 17, 96])
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_fewer_bits_give_the_same_bits_as_in_tiles_of_four_at_full_size(kind, rows, hidden, inner, device, poison):
    check_same_in_tiles_of_four_bits(kind, (rows, 8, 16, hidden, inner), device)


@pytest.mark.parametrize("kind", ["int4"])
def test_a_nan_stays_in_its_row(kind, device):
    given = arguments(kind, (17, 1, 1, 128, 128), device, None)
    whole = operation(kind)(**given)[0]
    given["rows"].scale[1, 0] = float("nan")
    given["rows"].x[1, 0] = float("nan")
    found = operation(kind)(**given)[0]
    assert bool(found[1].isnan().all())
    assert torch.equal(found[2:], whole[2:])
    assert torch.equal(found[0], whole[0])


@pytest.mark.parametrize(("rows", "k", "experts"), [(1, 1, 1), (33, 2, 5), (128, 8, 256)])
def test_each_pair_is_in_the_list_of_its_expert_in_its_order(rows, k, experts, device, poison):
    from onebox.kernels.experts.lists import pair_lists  # imports Triton

    ids, _ = draw_routing(rows, k, experts, torch.Generator().manual_seed(rows))
    ids[rows // 2 :: 7] = -1  # rows without a sequence
    counts, pairs = pair_lists(ids.to(device), experts)
    for expert in range(experts):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert counts[expert] == len(own)
        assert pairs[expert, : len(own)].tolist() == own


def test_float_experts_of_other_sizes_are_refused():
    from onebox.kernels import experts

    with pytest.raises(MismatchError, match="multiples of 128, not 128 x 192"):
        experts.routed_experts_fp8_fused(**fused_arguments(None, "row", (2, 1, 2, 128, 192), None, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_a_row_does_not_depend_on_the_others_at_full_size(kind, hidden, inner, device, poison):
    given = arguments(kind, (128, 8, 32, hidden, inner), device)
    whole = results(kind, given)
    for rows in (
        *(slice(row, row + 1) for row in (0, 1, 63, 64, 127)),
        *map(slice, (2, 3, 4, 8, 12, 16, 17, 32, 64, 96)),
    ):
        check_same(kind, given, rows, whole)
    check_same(kind, given, torch.arange(127, -1, -1, device=device), whole)
    given["ids"][:64] = given["ids"][0]
    given["ids"][64:127] = -1
    assert torch.equal(operation(kind)(**given)[0][127], whole[0][127])
