"""Causal attention over a paged KV cache, read in the format it is stored in."""

from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.dispatch import implementation
from onebox.kernels.rows import FixedRows

__all__ = ["paged_attention", "paged_attention_prefill", "paged_attention_rows"]


def paged_attention(
    query: Tensor, pages: KVPages, page_table: Tensor, context: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """Decode and verification: mixed values [R, Q, D] of query [R, Q, D], at most 9 rows a sequence.

    Sequence s owns the rows cu_rows[s] .. cu_rows[s+1] - 1 (int32 [S+1]) and the pages page_table[s] (int32
    [S, max_pages], token p in its page p // P). Its last row sees context[s] tokens (int32 [S]), the row before one
    fewer, and so on; the pages already hold them all. A row that sees nothing, or belongs to no sequence, gives zeros.
    A row's bits depend on its query and the tokens that it sees: not on other rows, sequences or page numbers.
    D is a power of two from 32. The workspace grows with max_pages, so pass a table no wider than the longest sequence.
    """
    chosen = implementation(__name__, query)
    result: Tensor = chosen.paged_attention(query, pages, page_table, context, cu_rows, scale)
    return result


def paged_attention_rows(
    query: Tensor,
    pages: KVPages,
    page_table: Tensor,
    context: Tensor,
    cu_rows: Tensor,
    scale: float,
    qkv_parts: Tensor,
) -> FixedRows:
    """`mixer_rows.attention_rows` of what `paged_attention` gives: gated, as the output projection may want it.

    qkv_parts float32 [P, R, N] as there. Q * D is a multiple of 128.
    """
    chosen = implementation(__name__, query)
    result: FixedRows = chosen.paged_attention_rows(query, pages, page_table, context, cu_rows, scale, qkv_parts)
    return result


def paged_attention_prefill(
    query: Tensor, pages: KVPages, page_table: Tensor, start: Tensor, cu_rows: Tensor, scale: float
) -> Tensor:
    """Prefill: mixed values [T, Q, D] of query [T, Q, D], whose keys and values the pages already hold.

    Row i of sequence s (cu_rows and page_table as above) stands at position start[s] + i (int32 [S]) and sees the
    tokens up to itself. Where a prompt was split does not change a row's bits.
    """
    chosen = implementation(__name__, query)
    result: Tensor = chosen.paged_attention_prefill(query, pages, page_table, start, cu_rows, scale)
    return result
