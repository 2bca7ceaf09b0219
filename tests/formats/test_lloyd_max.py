import math
from itertools import pairwise

import pytest
import torch

from onebox.formats.lloyd_max import lloyd_max_levels
from onebox.spec.errors import UnsupportedError

# Digits from an independent, coarser solver (a grid, 200 iterations): they stop up to 5e-5 short of the fixed point.
FACTS = {
    (64, 1): [0.100124],
    (64, 2): [0.056512, 0.187494],
    (64, 3): [0.030462, 0.093818, 0.166151, 0.263898],
    (128, 2): [0.039989, 0.133038],
    (128, 3): [0.021600, 0.066577, 0.118129, 0.188388],
    (128, 4): [0.011293, 0.034127, 0.057737, 0.082785, 0.110240, 0.141757, 0.180790, 0.237624],
    (256, 1): [0.049916],
    (256, 2): [0.028289, 0.094238],
    (256, 3): [0.015294, 0.047159, 0.083756, 0.133846],
    (256, 4): [0.008001, 0.024184, 0.040925, 0.058704, 0.078219, 0.100666, 0.128558, 0.169385],
}
FACTS_ERROR = {1: 0.36214, 2: 0.11674, 3: 0.03426, 4: 0.00941}  # d * MSE at d = 256

# J. Max, "Quantizing for minimum distortion" (1960), table I: the Gaussian, which high dimensions approach.
MAX_1960 = {
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


def density(dim, x):
    log_constant = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi) / 2
    return torch.exp(log_constant + (dim - 3) / 2 * torch.log1p(-x * x))


@pytest.mark.parametrize(("case", "digits"), FACTS.items())
def test_levels_have_the_published_digits(case, digits):
    levels = lloyd_max_levels(*case)
    assert levels[len(levels) // 2 :] == pytest.approx(digits, abs=5e-5)


@pytest.mark.parametrize(("bits", "digits"), MAX_1960.items())
def test_high_dimensions_approach_max_1960(bits, digits):
    levels = [level * 2**10 for level in lloyd_max_levels(2**20, bits)]
    assert levels[len(levels) // 2 :] == pytest.approx(digits, rel=3e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [8, 128, 256])
def test_each_level_is_the_mean_of_its_cell(dim, bits):
    levels = lloyd_max_levels(dim, bits)
    assert list(levels) == sorted(levels)
    assert levels == tuple(-level for level in reversed(levels))
    bounds = [-1.0, *((a + b) / 2 for a, b in pairwise(levels)), 1.0]
    for level, (low, high) in zip(levels, pairwise(bounds), strict=True):
        x = torch.linspace(low, high, 20001, dtype=torch.float64)
        weight = density(dim, x)
        assert level == pytest.approx(float(torch.trapezoid(x * weight, x) / torch.trapezoid(weight, x)), abs=1e-6)


@pytest.mark.parametrize(("bits", "error"), FACTS_ERROR.items())
def test_error_at_256_is_the_published_one(bits, error):
    x = torch.linspace(-0.6, 0.6, 400001, dtype=torch.float64)
    levels = torch.tensor(lloyd_max_levels(256, bits), dtype=torch.float64)
    nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    weight = density(256, x)
    assert float(256 * ((x - nearest) ** 2 * weight).sum() / weight.sum()) == pytest.approx(error, abs=2e-5)


def test_unknown_widths_are_refused():
    with pytest.raises(UnsupportedError, match="5 bits"):
        lloyd_max_levels(256, 5)
