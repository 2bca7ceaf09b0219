"""Token ids to text as they come: UTF-8 held back until whole, stop strings held back until decided.

Pieces joined are what decoding all ids at once gives, cut at the first stop string, whatever the chunking.
"""

import codecs
from collections.abc import Iterable, Sequence

from onebox.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "TextStream"]


class Detokenizer:
    """Ids in, whole characters out; the bytes of an unfinished character wait for the next ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

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


class TextStream:
    """One answer's ids to its text. Counts the tokens used: none after the one that completed a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._stops.stopped_by

    @property
    def is_whole(self) -> bool:
        return self._detokenizer.is_whole

    def push(self, token_ids: Iterable[int]) -> str:
        text = ""
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            text += self._stops.push(self._detokenizer.push([token_id]))
        return text

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
