"""Infinite plain sentences in three languages: the text around a hidden key. Seeded; written for this project."""

from collections.abc import Iterator
from random import Random

__all__ = ["LANGUAGES", "paragraphs"]

LANGUAGES = ("en", "hu", "tr")
_SENTENCES_A_PARAGRAPH = 4

_FORMS: dict[str, tuple[str, ...]] = {
    "en": (
        "On day {n} the {who} counted {m} {what} in the {where}.",
        "The {who} wrote that the {where} was quiet, and that {m} {what} were still missing.",
        "After {m} hours of rain nobody in the {where} could find the {what}.",
        "A list from the {where} names {m} {what}, and the {who} signed it.",
        "Nobody asked the {who} why {n} {what} had been carried to the {where}.",
        "The road from the {where} was closed for {n} days, so the {what} came later.",
    ),
    "hu": (
        "A {n}. napon {m} {what} volt itt: {where}.",
        "Egy feljegyzés szerint a {who} sokáig várt, mert a {what} késett.",
        "Az eső {m} órán át esett, és a {who} hazament.",
        "A lista szerint {m} {what} maradt, a többit a {who} elvitte.",
        "Senki sem kérdezte, miért állt a {who} ott, ahol a {where} kezdődik.",
    ),
    "tr": (
        "{n}. günde {where} için {m} {what} sayıldı.",
        "Bir {who} uzun süre bekledi, çünkü {what} gecikmişti.",
        "Yağmur {m} saat sürdü ve {who} evine döndü.",
        "Listeye göre {m} {what} kaldı, kalanını {who} götürdü.",
        "Yol {n} gün kapalıydı, bu yüzden {what} daha sonra geldi.",
    ),
}
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "who": ("keeper", "gardener", "clerk", "captain", "teacher", "miller", "surveyor", "printer"),
        "what": ("crates", "lamps", "letters", "ropes", "maps", "bottles", "ledgers", "wheels"),
        "where": ("harbour", "library", "valley", "station", "orchard", "workshop", "chapel", "market"),
    },
    "hu": {
        "who": ("kertész", "tanító", "molnár", "kapitány", "írnok", "halász", "nyomdász", "őr"),
        "what": ("láda", "lámpa", "levél", "kötél", "térkép", "üveg", "kerék", "könyv"),
        "where": ("kikötő", "könyvtár", "völgy", "állomás", "gyümölcsös", "műhely", "kápolna", "piac"),
    },
    "tr": {
        "who": ("bekçi", "bahçıvan", "kâtip", "kaptan", "öğretmen", "değirmenci", "balıkçı", "çırak"),
        "what": ("sandık", "lamba", "mektup", "halat", "harita", "şişe", "defter", "tekerlek"),
        "where": ("liman", "kütüphane", "vadi", "istasyon", "bahçe", "atölye", "çarşı", "köprü"),
    },
}


def paragraphs(rng: Random, language: str) -> Iterator[str]:
    """Paragraphs of a few sentences, each starting with a capital."""
    forms, words = _FORMS[language], _WORDS[language]
    while True:
        sentences = []
        for _ in range(_SENTENCES_A_PARAGRAPH):
            chosen = {name: rng.choice(options) for name, options in words.items()}
            sentences.append(rng.choice(forms).format(n=rng.randint(2, 99), m=rng.randint(2, 60), **chosen))
        yield " ".join(sentences)
