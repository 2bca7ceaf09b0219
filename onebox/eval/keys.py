"""A key hidden in a long text, at given depths and lengths (in the server's own tokens)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from onebox.eval.filler import LANGUAGES, paragraphs
from onebox.eval.question import Check, Json, Question, Truth, TruthKind, one_turn

__all__ = ["DEPTHS", "KeyLengths", "key_questions", "parse_lengths"]

DEPTHS = (0.1, 0.5, 0.9)
ROOM_TOKENS = 96
"""Tokens reserved for the answer, which shares the context with the prompt."""
_CHARACTERS_A_TOKEN = 2.0
"""A conservative first guess; the server's count decides."""
_THINGS = ("the lighthouse", "the old bridge", "the north gate", "the archive", "the blue boat", "the bakery")
_TOLD = "The secret code of {name} is {key}."
_ASKED = "What is the secret code of {name}?"
_READ = "Read this text, then answer."

Count = Callable[[Json], Awaitable[int | None]]
"""Prompt tokens of a chat request, counted by the server."""


@dataclass(frozen=True)
class KeyLengths:
    """Lengths to test, and lengths that exceed the server's context."""

    fitting: tuple[int, ...]
    too_long: tuple[int, ...] = ()


def parse_lengths(asked: Sequence[int], context_tokens: int | None) -> KeyLengths:
    if context_tokens is None:
        return KeyLengths(tuple(asked))
    limit = context_tokens - ROOM_TOKENS
    fitting = tuple(length for length in asked if length <= limit)
    return KeyLengths(fitting, tuple(length for length in asked if length > limit))


async def key_questions(lengths: Sequence[int], repeats: int, seed: int, count: Count) -> list[Question]:
    """`repeats` questions for each length and depth, cycling through the languages of the text."""
    return [
        await _question(length, depth, number, seed, count)
        for length in lengths
        for depth in DEPTHS
        for number in range(repeats)
    ]


async def _question(length: int, depth: float, number: int, seed: int, count: Count) -> Question:
    rng = Random(f"keys {seed} {length} {depth} {number}")  # noqa: S311  # a seeded example, no secret
    # At least five digits: numbers in the filler have two.
    name, key = rng.choice(_THINGS), str(rng.randrange(10_000, 9_999_999))
    language = LANGUAGES[(number + DEPTHS.index(depth)) % len(LANGUAGES)]
    source = paragraphs(rng, language)
    pool: list[str] = []

    def body(num_paragraphs: int) -> Json:
        pool.extend(islice(source, max(0, num_paragraphs - len(pool))))
        text = list(pool[:num_paragraphs])
        text.insert(round(depth * num_paragraphs), _TOLD.format(name=name, key=key))
        return one_turn("\n\n".join([_READ, *text, _ASKED.format(name=name)]))

    fitted = await _fitted(body, length, count)
    return Question(
        f"keys/{length}/{depth:g}/{number}",
        Check.KEYS,
        f"{length:,} tokens, depth {depth:.0%}",
        fitted,
        Truth(TruthKind.HOLDS, [key]),
        ROOM_TOKENS,
    )


async def _fitted(body: Callable[[int], Json], length: int, count: Count) -> Json:
    """The longest text of at most `length` tokens, within about one paragraph."""
    sample = 8
    counted = await count(body(sample))
    if counted is None:
        characters = len(body(sample)["messages"][0]["content"])
        return body(max(1, int(length * _CHARACTERS_A_TOKEN / characters * sample)))
    num_paragraphs = max(1, int(length * sample / counted))
    for _ in range(4):
        counted = await count(body(num_paragraphs)) or length
        better = max(1, num_paragraphs + round((length - counted) * num_paragraphs / counted - 0.5))
        if better == num_paragraphs or num_paragraphs == 1:
            break
        num_paragraphs = better
    while num_paragraphs > 1 and (await count(body(num_paragraphs)) or 0) > length:
        num_paragraphs -= 1
    return body(num_paragraphs)
