"""vLLM's printed cache figures, from the posts that quote them, reproduced from a number of blocks."""

import pytest

from onebox.planner.vllm_accounting import vllm_cache
from onebox.spec.hardware import GIB
from onebox.spec.shapes import named_spec

SPEC = named_spec("qwen3.5-122b-a10b")
BF16, FP8 = 2048, 1024  # bytes a token and layer, K and V of both heads


@pytest.mark.parametrize(
    ("model", "drafts", "block_tokens"),
    [
        ("qwen3.5-122b-a10b", 0, 2096),
        ("qwen3.5-122b-a10b", 1, 2096),
        ("qwen3.5-122b-a10b", 2, 2112),
        ("qwen3.5-122b-a10b", 3, 2128),
        ("qwen3.5-35b-a3b", 0, 1056),
        ("qwen3.5-35b-a3b", 1, 1056),
        ("qwen3.5-35b-a3b", 2, 1072),
        ("qwen3.5-35b-a3b", 3, 1072),
    ],
)
def test_blocks_grow_to_hold_a_state(model, drafts, block_tokens):
    assert vllm_cache(named_spec(model), BF16, drafts).block_tokens == block_tokens


def test_fp8_with_mtp_2_prints_595584_tokens_and_12_89_at_128k():
    """122B blog: NVFP4, --kv-cache-dtype fp8, MTP-2, prefix caching, utilization 0.90; pool printed as 30.33 GiB."""
    cache = vllm_cache(SPEC, FP8, drafts=2)
    assert (cache.block_tokens, cache.groups, cache.attention_layers) == (4224, 4, 13)
    blocks = 567
    assert cache.printed_tokens(blocks) == 595_584
    assert round(cache.printed_concurrency(blocks, 131_072), 2) == 12.89
    # No other number of blocks prints both. They fill 29.69 GiB of the printed 30.33; the rest is not explained.
    others = [n for n in range(400, 800) if n != blocks]
    assert not any(
        cache.printed_tokens(n) == 595_584 and round(cache.printed_concurrency(n, 131_072), 2) == 12.89 for n in others
    )
    assert blocks * cache.block_bytes / GIB == pytest.approx(29.69, abs=0.01)


def test_bf16_without_mtp_prints_5_57_at_256k():
    """NVFP4 thread: AutoRound INT4, bf16 KV, prefix caching, utilization 0.85."""
    cache = vllm_cache(SPEC, BF16, drafts=0)
    blocks = 735
    assert round(cache.printed_concurrency(blocks, 262_144), 2) == 5.57
    pool_gib = blocks * cache.block_bytes / GIB
    assert pool_gib == pytest.approx(35.26, abs=0.01)
    # The post subtracts from 128.0 GiB and gets ~44.9. From what the box shows: 39.5, less ~4 GiB of activations.
    available_gib = 121.7 * 0.85 - 62.65 - 1.29
    assert available_gib - pool_gib == pytest.approx(4.2, abs=0.1)


def test_bf16_with_mtp_2_prints_355k_tokens_and_turboquant_1_4m():
    """51 tok/s blog: 355K tokens with bf16 KV, 1.4M with TurboQuant, which pads a vector of 120 B to 128 B."""
    plain = vllm_cache(SPEC, BF16, drafts=2)
    blocks = 4 * 168
    assert plain.printed_tokens(blocks) == 354_816
    pool_bytes = blocks * plain.block_bytes
    assert pool_bytes / GIB == pytest.approx(35.2, abs=0.1)
    packed = vllm_cache(SPEC, 2 * 2 * 128, drafts=2)
    assert packed.printed_tokens(pool_bytes // packed.block_bytes) == pytest.approx(1.4e6, rel=0.02)
    # What that pool holds already, as bf16, is the figure printed for TurboQuant.
    assert plain.held_tokens(blocks) == pytest.approx(1.42e6, rel=0.01)
    # "256K concurrent users: 1" divides 355K by 262K; vLLM's own rule gives 4.9 for the same pool.
    assert plain.printed_concurrency(blocks, 262_144) == pytest.approx(4.9, abs=0.05)


def test_prefix_caching_costs_a_state_a_request_and_group():
    with_cache, without = vllm_cache(SPEC, BF16, 2), vllm_cache(SPEC, BF16, 2, prefix_caching=False)
    assert with_cache.states_per_request - without.states_per_request == 1
