"""The draft vocabulary: the rows of the LM head that drafts are chosen from. Stdlib only.

A draft needs the likely tokens alone, and reading their rows costs less than reading the head. Answers do not depend on
it: what the model itself chooses is always chosen from all rows.
"""

from onebox.spec.errors import UsageError

__all__ = ["default_draft_vocab_size", "draft_head_bytes", "parse_draft_vocab"]

_MOST_ROWS = 40_960
_ROWS_STEP = 64


def default_draft_vocab_size(vocab_size: int) -> int:
    """A sixth of the vocabulary, at most 40,960 tokens, in whole steps of 64."""
    return max(1, min(_MOST_ROWS, vocab_size // 6 // _ROWS_STEP * _ROWS_STEP))


def parse_draft_vocab(text: str, vocab_size: int) -> int | None:
    """`--draft-vocab auto|full|N`: the number of tokens; None for all of them."""
    if text == "full":
        return None
    if text == "auto":
        return default_draft_vocab_size(vocab_size)
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"--draft-vocab {text!r} is not known; give auto, full or a number of tokens.")
    if not 1 <= int(text) <= vocab_size:
        raise UsageError(f"--draft-vocab is {text}; give 1 to {vocab_size:,}, the tokens that the model has.")
    return None if int(text) == vocab_size else int(text)


def draft_head_bytes(head_bytes: int, vocab_size: int, draft_vocab_size: int | None) -> int:
    """The bytes of an LM head of `head_bytes` that one draft reads."""
    return head_bytes if draft_vocab_size is None else -(-head_bytes * draft_vocab_size // vocab_size)
