"""Token ids to text as they come, UTF-8 held back until whole; and text up to a stop string.

Pieces joined are what decoding all ids at once gives, whatever the chunking, and so is the text up to the stop string.
"""

import codecs
from collections.abc import Iterable, Sequence

from onebox.text.marks import STAND_INS
from onebox.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings"]


class Detokenizer:
    """Ids in, whole characters out; the bytes of an unfinished character wait for the next ids.

    `has_marks`: a token that is a mark, such as </think>, comes as the mark's stand-in (`marks.py`).
    """

    def __init__(self, tokenizer: Tokenizer, *, has_marks: bool = False) -> None:
        self._tokenizer = tokenizer
        self._marks = tokenizer.mark_ids if has_marks else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._decode, token_ids))

    def _decode(self, token_id: int) -> str:
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        mark = self._marks.get(token_id)
        # An unfinished character may come before it.
        return text if mark is None else text.removesuffix(mark) + STAND_INS[mark]

    @property
    def is_whole(self) -> bool:
        """No character is unfinished."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """What is left at the end: an unfinished character is shown as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Lets text through up to the first stop string; text that might be the start of one waits. No stop is empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was found."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first ends the text: that does not depend on how the text was cut.
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of text with which some stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
