"""The memory of a block drafter's context: rings of its sliding layers, one for each state, and pages of its full ones.

    ring    the last positions of every sliding layer: its window, and room for a block whose rows may be rejected
    page    PAGE_TOKENS positions of every full layer, under the number of the model's own page

Keys and values are stored in the dtype of activations.
"""

from onebox.spec.dflash import DFlashSpec
from onebox.spec.kv import PAGE_TOKENS

__all__ = [
    "CAPTURED_PREFILL_ROWS",
    "MAX_BLOCK_ROWS",
    "draft_page_bytes",
    "num_full_layers",
    "ring_bytes",
    "ring_tokens",
]

MAX_BLOCK_ROWS = 16
"""Rows of one sequence in a step: the last token and its drafts."""
CAPTURED_PREFILL_ROWS = 1024
"""Rows of the largest captured prefill: a ring holds all of them, so that states inside it can be saved behind it."""


def ring_tokens(spec: DFlashSpec, max_batched_tokens: int) -> int:
    """Positions of a ring, a multiple of a page; 0 where no layer slides.

    Rejected rows are written like others, so a ring has room for them beside the window.
    """
    if not spec.sliding_layers or spec.sliding_window is None:
        return 0
    least = max(spec.sliding_window + MAX_BLOCK_ROWS, min(max_batched_tokens, CAPTURED_PREFILL_ROWS))
    return -(-least // PAGE_TOKENS) * PAGE_TOKENS


def ring_bytes(spec: DFlashSpec, max_batched_tokens: int, activation_bytes: int) -> int:
    """Of one slot or one saved state."""
    layer = 2 * spec.kv_size * activation_bytes * ring_tokens(spec, max_batched_tokens)
    return len(spec.sliding_layers) * layer


def draft_page_bytes(spec: DFlashSpec, activation_bytes: int) -> int:
    """Of one page."""
    return num_full_layers(spec) * 2 * spec.kv_size * activation_bytes * PAGE_TOKENS


def num_full_layers(spec: DFlashSpec) -> int:
    return spec.num_hidden_layers - len(spec.sliding_layers)
