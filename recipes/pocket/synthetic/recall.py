"""A key hidden in a long text, and a question for it at the end."""

from random import Random

from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.filler import filler
from recipes.pocket.synthetic.words import LANGUAGES, made_up, pick

__all__ = ["key_retrieval", "recall", "recalls"]

# (the sentence with the key, the question)
_FORMS = {
    "en": (
        ("The secret code of {name} is {key}.", "What is the secret code of {name}?"),
        ("Remember: the password for {name} is {key}.", "What is the password for {name}?"),
        ("The key to the {name} is {key}.", "What is the key to the {name}?"),
        ("The special number for {name} is {key}.", "What is the special number for {name}?"),
    ),
    "hu": (
        ("A titkos kód ehhez: {name}, így szól: {key}.", "Mi a titkos kód ehhez: {name}?"),
        ("Jegyezd meg: {name} jelszava {key}.", "Mi {name} jelszava?"),
    ),
    "tr": (
        ("{name} için gizli kod: {key}.", "{name} için gizli kod nedir?"),
        ("Unutma: {name} şifresi {key}.", "{name} şifresi nedir?"),
    ),
}
_READ = {
    "en": "Read this text, then answer.",
    "hu": "Olvasd el a szöveget, majd válaszolj.",
    "tr": "Metni oku, sonra yanıtla.",
}
_ROLES = ("user", "assistant")


def _key(rng: Random) -> str:
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 7)))
    return rng.choice((digits, digits, made_up(rng), f"{made_up(rng)}-{digits[:3]}"))


def recall(rng: Random, characters: int, depth: float) -> Example:
    """A key at `depth` (0 the beginning, 1 the end) of about `characters` characters, with other keys around it."""
    language = rng.choice(LANGUAGES)
    sentence, question = rng.choice(_FORMS[language])
    names = {pick(rng, language) for _ in range(rng.choice((1, 1, 2, 4)))}
    keys = {name: _key(rng) for name in sorted(names)}
    asked = rng.choice(list(keys))
    paragraphs = filler(rng, characters)
    for name in keys:
        if name != asked:
            paragraphs.insert(rng.randint(0, len(paragraphs)), sentence.format(name=name, key=keys[name]))
    told = sentence.format(name=asked, key=keys[asked])
    paragraphs.insert(_place(paragraphs, depth), told)
    text = "\n\n".join(paragraphs)
    ask = question.format(name=asked)
    prompt = f"{_READ[language]}\n\n{text}\n\n{ask}" if rng.random() < 0.8 else f"{ask}\n\n{text}\n\n{ask}"
    return Example.ask(prompt, keys[asked], text_is(keys[asked]), reasoning=told if rng.random() < 0.4 else "")


def recalls(rng: Random, characters: int) -> Example:
    """Several keys anywhere in about `characters` characters, asked for one after the other.

    A long row costs the same with one question or with ten, and teaches as often as it is asked.
    """
    language = rng.choice(LANGUAGES)
    names = sorted({pick(rng, language) for _ in range(rng.randint(6, 12))})
    hidden = [(*rng.choice(_FORMS[language]), name, _key(rng)) for name in names]
    paragraphs = filler(rng, characters)
    for sentence, _, name, key in hidden:
        paragraphs.insert(rng.randint(0, len(paragraphs)), sentence.format(name=name, key=key))
    rng.shuffle(hidden)
    *earlier, (last, answer) = [(question.format(name=name), key) for _, question, name, key in hidden]
    turns = [{"role": role, "content": said} for turn in earlier for role, said in zip(_ROLES, turn, strict=True)]
    messages = [*turns, {"role": "user", "content": last}]
    text = "\n\n".join(paragraphs)
    messages[0]["content"] = f"{_READ[language]}\n\n{text}\n\n{messages[0]['content']}"
    return Example.answered(messages, answer, text_is(answer))


def _place(paragraphs: list[str], depth: float) -> int:
    """The index of the first paragraph that has a share `depth` of all characters before it."""
    wanted = depth * sum(map(len, paragraphs))
    passed = 0
    for index, paragraph in enumerate(paragraphs):
        if passed >= wanted:
            return index
        passed += len(paragraph)
    return len(paragraphs)


def key_retrieval(rng: Random) -> Example:
    """Lengths from 200 to about 5,000 tokens; short ones more often: they teach the same and cost less."""
    return recall(rng, int(600 * 27 ** rng.random()), rng.random())
