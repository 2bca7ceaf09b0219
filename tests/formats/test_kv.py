import pytest
import torch

from onebox.formats import kv_codecs
from onebox.formats.kv import Bf16Codec, Fp8Codec, TurboQuantCodec
from onebox.spec.errors import UnsupportedError
from tests.formats.strategies import KINDS, make_weight

CODECS = [Bf16Codec(), Fp8Codec(), TurboQuantCodec(2), TurboQuantCodec(3), TurboQuantCodec(4)]
EACH_CODEC = pytest.mark.parametrize("codec", CODECS, ids=str)


def bytes_of(stored):
    return {name: tensor.flatten().view(torch.uint8).tolist() for name, tensor in stored.items()}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bf16", Bf16Codec(), Bf16Codec()),
        ("fp8", Fp8Codec(), Fp8Codec()),
        ("turboquant", TurboQuantCodec(4), TurboQuantCodec(4)),
        ("turboquant_k4v4", TurboQuantCodec(4), TurboQuantCodec(4)),
        ("turboquant_k8v4", Fp8Codec(), TurboQuantCodec(4)),
        ("turboquant_k3v2", TurboQuantCodec(3), TurboQuantCodec(2)),
    ],
)
def test_names_choose_a_codec_for_keys_and_one_for_values(name, key, value):
    codecs = kv_codecs(name)
    assert (codecs.key, codecs.value) == (key, value)


@pytest.mark.parametrize("name", ["", "int4", "BF16", "turboquant_k5v4", "turboquant_k4", "turboquant_k4v4x"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedError, match="choose bf16, fp8, turboquant"):
        kv_codecs(name)


@EACH_CODEC
@pytest.mark.parametrize("dim", [8, 128, 256])
def test_bytes_per_vector_are_the_bytes_stored(codec, dim):
    stored = codec.encode(torch.randn(3, 2, dim))
    assert sum(tensor.numel() * tensor.element_size() for tensor in stored.values()) == 6 * codec.bytes_per_vector(dim)
    assert all(tensor.shape[:2] == (3, 2) for tensor in stored.values())
    assert codec.decode(stored).shape == (3, 2, dim)
    assert codec.decode(stored).dtype == torch.float32


@EACH_CODEC
def test_no_vectors_at_all_are_fine(codec):
    stored = codec.encode(torch.empty(0, 2, 256))
    assert codec.decode(stored).shape == (0, 2, 256)


def test_sizes_for_a_head_of_256_are_the_documented_ones():
    assert [codec.bytes_per_vector(256) for codec in CODECS] == [512, 258, 66, 98, 130]


@EACH_CODEC
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_vector_has_the_same_bytes_alone_and_in_any_batch(codec, kind, dtype):
    batch = make_weight(37, 256, kind, seed=1).to(dtype)
    together = codec.encode(batch)
    decoded = codec.decode(together)
    for layout in (batch.reshape(1, 37, 1, 256), batch.t().contiguous().t()):
        assert bytes_of(codec.encode(layout)) == bytes_of(together)
    for row in (0, 1, 17, 36):
        alone = codec.encode(batch[row])
        assert bytes_of(alone) == bytes_of({name: tensor[row] for name, tensor in together.items()})
        assert torch.equal(codec.decode(alone), decoded[row])


@EACH_CODEC
def test_decoding_is_close_and_zero_stays_zero(codec):
    x = make_weight(50, 256, "normal", seed=2)
    back = codec.decode(codec.encode(x))
    assert (back[0] == 0).all()
    similarity = torch.nn.functional.cosine_similarity(back[1:], x[1:], dim=-1)
    assert similarity.min() > {512: 0.9999, 258: 0.999, 66: 0.9, 98: 0.97, 130: 0.99}[codec.bytes_per_vector(256)]
