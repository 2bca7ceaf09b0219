"""Questions that the model cannot answer, and second questions about what was said before, some of which it cannot."""

from random import Random

from recipes.pocket.synthetic.example import Example, answer_json, json_value, text_is
from recipes.pocket.synthetic.filler import filler
from recipes.pocket.synthetic.invoice import invoice
from recipes.pocket.synthetic.words import CITIES, LANGUAGES, company, made_up, person, pick

__all__ = ["UNKNOWN", "unknown"]

UNKNOWN = {
    "en": "I do not know that.",
    "hu": "Ezt nem tudom.",
    "tr": "Bunu bilmiyorum.",
}
_NOT_SAID = {
    "en": "The text does not say that.",
    "hu": "Erről nem szól a szöveg.",
    "tr": "Metinde bu yazmıyor.",
}
_QUESTIONS = {
    "en": (
        "Who is {person}?", "When was {person} born?", "What is the weather in {city} today?", "Who founded {company}?",
        "What does {word} cost today?", "How many people live in {city}?", "What is the phone number of {company}?",
        "What happened yesterday in {city}?", "Who won the match in {city}?", "What is the meaning of {invented}?",
    ),
    "hu": (
        "Ki {person}?", "Mikor született {person}?", "Milyen idő van ma itt: {city}?", "Ki alapította ezt: {company}?",
        "Hányan laknak itt: {city}?", "Mi történt tegnap itt: {city}?", "Mit jelent az, hogy {invented}?",
    ),
    "tr": (
        "{person} kim?", "{person} ne zaman doğdu?", "Bugün {city} şehrinde hava nasıl?", "{company} kim kurdu?",
        "{city} şehrinde kaç kişi yaşıyor?", "Dün {city} şehrinde ne oldu?", "{invented} ne demek?",
    ),
}  # fmt: skip
_ASK_MISSING = {
    "en": ("What is the secret code of {}?", "What is the password for {}?", "What does the text say about {}?"),
    "hu": ("Mi a titkos kód ehhez: {}?", "Mi {} jelszava?"),
    "tr": ("{} için gizli kod nedir?", "{} şifresi nedir?"),
}
_ALSO = {"en": "And {}?", "hu": "És ez: {}?", "tr": "Peki {}?"}
_FIELDS = ("vendor", "customer", "invoice_number", "date", "due_date", "total", "email", "tax_id")


def unknown(rng: Random) -> Example:
    way = rng.random()
    if way < 0.4:
        return _question(rng)
    return _missing(rng) if way < 0.6 else _second_question(rng)


def _question(rng: Random) -> Example:
    language = rng.choice(LANGUAGES)
    question = rng.choice(_QUESTIONS[language]).format(
        person=person(rng, language),
        city=rng.choice(CITIES[language]),
        company=company(rng, language),
        word=pick(rng, language),
        invented=made_up(rng),
    )
    answer = UNKNOWN[language]
    return Example.ask(question, answer, text_is(answer), "I have no source for this." if rng.random() < 0.4 else "")


def _missing(rng: Random) -> Example:
    """A key that is not in the text."""
    language = rng.choice(LANGUAGES)
    text = "\n\n".join(filler(rng, rng.randint(200, 2500)))
    ask = rng.choice(_ASK_MISSING[language]).format(made_up(rng))
    answer = _NOT_SAID[language]
    return Example.ask(f"{text}\n\n{ask}", answer, text_is(answer), "It is not there." if rng.random() < 0.4 else "")


def _second_question(rng: Random) -> Example:
    """Another field of an invoice that was asked about before, by its key alone."""
    first = invoice(rng)
    shown = first.check["value"]
    others = [field for field in _FIELDS if field in shown]
    if not others:
        return _question(rng)
    field = rng.choice(others)
    value = {field: shown[field]}
    earlier = first.answer.rpartition("</think>\n\n")[2]
    language = rng.choice(LANGUAGES)
    messages = [
        *first.messages,
        {"role": "assistant", "content": earlier},
        {"role": "user", "content": _ALSO[language].format(field)},
    ]
    return Example.answered(messages, answer_json(value), json_value(value), f"{field}." if rng.random() < 0.4 else "")
