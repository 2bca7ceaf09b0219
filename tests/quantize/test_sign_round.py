"""The auto-round library's optimiser on one matrix."""

import sys

import pytest
import torch

from onebox.formats import dequantize, quantize
from onebox.quantize.sign_round import TunedIntegers, library_version, tune
from onebox.spec.errors import UnsupportedError
from tests.quantize.inputs import correlated_rows


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tuning_gives_less_than_half_the_error_of_rounding_to_nearest(bits):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    x = correlated_rows(512, 256)
    matrix = TunedIntegers(weight, bits, 128)
    tune([matrix], lambda: [(x @ (matrix.weight() - weight).T).square().mean()], 40)
    rounded, tuned = (dequantize(codes) for codes in (quantize(weight, bits, 128), matrix.codes()))
    before, after = ((x @ (found - weight).T).square().mean() for found in (rounded, tuned))
    assert after < before / 2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_codes_are_the_weight_that_was_tuned_bit_for_bit(bits):
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    weight[3] = 0
    matrix = TunedIntegers(weight, bits, 128)
    target = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    tune([matrix], lambda: [(matrix.weight() - target).square().mean()], 7)
    assert torch.equal(dequantize(matrix.codes()), matrix.weight().detach())


def test_gradients_of_several_losses_add_up():
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(4))
    halves = correlated_rows(64, 128).split(32)
    one, two = TunedIntegers(weight, 4, 128), TunedIntegers(weight, 4, 128)

    def loss(matrix: TunedIntegers, x: torch.Tensor) -> torch.Tensor:
        return (x @ (matrix.weight() - weight).T).square().sum()

    tune([one], lambda: [loss(one, torch.cat(halves))], 5)
    tune([two], lambda: (loss(two, half) for half in halves), 5)
    assert torch.equal(one.codes().codes, two.codes().codes)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_round", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'onebox\[quantize\]'"):
        library_version()
