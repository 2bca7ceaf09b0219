"""The comparison of kernels with their twins finds a wrong element, whatever else is in the tensor."""

import pytest
import torch

from tests.kernels.catalogue import operations
from tests.kernels.tolerance import MIXERS, TOLERANCE, assert_same

ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rows(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_large_element_hides_no_error_in_a_small_one_of_another_row():
    expected = rows()
    expected[0, 0] = 1e4
    found = expected.clone()
    found[3, 5] += 0.01
    with pytest.raises(AssertionError, match=r"at \[3, 5\]"):
        assert_same(found, expected)


def test_an_error_counts_even_if_it_is_small_beside_the_rows_largest_element():
    expected = rows()
    expected[2] *= 1e-3
    expected[2, 7] = 1.0
    found = expected.clone()
    found[2, 9] += 1e-5  # below 2e-5 of the largest element of the row and of the tensor
    with pytest.raises(AssertionError, match=r"at \[2, 9\]"):
        assert_same(found, expected)


def test_a_small_row_is_compared_on_its_own_scale_unless_rows_may_cancel():
    expected = rows()
    expected[4] *= 1e-3
    found = expected.clone()
    found[4, 1] += 1e-5
    assert_same(found, expected, operation="paged_attention")
    with pytest.raises(AssertionError, match=r"at \[4, 1\]"):
        assert_same(found, expected, operation="int4_linear")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_unit_in_the_last_place_passes_everywhere(dtype):
    expected = rows(dtype)
    assert_same((expected.float() * (1 + ULP[dtype])).to(dtype), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("operation", ["rms_norm", "delta_net_prefill"])
def test_nothing_beyond_the_tolerance_of_the_largest_element_passes(dtype, operation):
    expected = rows(dtype)
    for index in range(expected.numel()):
        found = expected.clone()
        found.view(-1)[index] += 1.3 * TOLERANCE[dtype] * float(expected.abs().max()) + 4e-3 * (dtype != torch.float32)
        with pytest.raises(AssertionError):
            assert_same(found, expected, operation=operation)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_found_on_either_side(value):
    expected = rows()
    broken = expected.clone()
    broken[1, 1] = value
    for pair in ((broken, expected), (expected, broken)):
        with pytest.raises(AssertionError, match="not finite"):
            assert_same(*pair)


def test_infinities_hide_no_error_beside_them():
    expected = rows()
    expected[2, :5] = -torch.inf
    found = expected.clone()
    found[2, 9] += 0.01
    with pytest.raises(AssertionError, match=r"at \[2, 9\]"):
        assert_same(found, expected)


def test_equal_infinities_and_empty_and_single_tensors_are_the_same():
    masked = rows()
    masked[0, :5] = -torch.inf
    assert_same(masked.clone(), masked)
    assert_same(torch.empty(0, 4), torch.empty(0, 4))
    assert_same(torch.tensor(2.0), torch.tensor(2.0))
    assert_same(torch.zeros(3, 4), torch.zeros(3, 4))


def test_the_operations_with_a_scale_of_their_own_exist():
    assert operations().keys() >= MIXERS
