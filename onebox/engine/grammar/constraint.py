"""One sequence's place in its grammar: which tokens may come next, and which drafts are worth verifying.

The place moves along the answer's own tokens only, and computes one mask at each of them, in order. So whether the
answer stays within the library's limits follows from the answer alone. Drafts are walked by a scout with a lexer of its
own: the library keeps failures, and what it has learnt, in the lexer, which copies of a compiled grammar share.
"""

from typing import TYPE_CHECKING

from onebox.engine.grammar.library import GrammarPlace, TokenMasks, Words, holds
from onebox.spec.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint"]


class Constraint:
    """Made by a `GrammarCompiler`. Without a scout no draft is allowed."""

    def __init__(self, masks: TokenMasks, matcher: "LLMatcher", scout: "LLMatcher | None") -> None:
        """`matcher` shares its lexer with nobody; `scout` may share one with other scouts."""
        self._place = GrammarPlace(masks, matcher)
        self._mask: Words | None = None
        """Of this place, once it is computed."""
        self._scout = GrammarPlace(masks, scout) if scout else None
        self._behind: list[int] = []
        """Tokens of the answer that the scout has not seen."""

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow. An answer may also end earlier, where the mask holds the end tokens."""
        return self._place.is_complete

    def mask(self) -> Words:
        """The tokens allowed next, int32 [ceil(V / 32)]: bit i of word w is token 32 w + i. Never empty."""
        if self._mask is None:
            self._mask = self._place.mask()
        return self._mask

    def advance(self, token_id: int) -> None:
        """Moves past a token that the mask allows; any other raises UnsupportedError."""
        if not holds(self.mask(), token_id):
            raise UnsupportedError(f"The grammar does not allow token {token_id} here, and it was sampled.")
        self._place.advance(token_id)
        self._mask = None
        if self._scout:
            self._behind.append(token_id)

    def masks_for(self, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Words, ...]]:
        """The drafts up to the first that the grammar forbids, and the masks of the positions that they reach.

        First the next position's mask, then the one after each allowed draft. The place in the grammar does not change.
        """
        masks = [self.mask()]
        if drafts and holds(masks[0], drafts[0]):
            masks += self._scouted(drafts, masks[0])
        return drafts[: len(masks) - 1], tuple(masks)

    def _scouted(self, drafts: tuple[int, ...], mask: Words) -> list[Words]:
        """The masks after each allowed draft. A scout that fails is given up: from then on there are no drafts."""
        found: list[Words] = []
        if self._scout is None:
            return found
        try:
            for token_id in self._behind:
                self._scout.advance(token_id)
            self._behind.clear()
            for draft in drafts:
                if not holds(mask, draft):
                    break
                self._scout.advance(draft)
                mask = self._scout.mask()
                found.append(mask)
            self._scout.rollback(len(found))
        except UnsupportedError:
            self._scout = None
        return found
