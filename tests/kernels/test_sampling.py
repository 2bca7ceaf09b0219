"""Draws are exact: the noise as defined, the softmax's distribution, the same token whatever the row's company."""

import numpy as np
import pytest
import torch

from onebox.kernels.sampling import cases, reference
from tests.conftest import HAS_GPU
from tests.kernels import plain_sampler
from tests.kernels.catalogue import forms

MODULES = ["reference", "kernel"]
SEEDS = (0, 1, -1, 2**62 + 12345, -(2**63))


@pytest.fixture
def place(module, device):
    """Where a module's tensors are: the twin is the CPU path."""
    return device if module == "kernel" else torch.device("cpu")


def chosen(module):
    return forms(module)


def settings(rows, device="cpu", temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def filled(value, dtype):
        return torch.full((rows,), value, dtype=dtype, device=device)

    return {
        "temperature": filled(temperature, torch.float64),
        "top_k": filled(top_k, torch.int32),
        "top_p": filled(top_p, torch.float64),
        "min_p": filled(min_p, torch.float64),
    }


@pytest.mark.parametrize("position", [0, 1, 262_143])
def test_the_noise_is_that_of_the_plain_sampler(position):
    seeds = torch.tensor(SEEDS)
    found = reference.gumbel(seeds, torch.full_like(seeds, position), torch.arange(5000))
    expected = np.stack([plain_sampler.gumbel(seed, position, np.arange(5000)) for seed in SEEDS])
    # One bit of the 53 that is not the same moves the noise by more than this; two libraries' logarithms do not.
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-15, atol=4e-16)


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 8}, {"top_p": 0.8}, {"top_k": 70, "top_p": 0.9}, {"temperature": 0.0}]
)
def test_the_twin_draws_the_plain_samplers_tokens(limits):
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(200, 500, generator=draw)
    seeds = torch.randint(-(2**62), 2**62, (200,), generator=draw)
    found = reference.sample(logits, **settings(200, **limits), seeds=seeds, positions=torch.arange(200))
    expected = [
        plain_sampler.sample(row, seed, position, **limits)
        for position, (row, seed) in enumerate(zip(logits.numpy(), seeds.tolist(), strict=True))
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"temperature": 0.5}, [1, 1, 1, 1, 1, 1]),
        ({"top_k": 3}, [1, 0, 1, 1, 0, 0]),
        ({"top_p": 0.75}, [1, 0, 1, 1, 0, 0]),
        ({"min_p": 0.3}, [1, 0, 1, 1, 0, 0]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.2}, [1, 0, 1, 1, 0, 0]),
    ],
)
def test_draws_have_the_distribution_of_the_softmax_over_the_kept_tokens(limits, kept):
    probabilities = np.array([0.4, 0.05, 0.25, 0.2, 0.06, 0.04]) ** (1 / limits.get("temperature", 1.0)) * kept
    expected = probabilities / probabilities.sum()
    count = 30_000
    logits = torch.tensor([0.4, 0.05, 0.25, 0.2, 0.06, 0.04]).log().expand(count, -1)
    # Half of the draws move the seed, half the position: both must behave as fresh randomness.
    moving = torch.arange(count)
    seeds, positions = moving.clamp(max=count // 2), moving.clamp(min=count // 2)
    found = reference.sample(logits, **settings(count, **limits), seeds=seeds, positions=positions)
    counts = np.bincount(found.numpy(), minlength=6)
    assert (counts[expected == 0] == 0).all()
    chi_square = ((counts - count * expected)[expected > 0] ** 2 / (count * expected[expected > 0])).sum()
    # The chance of passing 25 with at most five degrees of freedom is 1.4e-4; the draws are fixed.
    assert chi_square < 25


def check_rows_are_independent(module, device, case):
    arguments = case.make(device)
    together = chosen(module).sample(**arguments)
    rows = together.shape[0]
    for row in range(rows):
        alone = {name: tensor[row : row + 1] for name, tensor in arguments.items()}
        assert torch.equal(chosen(module).sample(**alone), together[row : row + 1])
    backwards = {name: tensor.flip(0) for name, tensor in arguments.items()}
    assert torch.equal(chosen(module).sample(**backwards), together.flip(0))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.skipif(HAS_GPU, reason="the GPU runs the full vocabulary")
def test_a_row_does_not_depend_on_its_company(module):
    case = next(case for case in cases.CASES if case.name.startswith("tiny"))
    check_rows_are_independent(module, torch.device("cpu"), case)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_company_on_the_gpu(device):
    for case in cases.CASES:
        if case.op == "sample" and case.is_full:
            check_rows_are_independent("kernel", device, case)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3, 8, 17, 64])
def test_a_draw_is_the_twins_among_any_number_of_rows_on_the_gpu(device, count):
    draw = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(1, cases.CASES[-1].make(torch.device("cpu"))["logits"].shape[1], generator=draw)
    seeds, positions = torch.arange(count), torch.arange(count) * 1000
    for limits in ({}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}):
        expected = reference.sample(
            logits.expand(count, -1), **settings(count, **limits), seeds=seeds, positions=positions
        )
        found = chosen("kernel").sample(
            logits.to(device).expand(count, -1).contiguous(),
            **settings(count, device, **limits),
            seeds=seeds.to(device),
            positions=positions.to(device),
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("module", MODULES)
def test_equal_logits_go_to_the_lowest_id(module, place):
    logits = torch.tensor([[1.0, 5.0, 5.0, -0.0], [0.0, -0.0, -1.0, -2.0]], device=place)
    numbers = torch.zeros(2, dtype=torch.int64, device=place)
    for limits in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
        found = chosen(module).sample(logits, **settings(2, place, **limits), seeds=numbers, positions=numbers)
        assert found.tolist() == [1, 0]


@pytest.mark.parametrize("module", MODULES)
def test_the_mask_refuses_exactly_the_cleared_tokens(module, place):
    vocabulary = 1100
    draw = torch.Generator().manual_seed(2)
    allowed = torch.rand(3, vocabulary, generator=draw) < 0.5
    allowed[1], allowed[2] = False, True
    logits = torch.randn(3, vocabulary, generator=draw)
    words = np.packbits(np.pad(allowed.numpy(), [(0, 0), (0, 20)]), axis=-1, bitorder="little").view(np.int32)
    found = logits.clone().to(place)
    chosen(module).apply_mask(found, torch.from_numpy(words.copy()).to(place))
    assert torch.equal(found.cpu(), logits.masked_fill(~allowed, float("-inf")))


@pytest.mark.parametrize("module", MODULES)
def test_penalties_touch_only_the_tokens_named_and_in_the_documented_order(module, place):
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, 8.0]], device=place)
    chosen(module).apply_penalties(
        logits,
        torch.tensor([[1, 2, -1, 4]], dtype=torch.int32, device=place),
        torch.tensor([[3, 0, 9, 1]], dtype=torch.int32, device=place),
        *(torch.tensor([value], dtype=torch.float64, device=place) for value in (0.25, 0.5, 2.0)),
    )
    # Token 2 stands in the prompt alone; the -1 between them is nobody.
    assert logits.tolist() == [[2.0, -2.0 * 2 - 3 * 0.5 - 0.25, 4.0 / 2, 1.0, 8.0 / 2 - 0.5 - 0.25]]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.skipif(HAS_GPU, reason="the cases run there in full size")
def test_penalties_and_mask_of_a_row_do_not_depend_on_its_company(module):
    for case in cases.CASES:
        if case.op.startswith("sample") or case.is_full:
            continue
        together, parts = case.make(torch.device("cpu")), case.make(torch.device("cpu"))
        getattr(chosen(module), case.op)(**together)
        for row in range(together["logits"].shape[0]):
            alone = {name: tensor[row : row + 1] for name, tensor in parts.items()}
            getattr(chosen(module), case.op)(**alone)
        assert torch.equal(parts["logits"], together["logits"])


@pytest.mark.parametrize("module", [*MODULES, "cpu"])
@pytest.mark.parametrize("limits", [{"temperature": 0.0, "top_k": 64}, {"top_k": 64}, {"top_k": 5, "top_p": 0.9}])
def test_a_draft_from_a_list_is_the_draft_from_all_tokens_without_the_others(module, limits, place):
    draw = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 500, generator=draw)
    listed = torch.randperm(500, generator=draw)[:90]
    masked = torch.full_like(logits, float("-inf")).scatter(1, listed.expand(6, -1), logits[:, listed])
    seeds, positions = torch.arange(6).to(place), torch.arange(6).to(place) * 7
    common = {**settings(6, place, **limits), "seeds": seeds, "positions": positions}
    drafts = chosen(module).sample_drafts
    found = drafts(logits[:, listed].contiguous().to(place), **common, token_ids=listed.to(place))
    assert torch.equal(found, drafts(masked.to(place), **common))
    assert not torch.equal(found, drafts(logits.to(place), **common))
