"""E4M3 weights whose rounding is tuned."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.formats import dequantize_fp8_block, quantize_fp8_block
from onebox.quantize.sign_round import tune
from onebox.quantize.tuned_float import TunedFp8
from tests.quantize.inputs import correlated_rows


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def stored(matrix: TunedFp8) -> torch.Tensor:
    tensors = matrix.tensors()
    return dequantize_fp8_block(tensors["weight"], tensors["weight_scale"])


def test_tuning_gives_less_than_half_the_error_of_rounding_to_nearest():
    weight, x = drawn(64, 256), correlated_rows(512, 256)
    matrix = TunedFp8(weight)
    tune([matrix], lambda: [(x @ (matrix.weight() - weight).T).square().mean()], 40)
    rounded = dequantize_fp8_block(*quantize_fp8_block(weight, scale_dtype=torch.bfloat16))
    before, after = ((x @ (found - weight).T).square().mean() for found in (rounded, stored(matrix)))
    assert after < before / 2


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (3, 200), (130, 128)]))
def test_without_offsets_the_codes_are_those_of_rounding_to_nearest(seed, shape):
    """Of sizes over 20 powers of two, so subnormal codes and zeros too."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.ldexp(torch.ones(shape), torch.randint(-20, 1, shape, generator=generator))
    weight = torch.randn(shape, generator=generator) * sizes
    weight[0, 0] = 0
    codes, scales = quantize_fp8_block(weight, scale_dtype=torch.bfloat16)
    tensors = TunedFp8(weight).tensors()
    assert torch.equal(tensors["weight"].view(torch.uint8) & 0x7F, codes.view(torch.uint8) & 0x7F)
    assert torch.equal(tensors["weight"].float(), codes.float())
    assert torch.equal(tensors["weight_scale"], scales)


@given(st.integers(0, 2**32 - 1))
def test_the_stored_weight_is_the_one_that_was_tuned_bit_for_bit(seed):
    """Every offset in -0.5..0.5 leads to a code, never between two."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(130, 140, generator=generator) ** 5
    matrix = TunedFp8(weight)
    with torch.no_grad():
        matrix.offsets.uniform_(-0.5, 0.5, generator=generator)
    assert torch.equal(stored(matrix), matrix.weight().detach())


@given(st.sampled_from([-0.5, 0.5]))
def test_an_offset_moves_a_weight_to_a_neighbouring_code_at_most(offset):
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = table[table.isfinite()].unique()
    weight = drawn(64, 128, seed=5)
    matrix = TunedFp8(weight)
    rounded = torch.searchsorted(table, matrix.tensors()["weight"].float())
    with torch.no_grad():
        matrix.offsets.fill_(offset)
    moved = torch.searchsorted(table, matrix.tensors()["weight"].float())
    assert set((moved - rounded).unique().tolist()) <= {0, 1 if offset > 0 else -1}
    assert not torch.equal(moved, rounded)
