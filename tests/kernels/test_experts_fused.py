"""Experts of the fused decode step, in every format and up to 128 rows: a row's bits are its own.

From 17 rows on, each expert's pairs are listed first, and other kernels compute them.
"""

import pytest
import torch

from onebox.kernels.experts.cases import draw_routing, fused_arguments
from onebox.spec.errors import MismatchError
from tests.kernels.catalogue import forms

KINDS = ("int4", "nvfp4", "block", "row", "bf16")


def operation(kind):
    return getattr(forms("kernel"), f"routed_experts_{ {'block': 'fp8', 'row': 'fp8'}.get(kind, kind) }_fused")


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


def check_rows(kind, given, alone, counts):
    whole = results(kind, given)
    for row in alone:
        check_same(kind, given, slice(row, row + 1), whole)
    for count in counts:
        check_same(kind, given, slice(0, count), whole)
    check_same(kind, given, torch.arange(len(whole[0]) - 1, -1, -1, device=whole[0].device), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_among_many_does_not_depend_on_the_others_or_their_order(kind, device, poison):
    check_rows(kind, arguments(kind, (18, 2, 3, 128, 128), device), alone=(0, 17), counts=(5, 17))


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_which_experts_the_others_chose_or_that_they_chose_none(kind, device, poison):
    given = arguments(kind, (17, 1, 2, 128, 128), device, None)
    given["ids"][:] = 0
    given["ids"][3] = 1
    apart = operation(kind)(**given)[0]
    given["ids"][:] = 1
    assert torch.equal(operation(kind)(**given)[0][3], apart[3])
    given["ids"][4:] = -1
    assert torch.equal(operation(kind)(**given)[0][3], apart[3])


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
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

    with pytest.raises(MismatchError, match="multiples of 128, not 192 x 128"):
        experts.routed_experts_fp8_fused(**fused_arguments(None, "row", (2, 1, 2, 192, 128), None, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_a_row_does_not_depend_on_the_others_at_full_size(kind, hidden, inner, device, poison):
    given = arguments(kind, (128, 8, 32, hidden, inner), device)
    check_rows(kind, given, alone=(0, 1, 63, 64, 127), counts=(2, 3, 4, 8, 12, 16, 17, 32, 64, 96))
