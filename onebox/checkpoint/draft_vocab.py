"""A checkpoint's own draft vocabulary: the tensor `mtp.d2t`, int64 [D], read without torch."""

from array import array

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import read_tensor
from onebox.spec.draft_vocab import d2t_offsets, tokens_of_d2t
from onebox.spec.errors import MismatchError

__all__ = ["d2t_bytes", "read_draft_vocab"]


def read_draft_vocab(entry: TensorEntry, vocab_size: int) -> tuple[int, ...]:
    """The token of each draft index; refused where one is beyond the vocabulary or listed twice."""
    offsets = array("q", bytes(read_tensor(entry)))
    tokens = tokens_of_d2t(offsets)
    beyond = next((token_id for token_id in tokens if not 0 <= token_id < vocab_size), None)
    if beyond is not None:
        raise MismatchError(f"{entry.name} lists token {beyond}, which is not one of {vocab_size:,}: build it again.")
    if len(set(tokens)) < len(tokens):
        raise MismatchError(f"{entry.name} lists a token twice: build it again.")
    return tuple(tokens)


def d2t_bytes(token_ids: tuple[int, ...]) -> bytes:
    """The tensor's bytes for the tokens of draft indices 0, 1, ..."""
    return array("q", d2t_offsets(token_ids)).tobytes()
