"""Routed experts for many tokens: a token's bits are its own, however many come with it."""

import pytest
import torch

from onebox.formats.expert_tiles import pack_down, pack_gate_up, unpack_down, unpack_gate_up
from onebox.kernels.experts import reference
from onebox.kernels.experts.cases import draw_routing, fixed_point, float_experts, int_experts
from tests.kernels.catalogue import forms

OPERATIONS = ("prefill_experts_int4", "prefill_experts_bf16")
BY_TOKEN = ("x", "ids", "weights")
COUNTS = (1, 63, 64, 65)


def kernel(op):
    return getattr(forms("kernel"), op)


def arguments(op, tokens, k, experts, hidden, inner, device=None, bits=(4, 4)):
    draw = torch.Generator().manual_seed(tokens)
    ids, weights = draw_routing(tokens, k, experts, draw)
    x = torch.randn(tokens, hidden, generator=draw).to(torch.bfloat16)
    if op == "prefill_experts_int4":
        matrices = int_experts(experts, hidden, inner, torch.float16, draw, bits)
    else:
        matrices = float_experts(experts, hidden, inner, draw)
    given = {"x": x, "ids": ids, "weights": weights, **matrices}
    return {name: tensor.to(device) for name, tensor in given.items()}


def take(given, tokens):
    """The same call for some of the tokens."""
    return {name: tensor[tokens] if name in BY_TOKEN else tensor for name, tensor in given.items()}


def check_slices(function, given):
    whole = function(**given)
    tokens = len(whole)
    for part in (*(slice(0, count) for count in COUNTS), slice(64, 128), slice(64, tokens), slice(128, tokens)):
        assert torch.equal(function(**take(given, part)), whole[part]), part
    backwards = torch.arange(tokens - 1, -1, -1, device=whole.device)
    assert torch.equal(function(**take(given, backwards)), whole[backwards])


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (9, 2, 3), (65, 2, 4), (200, 8, 256)])
def test_each_pair_is_in_one_block_of_its_expert_in_its_order(tokens, k, experts, device):
    from onebox.kernels.experts.blocks import BLOCK_M, group_by_expert  # imports Triton

    ids, _ = draw_routing(tokens, k, experts, torch.Generator().manual_seed(tokens))
    ids[tokens // 2 :: 7] = -1  # rows without a sequence
    found = group_by_expert(ids.to(device), experts)
    expected = {expert: (ids.flatten() == expert).nonzero().flatten().tolist() for expert in range(experts)}
    blocks = [
        (expert, own[start : start + BLOCK_M])
        for expert, own in expected.items()
        for start in range(0, len(own), BLOCK_M)
    ]
    assert found.expert.tolist() == [expert for expert, _ in blocks] + [experts] * (len(found.expert) - len(blocks))
    for (_, own), places in zip(blocks, found.pairs.view(-1, BLOCK_M).tolist(), strict=False):
        assert places == own + [-1] * (BLOCK_M - len(own))


@pytest.mark.parametrize("op", OPERATIONS)
def test_rows_without_a_sequence_do_not_disturb_the_others(op, device, poison):
    given = arguments(op, 70, 2, 3, 128, 128, device)
    alone = kernel(op)(**take(given, slice(0, 50)))
    given["ids"][50:] = -1
    assert torch.equal(kernel(op)(**given)[:50], alone)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_token_does_not_depend_on_the_others(op, device):
    check_slices(kernel(op), arguments(op, 130, 2, 3, 128, 128, device))


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_token_of_the_twin_does_not_depend_on_the_others(op):
    check_slices(getattr(reference, op), arguments(op, 130, 2, 3, 256, 128))


@pytest.mark.parametrize("op", OPERATIONS)
def test_it_does_not_matter_which_experts_the_others_chose(op, device):
    given = arguments(op, 70, 1, 2, 128, 128, device)
    given["ids"] = torch.zeros_like(given["ids"])
    given["ids"][-1] = 1
    apart = kernel(op)(**given)
    given["ids"] = torch.ones_like(given["ids"])
    assert torch.equal(kernel(op)(**given)[-1], apart[-1])


@pytest.mark.parametrize("op", OPERATIONS)
def test_prefill_and_decode_agree_up_to_the_rounding_of_bfloat16(op, device):
    given = arguments(op, 3, 2, 2, 128, 128, device)
    found = kernel(op)(**given).to(torch.float32)
    decode = forms("kernel")
    if op == "prefill_experts_int4":
        planes, scale = fixed_point(given["x"])
        decoded = decode.routed_experts_int4(planes, scale, **{name: given[name] for name in given if name != "x"})
    else:
        decoded = decode.routed_experts_bf16(**given)
    assert float((found - decoded).abs().max() / decoded.abs().max()) < 8e-3


def check_same_in_tiles_of_four_bits(bits, tokens, k, experts, hidden, inner, device):
    op = "prefill_experts_int4"
    given = arguments(op, tokens, k, experts, hidden, inner, device, bits)
    found = kernel(op)(**given)
    for name, pack, unpack in (("gate_up", pack_gate_up, unpack_gate_up), ("down", pack_down, unpack_down)):
        codes, scales = unpack(given[name].cpu(), given[f"{name}_scale"].cpu())
        given[name] = pack(codes, scales, 4)[0].to(device)
    assert torch.equal(kernel(op)(**given), found)


def test_codes_of_three_bits_give_the_same_bits_in_tiles_of_three_and_of_four(device, poison):
    check_same_in_tiles_of_four_bits((3, 3), 2, 1, 1, 128, 128, device)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [(3, 3), (3, 4), (2, 2)], ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_fewer_bits_give_the_same_bits_as_in_tiles_of_four_at_full_size(bits, hidden, inner, device, poison):
    check_same_in_tiles_of_four_bits(bits, 333, 8, 16, hidden, inner, device)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(("hidden", "inner"), [(3072, 1024), (2048, 512)])
def test_a_token_does_not_depend_on_the_others_at_full_size(op, hidden, inner, device):
    check_slices(kernel(op), arguments(op, 1000, 8, 16, hidden, inner, device))
