import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.formats.bits import pack_bits, pack_words, unpack_bits, unpack_words
from onebox.spec.errors import MismatchError, UnsupportedError


def bitstream(codes: list[int], bits: int) -> list[int]:
    """The bytes of codes laid end to end, lowest bit first, by Python's own big integers."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return list(number.to_bytes(len(codes) * bits // 8, "little"))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_bytes_are_the_bitstream_lowest_bit_first(bits, data):
    count = 8 * data.draw(st.integers(1, 5))
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    packed = pack_bits(torch.tensor([codes], dtype=torch.uint8), bits)
    assert packed.tolist() == [bitstream(codes, bits)]
    assert unpack_bits(packed, bits).tolist() == [codes]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 5), columns=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_words_are_those_of_compressed_tensors(bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), generator=generator, dtype=torch.int8)
    words = pack_words(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_words(words, bits, columns), codes)
    assert torch.equal(unpack_words(words, bits, columns), unpack_from_int32(words, bits, codes.shape))


def test_leading_dimensions_and_strides_do_not_matter():
    codes = torch.randint(0, 8, (3, 16, 5), dtype=torch.uint8).transpose(1, 2)
    for row, packed in zip(codes.reshape(-1, 16), pack_bits(codes, 3).reshape(-1, 6), strict=True):
        assert torch.equal(pack_bits(row, 3), packed)
    assert torch.equal(unpack_bits(pack_bits(codes, 3), 3), codes)


def test_codes_that_would_spill_into_their_neighbours_are_refused():
    with pytest.raises(MismatchError, match="4-bit codes"):
        pack_words(torch.tensor([[8]], dtype=torch.int8), 4)
    with pytest.raises(MismatchError, match="multiples of 8"):
        pack_bits(torch.zeros(1, 12, dtype=torch.uint8), 3)
    with pytest.raises(MismatchError, match="multiples of 3 bytes"):
        unpack_bits(torch.zeros(1, 4, dtype=torch.uint8), 3)
    with pytest.raises(MismatchError, match="need 2 int32 words"):
        unpack_words(torch.zeros(1, 1, dtype=torch.int32), 4, 9)
    with pytest.raises(UnsupportedError, match="5 bits"):
        pack_bits(torch.zeros(1, 8, dtype=torch.uint8), 5)
