"""Leaves out the oldest items of a conversation until its prompt fits the context.

What stays whatever happens: messages of the system and of developers, the last message of the user, and the last item.
A call and its result go together. Which items go is decided by their order alone, so the same request gets the same
prompt.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from onebox.engine.api import PAGE_TOKENS, ContextTooLongError, EngineConfig
from onebox.server.prompt import Prompt

__all__ = ["context_room", "droppable_units", "fit_to_context"]

_KEPT_ROLES = ("system", "developer")
_ANSWER_SHARE = 4
"""An answer without a limit, or with a larger one, has a quarter of the context."""


def context_room(config: EngineConfig) -> int:
    """Tokens that a prompt and its answer may have together."""
    return min(config.max_model_len, config.num_pages * PAGE_TOKENS)


def droppable_units(items: Sequence[Any]) -> list[tuple[int, ...]]:
    """Places of items that go together, in the order in which they are left out."""
    units: dict[Any, list[int]] = {}
    for place, item in enumerate(items):
        call_id = getattr(item, "call_id", None)
        units.setdefault(place if call_id is None else ("call", call_id), []).append(place)
    kept = {place for place, item in enumerate(items) if _is_kept(item)} | {len(items) - 1}
    users = [place for place, item in enumerate(items) if getattr(item, "role", None) == "user"]
    kept |= set(users[-1:])
    return [tuple(places) for places in units.values() if not kept & set(places)]


def _is_kept(item: Any) -> bool:
    # Tools among the items are no turn; they have no role of their own.
    return item.type == "additional_tools" or getattr(item, "role", None) in _KEPT_ROLES


async def fit_to_context(
    items: Sequence[Any], build: Callable[[Sequence[Any]], Awaitable[Prompt]], config: EngineConfig
) -> tuple[Prompt, int]:
    """(prompt, items left out): as few as needed, so that the prompt leaves room for its answer.

    `build` makes the prompt of the items that are left. It is called once where everything fits, else about as often
    as the number of items has binary digits.
    """
    # On threads: for tens of thousands of items this takes a tenth of a second, and other clients wait for the loop.
    units, room = await asyncio.to_thread(droppable_units, items), context_room(config)

    async def attempt(num_units: int) -> Prompt | None:
        try:
            return await build(await asyncio.to_thread(_left, items, units[:num_units]))
        except ContextTooLongError:
            return None

    def fits(prompt: Prompt | None) -> bool:
        if prompt is None:
            return False
        reserve = min(prompt.sampling.max_tokens or room, room // _ANSWER_SHARE)
        return len(prompt.token_ids) + reserve <= room

    best, num_units = await attempt(0), 0
    if not fits(best):
        best, num_units = await attempt(len(units)), len(units)
        lowest, highest = 1, len(units)
        while lowest < highest and fits(best):
            middle = (lowest + highest) // 2
            found = await attempt(middle)
            if fits(found):
                best, num_units, highest = found, middle, middle
            else:
                lowest = middle + 1
    if best is None or len(best.token_ids) >= room:
        raise ContextTooLongError(_too_long(best, room))
    return best, sum(len(unit) for unit in units[:num_units])


def _left(items: Sequence[Any], units: Sequence[tuple[int, ...]]) -> list[Any]:
    """The items without those of these units."""
    dropped = {place for unit in units for place in unit}
    return [item for place, item in enumerate(items) if place not in dropped]


def _too_long(rest: Prompt | None, room: int) -> str:
    length = f"{len(rest.token_ids)} tokens" if rest else "more tokens"
    return (
        f"Although all that truncation may leave out is left out, the rest (instructions, tools, the last message of "
        f"the user and the last item) has {length}, and the context holds {room}, answer included; shorten it."
    )
