from array import array
from hashlib import blake2b

from onebox.spec.kv import PAGE_TOKENS
from onebox.store.keys import KEY_BYTES, prefix_keys


def test_a_key_covers_every_token_up_to_the_end_of_its_page():
    tokens = list(range(3 * PAGE_TOKENS))
    keys = prefix_keys(tokens)
    assert len(set(keys)) == 3
    for position in (0, PAGE_TOKENS - 1, PAGE_TOKENS, 3 * PAGE_TOKENS - 1):
        changed = prefix_keys([*tokens[:position], -1, *tokens[position + 1 :]])
        page = position // PAGE_TOKENS
        assert changed[:page] == keys[:page]
        assert not set(changed[page:]) & set(keys)


def test_only_whole_pages_have_keys():
    assert prefix_keys(range(PAGE_TOKENS - 1)) == []
    assert prefix_keys(range(2 * PAGE_TOKENS - 1)) == prefix_keys(tuple(range(PAGE_TOKENS)))


def test_the_keys_are_what_the_format_says():
    tokens = [-(1 << 63), (1 << 63) - 1, *range(2 * PAGE_TOKENS - 2)]
    first = blake2b(array("q", tokens[:PAGE_TOKENS]).tobytes(), digest_size=KEY_BYTES).digest()
    second = blake2b(first + array("q", tokens[PAGE_TOKENS:]).tobytes(), digest_size=KEY_BYTES).digest()
    assert prefix_keys(tokens) == [first, second]
