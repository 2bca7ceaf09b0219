"""Tasks on the words and lines of a short text: repeat, reverse, sort, count, find."""

from random import Random

from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.filler import filler
from recipes.pocket.synthetic.words import LANGUAGES, pick

__all__ = ["text_tasks"]

_ASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "repeat": {
        "en": ("Repeat: {}", "Say exactly: {}", "Copy this: {}"),
        "hu": ("Ismételd meg: {}",),
        "tr": ("Tekrarla: {}",),
    },
    "reverse": {
        "en": ("Reverse the order of these words: {}", "Say these words backwards: {}"),
        "hu": ("Fordítsd meg a szavak sorrendjét: {}",),
        "tr": ("Kelimeleri ters sırayla yaz: {}",),
    },
    "sort": {
        "en": ("Sort these numbers, smallest first: {}", "Put in ascending order: {}"),
        "hu": ("Rendezd növekvő sorrendbe: {}",),
        "tr": ("Küçükten büyüğe sırala: {}",),
    },
    "count": {
        "en": ("How many words: {}", "Count the words: {}"),
        "hu": ("Hány szó ez: {}",),
        "tr": ("Kaç kelime var: {}",),
    },
    "largest": {
        "en": ("Which number is the largest: {}",),
        "hu": ("Melyik a legnagyobb szám: {}",),
        "tr": ("En büyük sayı hangisi: {}",),
    },
    "smallest": {
        "en": ("Which number is the smallest: {}",),
        "hu": ("Melyik a legkisebb szám: {}",),
        "tr": ("En küçük sayı hangisi: {}",),
    },
    "first": {"en": ("What is the first word of: {}",), "hu": ("Mi az első szó: {}",), "tr": ("İlk kelime nedir: {}",)},
    "last": {"en": ("What is the last word of: {}",), "hu": ("Mi az utolsó szó: {}",), "tr": ("Son kelime nedir: {}",)},
    "capitals": {
        "en": ("Write in capital letters: {}",),
        "hu": ("Írd nagybetűvel: {}",),
        "tr": ("Büyük harfle yaz: {}",),
    },
    "list": {
        "en": ("Write as a numbered list: {}",),
        "hu": ("Írd számozott listába: {}",),
        "tr": ("Numaralı liste yap: {}",),
    },
    "after": {
        "en": ("Which word comes after {1} in: {0}",),
        "hu": ("Melyik szó jön a(z) {1} után: {0}",),
        "tr": ("{1} kelimesinden sonra hangisi gelir: {0}",),
    },
}
_NUMERIC = frozenset(("sort", "largest", "smallest"))


def text_tasks(rng: Random) -> Example:
    if rng.random() < 0.15:
        return _paragraph(rng)
    task, language = rng.choice(list(_ASKS)), rng.choice(LANGUAGES)
    ask = rng.choice(_ASKS[task][language])
    if task in _NUMERIC:
        numbers = rng.sample(range(rng.choice((20, 100, 1000))), rng.randint(2, 7))
        items = [str(number) for number in numbers]
    else:
        items = _different(rng, language)
    joint = rng.choice((" ", ", "))
    asked = rng.randrange(len(items) - 1)
    question = ask.format(joint.join(items), items[asked])
    answer, thought = _answer(task, items, joint, asked, language)
    return Example.ask(question, answer, text_is(answer), reasoning=thought if rng.random() < 0.35 else "")


def _different(rng: Random, language: str) -> list[str]:
    """Two to eight different words."""
    words = {pick(rng, language): None for _ in range(rng.randint(4, 8))}
    words |= {"one": None, "two": None} if len(words) < 2 else {}
    return list(words)


def _answer(task: str, items: list[str], joint: str, asked: int, language: str) -> tuple[str, str]:
    """(answer, thought)."""
    numbered = [f"{index}. {item}" for index, item in enumerate(items, 1)]
    if task == "repeat":
        return joint.join(items), f"There are {len(items)} words."
    if task == "reverse":
        return joint.join(reversed(items)), f"The last word is {items[-1]}."
    if task == "sort":
        return joint.join(sorted(items, key=int)), f"The smallest is {min(items, key=int)}."
    if task == "count":
        return str(len(items)), "\n".join(numbered)
    if task in ("largest", "smallest"):
        ordered = sorted(items, key=int, reverse=task == "largest")
        return ordered[0], ", ".join(ordered)
    if task in ("first", "last"):
        return items[0 if task == "first" else -1], "\n".join(numbered)
    if task == "capitals":
        return _capitals(joint.join(items), language), "Every letter becomes a capital."
    if task == "list":
        return "\n".join(numbered), f"There are {len(items)} items."
    return items[asked + 1], "\n".join(numbered)


def _capitals(text: str, language: str) -> str:
    """In Turkish the capital of i is İ and that of ı is I."""
    return (text.replace("i", "İ") if language == "tr" else text).upper()


def _paragraph(rng: Random) -> Example:
    """The first or the last line of a short text of several paragraphs."""
    paragraphs = [" ".join(text.split())[:200].strip() for text in filler(rng, rng.randint(200, 900))]
    paragraphs = [text for text in paragraphs if text] or [pick(rng, "en")]
    first = rng.random() < 0.5
    answer = paragraphs[0] if first else paragraphs[-1]
    ask = "Repeat the first line of this text." if first else "Repeat the last line of this text."
    body = "\n".join(paragraphs)
    return Example.ask(f"{ask}\n\n{body}", answer, text_is(answer))
