"""How vLLM computes the cache figures that it prints for this model family, for comparison with a plan.

vLLM divides its cache into blocks of one size. A block holds either `block_tokens` tokens of KV of the attention
layers, or one state of as many DeltaNet layers; the 122B's 12 attention layers (13 with MTP) form one group and its 36
DeltaNet layers three more. Its log then prints

    tokens        blocks // groups * block_tokens                          as if every group grew with the context
    concurrency   blocks / (ceil(context / block_tokens) + state blocks)   counts a fixed number of states

so the token figure is a quarter of what the same memory holds. For comparison only: no plan uses it.
"""

from dataclasses import dataclass

from onebox.spec.model import ModelSpec
from onebox.spec.states import StateDtype

__all__ = ["VllmCache", "vllm_cache"]

_ALIGNMENT_TOKENS = 16


@dataclass(frozen=True)
class VllmCache:
    """The shape of vLLM's block pool for one model and configuration. Sizes in bytes and tokens."""

    block_tokens: int
    attention_layers: int
    state_groups: int
    states_per_request: int
    bytes_per_token_layer: int

    @property
    def groups(self) -> int:
        return 1 + self.state_groups

    @property
    def block_bytes(self) -> int:
        """One block over the layers of a group."""
        return self.attention_layers * self.block_tokens * self.bytes_per_token_layer

    def printed_tokens(self, blocks: int) -> int:
        """`GPU KV cache size: N tokens`."""
        return blocks // self.groups * self.block_tokens

    def printed_concurrency(self, blocks: int, context_tokens: int) -> float:
        """`Maximum concurrency for C tokens per request: Nx`."""
        kv_blocks = -(-context_tokens // self.block_tokens)
        return blocks / (kv_blocks + self.state_groups * self.states_per_request)

    def held_tokens(self, blocks: int) -> int:
        """Tokens of KV that the same memory holds when no block is spent on a state."""
        return blocks * self.block_tokens


def vllm_cache(spec: ModelSpec, bytes_per_token_layer: int, drafts: int, *, prefix_caching: bool = True) -> VllmCache:
    """The pool for `drafts` MTP tokens (0: no MTP layer) and `bytes_per_token_layer` of KV (K and V, all heads).

    The block is the smallest multiple of 16 tokens whose KV is at least one DeltaNet layer's state, whose convolution
    part grows by one row per draft. A request owns 2 + drafts states with prefix caching, 1 + drafts without.
    """
    conv_bytes = 2 * (spec.linear_conv_kernel_dim - 1 + drafts) * spec.conv_dim
    state_bytes = conv_bytes + spec.recurrent_state_bytes(StateDtype.FLOAT32)
    blocks_of_alignment = -(-state_bytes // (_ALIGNMENT_TOKENS * bytes_per_token_layer))
    attention_layers = len(spec.full_layers) + (spec.mtp_num_hidden_layers if drafts else 0)
    return VllmCache(
        block_tokens=_ALIGNMENT_TOKENS * blocks_of_alignment,
        attention_layers=attention_layers,
        state_groups=-(-len(spec.linear_layers) // attention_layers),
        states_per_request=(2 if prefix_caching else 1) + drafts,
        bytes_per_token_layer=bytes_per_token_layer,
    )
