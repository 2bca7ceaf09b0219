"""What the cache write promises beyond its twin's numbers: the encoders' bytes, and a vector's bytes from it alone."""

import pytest
import torch

from onebox.formats.kv_pages import allocate, read_tokens, write_tokens
from onebox.spec.kv import PAGE_TOKENS, KVFormat

NAMES = ["bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4", "turboquant_k3v2"]
EACH_FORMAT = pytest.mark.parametrize("name", NAMES)


def kernel():
    from onebox.kernels.attention.write import kv_write

    return kv_write


def vectors(count, dim, dtype, seed=0):
    """Ordinary, tiny, huge, skewed, zero and coarse vectors; coarse ones sit on rounding ties of FP8."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, dim, generator=generator)
    x[1::7] *= 1e-5
    x[2::7] *= 1e5
    x[3::7, :, 0] = 100.0
    x[4::7] = 0
    x[5::7] = (x[5::7] * 8).round() / 8
    x[5::7, :, 0] = 14.0  # a power-of-two scale, so that quotients are exact and ties occur
    return x.to(dtype)


def bytes_of(pages):
    return [part.cpu().flatten().view(torch.uint8) for part in pages[1:] if part is not None]


def written(write, name, key, value, slots, device):
    num_pages = int(slots.max()) // PAGE_TOKENS + 1
    pages = allocate(KVFormat.parse(name), num_pages, PAGE_TOKENS, key.shape[1], key.shape[2], device)
    write(pages, key.to(device), value.to(device), slots.to(device))
    return pages


def assert_the_encoders_bytes(name, count, dim, dtype, device):
    key, value = vectors(count, dim, dtype, seed=1), vectors(count, dim, dtype, seed=2)
    slots = torch.randperm(count + 3, generator=torch.Generator().manual_seed(3))[:count]
    slots[0] = -1
    found = written(kernel(), name, key, value, slots, device)
    expected = written(write_tokens, name, key, value, slots, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(found), bytes_of(expected), strict=True))


@EACH_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_the_encoders(name, dtype, device):
    assert_the_encoders_bytes(name, 15, 64, dtype, device)


@pytest.mark.gpu
@EACH_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_the_encoders_at_full_size(name, dtype, device):
    assert_the_encoders_bytes(name, 20000, 256, dtype, device)


def assert_alone_as_among(name, counts, dim, device):
    key, value = vectors(max(counts), dim, torch.bfloat16, seed=4), vectors(max(counts), dim, torch.bfloat16, seed=5)
    alone = bytes_of(written(kernel(), name, key[:1], value[:1], torch.tensor([0]), device))
    for count in counts:
        order = torch.arange(count).roll(count // 2)  # vector 0 stands somewhere in the middle
        among = written(kernel(), name, key[order], value[order], order * PAGE_TOKENS, device)
        first = bytes_of(type(among)(among[0], *(part if part is None else part[:1] for part in among[1:])))
        assert all(torch.equal(a, b) for a, b in zip(first, alone, strict=True))


@EACH_FORMAT
def test_a_vector_has_the_same_bytes_among_any_others(name, device):
    assert_alone_as_among(name, (2, 3), 32, device)


@pytest.mark.gpu
@EACH_FORMAT
def test_a_vector_has_the_same_bytes_among_any_others_at_full_size(name, device):
    assert_alone_as_among(name, (2, 3, 8, 17, 64), 256, device)


@EACH_FORMAT
def test_nothing_but_the_named_slots_changes(name, device):
    pages = allocate(KVFormat.parse(name), 2, PAGE_TOKENS, 2, 32, device)
    for part in pages[1:]:
        if part is not None:
            part.view(torch.uint8).fill_(0x41)
    kernel()(pages, torch.ones(2, 2, 32).to(device), torch.ones(2, 2, 32).to(device), torch.tensor([70, -1]).to(device))
    touched = torch.zeros(2, PAGE_TOKENS, dtype=torch.bool)
    touched[1, 6] = True
    for part in pages[1:]:
        if part is not None:
            is_new = (part.cpu().view(torch.uint8).reshape(2, 2, PAGE_TOKENS, -1) != 0x41).any(-1)
            assert torch.equal(is_new, touched[:, None].expand(2, 2, PAGE_TOKENS))


@pytest.mark.parametrize("name", ["bf16", "fp8", "turboquant_k4v4"])
def test_nan_stays_nan_and_stays_at_home(name, device):
    key, value = torch.ones(2, 1, 32), torch.ones(2, 1, 32)
    key[0, 0, 3] = value[0, 0, 5] = float("nan")
    pages = written(kernel(), name, key, value, torch.tensor([0, 1]), device)
    for found in read_tokens(pages.to(torch.device("cpu")), torch.tensor([0, 1])):
        assert found[0].isnan().any()
        assert found[1].isfinite().all()
