import pytest
import torch

from onebox.formats import kv_codecs
from onebox.formats.kv_pages import allocate, read_tokens, turboquant_tables, write_tokens
from onebox.spec.errors import MismatchError
from onebox.spec.kv import PAGE_TOKENS, KVFormat

NAMES = ["bf16", "fp8", "turboquant", "turboquant_k8v4", "turboquant_k3v2"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [32, 256])
def test_a_token_takes_exactly_the_bytes_of_the_spec(name, dim):
    kv_format = KVFormat.parse(name)
    pages = allocate(kv_format, 3, PAGE_TOKENS, 2, dim, CPU)
    vector_pair = kv_format.key_bytes_per_vector(dim) + kv_format.value_bytes_per_vector(dim)
    assert pages.total_bytes == 3 * PAGE_TOKENS * 2 * vector_pair
    assert (pages.page_tokens, pages.kv_heads) == (PAGE_TOKENS, 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_back_is_what_the_codecs_make_of_it(name):
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(9, 2, 32, generator=generator) for _ in range(2))
    slots = torch.randperm(3 * PAGE_TOKENS, generator=generator)[:9]
    pages = allocate(KVFormat.parse(name), 3, PAGE_TOKENS, 2, 32, CPU)
    write_tokens(pages, key, value, slots)
    codecs = kv_codecs(name)
    found_key, found_value = read_tokens(pages, slots)
    assert torch.equal(found_key, codecs.key.decode(codecs.key.encode(key)))
    assert torch.equal(found_value, codecs.value.decode(codecs.value.encode(value)))


def test_negative_slots_are_skipped():
    pages = allocate(KVFormat.parse("fp8"), 1, PAGE_TOKENS, 1, 32, CPU)
    write_tokens(pages, torch.ones(2, 1, 32), torch.ones(2, 1, 32), torch.tensor([-1, 5]))
    written = torch.zeros(PAGE_TOKENS, dtype=torch.bool)
    written[5] = True
    assert torch.equal(pages.key_codes[0, 0].any(-1), written)
    assert torch.equal(pages.value_scale[0, 0] != 0, written)


def test_pages_that_a_tile_would_straddle_are_refused():
    with pytest.raises(MismatchError, match="multiple of 32 tokens, not 48"):
        allocate(KVFormat.parse("bf16"), 1, 48, 1, 32, CPU)


def test_tables_are_made_once():
    assert turboquant_tables(32, 4, CPU) is turboquant_tables(32, 4, CPU)
    tables = turboquant_tables(32, 3, CPU)
    assert (len(tables.signs), len(tables.levels), len(tables.boundaries)) == (32, 8, 7)
