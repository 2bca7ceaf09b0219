import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats import (
    decode_turboquant,
    encode_turboquant,
    hadamard,
    rotate,
    sign_table,
    turboquant_levels,
    unrotate,
)
from onebox.formats.bits import unpack_bits
from onebox.formats.kv_turboquant import SIGN_SEED
from onebox.spec.errors import UnsupportedError
from tests.formats.strategies import KINDS, make_weight


def sylvester(dim):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / math.sqrt(dim)


@pytest.mark.parametrize("dim", [8, 64, 256])
def test_hadamard_is_sylvesters_matrix_and_undoes_itself(dim):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(hadamard(x).double(), x.double() @ sylvester(dim), atol=1e-5)
    assert torch.allclose(unrotate(rotate(x)), x, atol=1e-5)
    assert torch.allclose(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(hadamard(torch.eye(dim))[0], torch.full((dim,), 1 / math.sqrt(dim)))


def test_signs_are_the_fixed_table():
    assert int.from_bytes(b"onebox", "big") == SIGN_SEED
    minus = "".join("-" if sign < 0 else "+" for sign in sign_table(256).tolist())
    assert minus[:32] == "+++---+-+--+---+-++--+--+--+++--"
    assert torch.equal(sign_table(64), sign_table(256)[:64])
    assert 100 < minus.count("-") < 156


# The generator's published test vector: splitmix64 seeded with 1234567.
def test_the_sign_generator_is_splitmix64(monkeypatch):
    from onebox.formats import kv_turboquant

    monkeypatch.setattr(kv_turboquant, "SIGN_SEED", 1234567)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [kv_turboquant._splitmix64(i) for i in range(4)] == expected


@pytest.mark.parametrize(
    ("bits", "codebook_error", "renormalised_error"), [(2, 0.11674, 0.1201), (3, 0.03426, 0.0344), (4, 0.00941, 0.0093)]
)
def test_error_is_the_codebooks_and_changes_a_little_by_renormalising(bits, codebook_error, renormalised_error):
    x = torch.randn(8000, 256, generator=torch.Generator().manual_seed(2))
    stored = encode_turboquant(x, bits)
    length = x.norm(dim=-1, keepdim=True)
    plain = unrotate(turboquant_levels(256, bits)[unpack_bits(stored["codes"], bits).int()]) * length
    assert float(((plain - x) / length).square().sum(-1).mean()) == pytest.approx(codebook_error, rel=0.01)
    back = decode_turboquant(**stored, bits=bits)
    assert float(((back - x) / length).square().sum(-1).mean()) == pytest.approx(renormalised_error, rel=0.01)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_skewed_vectors_do_as_well_as_random_ones(bits):
    """One huge coordinate among 256, the case a rotation is for; unrotated, the levels end at 0.17 of the length."""
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(3)) * 0.01
    x[:, 17] = 5.0
    back = decode_turboquant(**encode_turboquant(x, bits), bits=bits)
    error = ((back - x).norm(dim=-1) / x.norm(dim=-1)).square().mean()
    assert error < {2: 0.5, 3: 0.2, 4: 0.1}[bits]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_are_the_nearest_levels(bits):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(4))
    codes = unpack_bits(encode_turboquant(x, bits)["codes"], bits)
    levels = turboquant_levels(64, bits)
    distance = (rotate(x / x.norm(dim=-1, keepdim=True)).unsqueeze(-1) - levels).abs()
    chosen = distance.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert (chosen <= distance.amin(-1) + 1e-6).all()


def centroid_length(codes, dim, bits):
    return turboquant_levels(dim, bits)[unpack_bits(codes, bits).int()].double().norm(dim=-1)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    bits=st.sampled_from([2, 3, 4]),
    dim=st.sampled_from([8, 32, 256]),
    seed=st.integers(0, 99),
)
def test_lengths_survive_and_zero_stays_zero(kind, bits, dim, seed):
    x = make_weight(4, dim, kind, seed)
    stored = encode_turboquant(x, bits)
    back = decode_turboquant(**stored, bits=bits)
    assert back.isfinite().all()
    assert (back[(x == 0).all(-1)] == 0).all()
    length = x.double().norm(dim=-1).minimum(65504 * centroid_length(stored["codes"], dim, bits))
    assert torch.allclose(back.double().norm(dim=-1), length, rtol=1e-3, atol=2**-24)


def test_huge_bfloat16_vectors_saturate_instead_of_overflowing():
    x = torch.full((1, 256), 3e38).bfloat16()
    stored = encode_turboquant(x, 4)
    back = decode_turboquant(**stored, bits=4)
    assert back.isfinite().all()
    assert float(back.norm()) == pytest.approx(65504 * float(centroid_length(stored["codes"], 256, 4)), rel=1e-3)


def test_inner_products_can_be_taken_in_the_rotated_space():
    generator = torch.Generator().manual_seed(5)
    keys, query = torch.randn(100, 256, generator=generator), torch.randn(256, generator=generator)
    stored = encode_turboquant(keys, 4)
    centroids = turboquant_levels(256, 4)[unpack_bits(stored["codes"], 4).int()]
    scores = (centroids @ rotate(query)) * stored["scale"].float()
    assert torch.allclose(scores, decode_turboquant(**stored, bits=4) @ query, atol=1e-3)


def test_what_has_no_rotation_or_width_is_refused():
    with pytest.raises(UnsupportedError, match="not 192"):
        encode_turboquant(torch.ones(1, 192), 4)
    with pytest.raises(UnsupportedError, match="not 5"):
        encode_turboquant(torch.ones(1, 256), 5)
