"""Who drafts tokens, and which part of an answer they are for: what acceptance is counted by."""

from enum import StrEnum

__all__ = ["Drafter", "TextPart"]


class Drafter(StrEnum):
    # Keys of many small maps; an Enum's own hash is a function in Python.
    __hash__ = str.__hash__

    NONE = "none"
    MTP = "mtp"
    """The model's own head: one pass per draft, one after the other."""
    NGRAM = "ngram"
    """The sequence's own text: no pass at all."""
    DFLASH = "dflash"
    """A block drafter: one pass for all drafts of a step."""


class TextPart(StrEnum):
    """Reasoning is harder to predict than most answers, so the two are counted apart."""

    __hash__ = str.__hash__

    THINKING = "thinking"
    ANSWER = "answer"
