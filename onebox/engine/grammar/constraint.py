"""One sequence's place in its grammar: which tokens may come next, and which drafts are worth verifying.

The place moves along the answer's own tokens only, and computes one mask at each of them, in order. So whether the
answer stays within the library's limits follows from the answer alone. Where there are drafts, a scout is ahead of it
and gives the masks: a second matcher with another lexer, because the library keeps failures, and what it has learnt, in
the lexer. The place then follows while the device computes, and has the last word on whether the answer failed.
"""

from typing import TYPE_CHECKING

from onebox.engine.grammar.library import GrammarLimitError, GrammarPlace, TokenMasks, Words, holds
from onebox.spec.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint"]


class Constraint:
    """Made by a `GrammarCompiler`. Without a scout no draft is allowed."""

    def __init__(self, masks: TokenMasks, matcher: "LLMatcher", scout: "LLMatcher | None") -> None:
        """`matcher` shares its lexer with nobody; `scout` may share one with other scouts."""
        self._place = GrammarPlace(masks, matcher)
        self._is_masked = False
        """Whether the place has computed the mask where it is."""
        self._unwalked: list[int] = []
        """Tokens of the answer that the place has yet to pass."""
        self._failure: UnsupportedError | None = None
        self._scout = GrammarPlace(masks, scout) if scout else None
        self._mask: Words | None = None
        """After the answer's last token, once it is computed."""

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow. An answer may also end earlier, where the mask holds the end tokens."""
        return (self._scout or self._place).is_complete

    def mask(self) -> Words:
        """The tokens allowed next, int32 [ceil(V / 32)]: bit i of word w is token 32 w + i. Never empty."""
        if self._failure:
            raise self._failure
        if self._mask is None and self._scout:
            try:
                self._mask = self._scout.mask()
            except GrammarLimitError:
                self._scout = None
        if self._mask is None:
            self._walk()
            self._mask = self._place_mask()
        return self._mask

    def advance(self, token_id: int) -> None:
        """Moves past a token that the mask allows; any other raises UnsupportedError and changes nothing."""
        if self._scout:
            try:
                self._scout.advance(token_id)
            except GrammarLimitError:
                self._scout = None
            else:
                self._unwalked.append(token_id)
        if self._scout is None:
            self._walk()
            self._pass(token_id)
        self._mask = None

    def masks_for(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Words, ...]]:
        """The drafts up to the first that the grammar forbids, and the masks of the positions that they reach.

        First the next position's mask, then the one after each allowed draft. The place in the grammar does not change.
        """
        masks = [self.mask()]
        if self._scout:
            try:
                for draft in drafts:
                    if not holds(masks[-1], draft):
                        break
                    self._scout.advance(draft)
                    masks.append(self._scout.mask())
                self._scout.rollback(len(masks) - 1)
            except GrammarLimitError:
                self._scout = None  # from here on there are no drafts
        return drafts[: len(masks) - 1], tuple(masks)

    def catch_up(self) -> None:
        """Follows the scout. Called while the device computes; a failure is raised by the next mask."""
        if self._unwalked and self._failure is None:
            try:
                self._walk()
            except UnsupportedError as error:
                self._failure = error

    def finish(self, sampled: tuple[int, ...]) -> None:
        """Called with the tokens that end the answer, none of which it was advanced by: raises if a limit was met."""
        if self._failure:
            raise self._failure
        self._walk()
        for token_id in sampled[:-1]:
            self._pass(token_id)
        if not self._is_masked:
            self._place_mask()

    def _walk(self) -> None:
        while self._unwalked:
            self._pass(self._unwalked[0])
            del self._unwalked[0]

    def _pass(self, token_id: int) -> None:
        if not self._is_masked:
            self._place_mask()
        self._place.advance(token_id)
        self._is_masked = False

    def _place_mask(self) -> Words:
        mask = self._place.mask()
        self._is_masked = True
        return mask
