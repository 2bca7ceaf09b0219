"""The equality gate's questions: prompts of 1 to 4,000 tokens with every way of drawing an answer.

Tokens are bytes; what they say means nothing. Families matter: prompts that begin alike, turns of one conversation and
copies of one question meet in the prefix cache.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from onebox.engine.request import Request, SamplingParams, Vision
from onebox.spec.vocabulary import TokenTable

BOUNDARY, EOS = 257, 258
"""A token that opens a message, and the one that ends an answer."""
TOKEN_TABLE = TokenTable(
    tokens=(*(bytes([byte]) for byte in range(256)), b"", b"", b""),
    special_ids=frozenset({256, BOUNDARY, EOS}),
    eos_token_ids=(EOS,),
)
HAS_GRAMMARS = find_spec("llguidance") is not None
LONG = 900
"""Prompts of so many tokens are asked less often."""

LENGTHS = (1, 2, 5, 40, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320, 500)
LONG_LENGTHS = (1000, 4000, 2047)

WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"min_p": 0.05, "top_p": 0.95, "top_k": 100},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": -0.5},
    {"logit_bias": ((65, 4.0), (66, -100.0), (EOS, 3.0)), "min_tokens": 5},
    {"stop_token_ids": tuple(range(0, 256, 9)), "min_tokens": 3},
    {"temperature": 0.0, "stop_token_ids": tuple(range(3, 256, 7))},
)


@dataclass(frozen=True)
class Case:
    """One question and how it is asked. The seed is its own, so that it names the case."""

    name: str
    family: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_prompt: bool = True
    pin_prompt: bool = False
    vision: Vision | None = None

    @property
    def is_long(self) -> bool:
        return len(self.prompt) >= LONG

    def request(self, name: str) -> Request:
        return Request(
            name,
            self.prompt,
            self.sampling,
            priority=self.priority,
            cache_prompt=self.cache_prompt,
            pin_prompt=self.pin_prompt,
            vision=self.vision,
        )


def text(length: int, seed: object) -> tuple[int, ...]:
    rng = random.Random(f"text {seed}")
    return tuple(rng.randrange(256) for _ in range(length))


def message(length: int, seed: object) -> tuple[int, ...]:
    return (BOUNDARY, *text(length - 1, seed))


def _turns() -> Iterator[tuple[int, ...]]:
    """One conversation as it grows, and a second course that it might have taken."""
    history = message(90, "system") + message(45, "question 0")
    yield history + message(4, "opening")
    for turn in range(1, 4):
        history += message(60 + turn, f"answer {turn}") + message(70, f"question {turn}")
        yield history + message(4, "opening")
    yield history[:300] + message(50, "another question") + message(4, "opening")


def _prompts() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, family, prompt)."""
    for length in LENGTHS:
        yield f"length {length}", "lengths", text(length, length)
    base = text(300, "base")
    for length in (1, 19, 20, 64, 101, 212):
        yield f"base and {length}", "prefix", base + text(length, f"tail {length}")
    for length in (256, 257):
        yield f"base's first {length}", "prefix", base[:length]
    for turn, prompt in enumerate(_turns()):
        yield f"turn {turn}", "turns", prompt
    for copy in range(3):
        yield f"copy {copy}", "copies", text(130, "copied")
    for length in LONG_LENGTHS:
        yield f"length {length}", "long", text(length, "long")
    yield "length 4000 that ends otherwise", "long", text(4000, "long")[:-30] + text(30, "other end")


def _special(first_seed: int) -> Iterator[Case]:
    """Cases that are about one setting each."""
    repeated = ((97, 100.0), (98, 99.5))
    in_turns = {"logit_bias": ((97, 30.0), (98, 30.0), (99, 30.0)), "frequency_penalty": 1.7, "presence_penalty": 0.3}
    settings: tuple[tuple[str, int, dict[str, object]], ...] = (
        ("an answer that repeats itself", 70, {"temperature": 0.0, "logit_bias": repeated, "max_tokens": 24}),
        ("an answer of two words", 30, {"temperature": 2.0, "logit_bias": repeated, "max_tokens": 24}),
        ("an answer of words in turns", 31, {"temperature": 0.0, **in_turns, "max_tokens": 20}),
        ("an end as soon as there may be one", 32, {"logit_bias": ((EOS, 50.0),), "min_tokens": 9, "max_tokens": 20}),
        ("prompt logprobs", 70, {"prompt_logprobs": 2}),
        ("prompt logprobs over pages", 200, {"prompt_logprobs": 0, "temperature": 0.0}),
        ("no logprobs", 100, {"logprobs": None}),
        ("an answer to its last page's end", 119, {"max_tokens": 9}),
        ("a negative seed", 20, {"seed": -7}),
        ("a seed of many bits", 21, {"seed": 3 << 80}),
        ("one token", 66, {"max_tokens": 1}),
        ("an end that is ignored", 33, {"logit_bias": ((EOS, 5.0),), "ignore_eos": True}),
    )
    for place, (name, length, setting) in enumerate(settings):
        yield Case(name, "special", text(length, name), sampling(first_seed + place, setting))
    seed = first_seed + len(settings)
    yield Case("outside the cache", "prefix", text(300, "base"), sampling(seed, {}), cache_prompt=False)
    yield Case("pinned", "prefix", text(300, "base")[:200], sampling(seed + 1, {}), pin_prompt=True)


def _grammar_cases(first_seed: int) -> Iterator[Case]:
    from onebox.engine.grammar.value import Grammar

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    grammars = (
        ("schema", Grammar.json_schema(schema), {"max_tokens": 24}),
        ("schema, greedy", Grammar.json_schema(schema), {"temperature": 0.0, "max_tokens": 24}),
        ("object", Grammar.json_object(), {"top_p": 0.9}),
        ("regex", Grammar.regex(r"(ab|cd)+[0-9]{2,3}"), {"presence_penalty": 1.0}),
        ("choice", Grammar.choice(["yes", "no", "not at all, never"]), {"min_tokens": 2}),
        ("regex, greedy", Grammar.regex(r"[a-f]{3,9}(, [a-f]{3,9})*"), {"temperature": 0.0}),
    )
    for place, (name, grammar, setting) in enumerate(grammars):
        prompt = text(30 + 17 * place, name)
        yield Case(f"grammar: {name}", "grammar", prompt, sampling(first_seed + place, {**setting, "grammar": grammar}))


def sampling(seed: int, setting: dict[str, object]) -> SamplingParams:
    fields = {"seed": seed, "logprobs": seed % 3, "max_tokens": 8 + 5 * seed % 7, **setting}
    return SamplingParams(**fields)  # type: ignore[arg-type]


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of the gate; those with grammars where the library for them is installed."""
    cases = [
        Case(name, family, prompt, sampling(seed, WAYS[seed % len(WAYS)]), priority=(0, 0, 1, 0, -1)[seed % 5])
        for seed, (name, family, prompt) in enumerate(_prompts())
    ]
    cases += _special(len(cases))
    if HAS_GRAMMARS:
        cases += _grammar_cases(len(cases))
    return tuple(cases)


def hands(cases: Sequence[Case], groups: Sequence[str], size: int) -> Iterator[list[Case]]:
    """Deals `size` cases to each player: some of one family, which meet in the cache, and some of the rest.

    Each group of players goes through all cases before it gets one again, but for the long ones, of which it gets two.
    """
    families = [[case for case in cases if case.family == name] for name in ("prefix", "turns", "copies", "pictures")]
    long = [case for case in cases if case.is_long]
    rest = [case for case in cases if not case.is_long and not any(case in family for family in families)]
    num_dealt: Counter[str] = Counter()
    for group in groups:
        turn = num_dealt[group]
        num_dealt[group] += 1
        hand = _cards(families[turn % 4], turn // 4, size // 2)
        hand += _cards(rest, turn, size - len(hand))
        yield hand + (_cards(long, len(num_dealt) - 1 + turn // 5, 1) if turn % 5 == 4 else [])


def _cards(pile: Sequence[Case], turn: int, count: int) -> list[Case]:
    return [pile[(turn * count + place) % len(pile)] for place in range(min(count, len(pile)))]
