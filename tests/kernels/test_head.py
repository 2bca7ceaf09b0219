"""A head in two planes: what is sampled from candidates alone is what is sampled from all logits, bit for bit."""

import pytest
import torch

from onebox.formats.head_planes import split_planes
from onebox.kernels.head.cases import head_inputs
from onebox.kernels.head.reference import LowPlane
from onebox.kernels.int_linear.reference import fixed_point
from onebox.kernels.sampling.reference import sample
from tests.kernels.catalogue import forms

SETTINGS = [(0.0, 0, 1.0), (0.6, 20, 0.95), (1.0, 1, 1.0), (1.0, 64, 0.8), (1.0, 0, 1.0), (1.0, 65, 0.9)]
"""Temperature, top_k, top_p: of which the first four complete candidates only."""


def limits(settings, device):
    columns = zip(*settings, strict=True)
    dtypes = torch.float64, torch.int64, torch.float64
    return [torch.tensor(column, dtype=dtype, device=device) for column, dtype in zip(columns, dtypes, strict=True)]


class Head:
    """The kernels over one head and some rows."""

    def __init__(self, device, high, plane, planes, scale):
        self.kernel, self.device = forms("kernel"), device
        self.high, self.planes, self.scale = high.to(device), planes.to(device), scale.to(device)
        self.plane = LowPlane(*(tensor.to(device) for tensor in plane))
        self.started = self.kernel.int6_linear(self.planes, self.scale, self.high, self.plane.scale)

    def incomplete(self, rows=slice(None)):
        return self.started[rows].clone()

    def complete(self, rows=slice(None)):
        logits = self.incomplete(rows)
        self.kernel.complete_logits(logits, self.planes[rows], self.scale[rows], self.plane)
        return logits

    def candidates(self, settings, rows=slice(None), num_rows=None, is_complete=0):
        logits = self.incomplete(rows)
        temperature, top_k, _ = limits(settings, self.device)
        flag = torch.tensor([is_complete], dtype=torch.int32, device=self.device)
        self.kernel.complete_candidates(
            logits, self.planes[rows], self.scale[rows], self.plane, temperature, top_k, num_rows, flag
        )
        return logits

    def sample(self, logits, settings):
        temperature, top_k, top_p = limits(settings, torch.device("cpu"))
        seeds, places = (torch.arange(len(logits)) + first for first in (7, 300))
        none = torch.zeros_like(top_p)
        return sample(logits.cpu(), temperature, top_k, top_p, none, seeds, places)


def typical_head(device, num_rows=6, num_tokens=200, width=128):
    high, plane, planes, scale, _ = head_inputs(num_rows, num_tokens, width)
    return Head(device, high, plane, planes, scale)


def check_tokens_are_the_same(head, settings):
    complete, candidates = head.complete(), head.candidates(settings)
    assert torch.equal(head.sample(candidates, settings), head.sample(complete, settings))
    # What was completed has the same bits, and what was not is as the high plane left it.
    is_done = candidates == complete
    assert torch.equal(candidates[~is_done], head.incomplete()[~is_done])
    return is_done.float().mean(1)


def test_the_tokens_are_those_of_complete_logits(device, poison):
    shares = check_tokens_are_the_same(typical_head(device), SETTINGS)
    assert shares[:4].max() == shares[:4].min()  # rows of one step are completed together


@pytest.mark.parametrize(("setting", "most"), [((0.0, 0, 1.0), 0.1), ((1.0, 3, 1.0), 0.4)], ids=["greedy", "top_k"])
def test_only_some_are_completed_for_greedy_and_small_top_k(setting, most, device, poison):
    head = typical_head(device, num_rows=1)
    assert 0 < check_tokens_are_the_same(head, [setting])[0] < most


@pytest.mark.parametrize("setting", SETTINGS[4:], ids=str)
def test_all_are_completed_where_all_may_be_sampled(setting, device, poison):
    head = typical_head(device, num_rows=1, num_tokens=40)
    assert torch.equal(head.candidates([setting]), head.complete())


def opposed_head(device, width=128, num_tokens=80):
    """High planes are equal; low codes agree with the row's signs, most for the last tokens: only they decide."""
    draw = torch.Generator().manual_seed(3)
    x = torch.where(torch.rand(width, generator=draw) < 0.5, -1.0, 1.0)
    share = torch.linspace(0, 1, num_tokens).unsqueeze(1)
    agrees = torch.rand(num_tokens, width, generator=draw) < share
    low = torch.where(agrees == (x > 0), 3, 0)
    base = (20 * torch.randn(width, generator=draw)).round().to(torch.int64) * 4
    high, packed, radius = split_planes((base + low).clamp(-128, 127).to(torch.int8))
    plane = LowPlane(packed, radius, torch.full((num_tokens,), 0.01))
    return Head(device, high, plane, *fixed_point(x.repeat(2, 1)))


def test_a_token_that_wins_by_its_low_plane_alone_is_found(device, poison):
    head = opposed_head(device)
    settings = [(0.0, 0, 1.0), (1.0, 5, 1.0)]
    check_tokens_are_the_same(head, settings)
    token = int(head.sample(head.candidates(settings), settings)[0])
    assert token != int(head.incomplete()[0].argmax())


def test_a_logits_bits_do_not_depend_on_the_number_of_rows(device, poison):
    head = typical_head(device, num_rows=37, num_tokens=20)
    together = head.complete()
    for rows in (slice(0, 1), slice(5, 8), slice(20, 37)):
        assert torch.equal(head.complete(rows), together[rows])


def test_blank_rows_are_no_reason_to_complete_anything(device, poison):
    head = typical_head(device, num_rows=4, num_tokens=64)
    head.planes[2:], head.started[2:] = 0, 0.0  # everything ties
    settings = [SETTINGS[0]] * 4
    counted = torch.tensor([2], dtype=torch.int32, device=device)
    found = head.candidates(settings, num_rows=counted)
    alone = head.candidates(settings[:2], rows=slice(0, 2))
    assert torch.equal(found[:2], alone)
    assert not torch.equal(found[:2], head.complete(slice(0, 2)))


def test_logits_that_are_complete_are_left_alone(device, poison):
    head = typical_head(device, num_rows=2, num_tokens=20)
    assert torch.equal(head.candidates([SETTINGS[0]] * 2, is_complete=1), head.incomplete())


def test_a_row_that_is_not_finite_gets_no_token_and_others_keep_theirs(device, poison):
    head = typical_head(device, num_rows=3, num_tokens=40)
    settings = [SETTINGS[0], SETTINGS[1], SETTINGS[0]]
    expected = head.sample(head.complete(), settings)
    head.scale[1], head.started[1] = float("nan"), float("nan")
    found = head.sample(head.candidates(settings), settings)
    assert found.tolist() == [int(expected[0]), -1, int(expected[2])]
