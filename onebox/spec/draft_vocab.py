"""The draft vocabulary: the tokens that a drafter chooses from, so that it reads a part of the LM head.

Its size, its bytes, and its form in a checkpoint: the tensor `d2t` beside the drafter, as in vLLM's and SpecForge's
drafters, in which the token of draft index i is i + d2t[i].
"""

from collections.abc import Iterable, Sequence

from onebox.spec.errors import UsageError

__all__ = [
    "D2T_TENSOR",
    "DRAFT_VOCAB_KEY",
    "d2t_offsets",
    "default_draft_vocab_size",
    "draft_head_bytes",
    "first_tokens",
    "parse_draft_vocab",
    "tokens_of_d2t",
]

D2T_TENSOR = "mtp.d2t"
DRAFT_VOCAB_KEY = "draft_vocab_size"
"""In config.json's text_config; EAGLE-3 drafters have the same key."""
_SHARE = 6
_SIGNIFICANT_BITS = 5
_LEAST_VOCABULARY = 4096


def default_draft_vocab_size(vocab_size: int) -> int | None:
    """A sixth, rounded down to five significant bits: 40,960 of 248,320. None for a vocabulary too small to trim.

    Counted on the model's own output, 40,960 tokens cover 97.5% of it, and 49,152 only 0.7 points more.
    """
    if vocab_size < _LEAST_VOCABULARY:
        return None
    size = vocab_size // _SHARE
    step = 1 << (size.bit_length() - _SIGNIFICANT_BITS)
    return size // step * step


def parse_draft_vocab(text: str, vocab_size: int) -> int | None:
    """`--draft-vocab auto|full|N`: the number of tokens; None for all of them."""
    if text == "full":
        return None
    if text == "auto":
        return default_draft_vocab_size(vocab_size)
    if not text.isascii() or not text.isdecimal():
        raise UsageError(
            f"--draft-vocab {text!r} is not known; give auto, full, a number of tokens, or a file of token ids."
        )
    if not 1 <= int(text) <= vocab_size:
        raise UsageError(f"--draft-vocab is {text}; give 1 to {vocab_size:,}, the tokens that the model has.")
    return None if int(text) == vocab_size else int(text)


def draft_head_bytes(head_bytes: int, vocab_size: int, draft_vocab_size: int | None) -> int:
    """Bytes of the head that one draft reads, of an LM head of `head_bytes`; None: all of it."""
    if draft_vocab_size is None:
        return head_bytes
    return -(-head_bytes * draft_vocab_size // vocab_size)


def first_tokens(vocab_size: int, size: int, always: Iterable[int] = ()) -> list[int]:
    """A list that needs no data: the tokens `always`, then the lowest ids.

    A byte-pair vocabulary is in the order of its merges, the commonest first. Added tokens, such as those that end an
    answer, have the highest ids.
    """
    listed = dict.fromkeys(token_id for token_id in always if 0 <= token_id < vocab_size)
    for token_id in range(vocab_size):
        if len(listed) >= size:
            break
        listed[token_id] = None
    return list(listed)[:size]


def d2t_offsets(token_ids: Sequence[int]) -> list[int]:
    """The values of `d2t` for the tokens of draft indices 0, 1, ..."""
    return [token_id - index for index, token_id in enumerate(token_ids)]


def tokens_of_d2t(offsets: Sequence[int]) -> list[int]:
    """The inverse."""
    return [index + offset for index, offset in enumerate(offsets)]
