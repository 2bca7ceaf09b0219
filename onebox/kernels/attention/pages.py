"""KV pages as arguments of the attention kernels."""

import torch
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, PLAIN_BITS, KVPages, turboquant_tables
from onebox.kernels.attention.planes import are_words, lookup_table

__all__ = ["num_stages", "page_constants", "page_tensors"]


def page_tensors(pages: KVPages, dim: int) -> list[Tensor | None]:
    """Codes, scales, levels and lookup table of keys, then of values: arguments of the kernels."""
    arguments: list[Tensor | None] = []
    for bits, codes, scale in (
        (pages.format.key_bits, pages.key_codes, pages.key_scale),
        (pages.format.value_bits, pages.value_codes, pages.value_scale),
    ):
        is_packed = bits < FP8_BITS
        levels = turboquant_tables(dim, bits, codes.device).levels if is_packed else None
        table = lookup_table(dim, bits, codes.device) if is_packed else None
        is_in_words = bits < PLAIN_BITS and are_words(dim, bits)
        arguments += [codes.view(torch.int16) if is_in_words else codes, scale, levels, table]
    return arguments


def page_constants(pages: KVPages, dim: int) -> dict[str, int]:
    bits = {"KEY_BITS": pages.format.key_bits, "VALUE_BITS": pages.format.value_bits}
    return {"KV": pages.kv_heads, "P": pages.page_tokens, "D": dim, **bits}


def num_stages(query: Tensor, most: int) -> int:
    """Pipeline stages: tiles being loaded or computed. float32 (tests with small heads) takes twice the memory."""
    return 1 if query.dtype == torch.float32 else most
