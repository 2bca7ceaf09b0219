"""Generated signature circulars (in Turkish "imza sirküleri"): who may sign for a company, certified by a notary.

Three languages; each depends only on its seed. The notary's name is also the text around the round stamp (`scans.py`).
"""

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from onebox.eval.invoices import company_name, person_name, shown_day
from onebox.eval.question import Json

__all__ = ["SignatureCircular", "make_circular"]

_WORDS: dict[str, dict[str, str]] = {
    "en": {
        "title": "SIGNATURE CIRCULAR",
        "company": "Company",
        "notary": "Notary",
        "date": "Date",
        "joint": "They may bind the company only by signing jointly.",
        "sole": "Each of them may bind the company by signing alone.",
    },
    "hu": {
        "title": "ALÁÍRÁSI CÍMPÉLDÁNY",
        "company": "Cég",
        "notary": "Közjegyző",
        "date": "Kelt",
        "joint": "A cég képviseletére együttesen jogosultak.",
        "sole": "A cég képviseletére önállóan jogosultak.",
    },
    "tr": {
        "title": "İMZA SİRKÜLERİ",
        "company": "Şirket",
        "notary": "Noter",
        "date": "Tarih",
        "joint": "Şirketi müştereken temsil ve ilzama yetkilidirler.",
        "sole": "Şirketi münferiden temsil ve ilzama yetkilidirler.",
    },
}
_TITLES = {
    "en": ("director", "general manager", "partner"),
    "hu": ("ügyvezető", "igazgató", "tag"),
    "tr": ("şirket müdürü", "yönetim kurulu üyesi", "ortak"),
}
_PLACES = {
    "en": ("Leeds", "Bristol", "York", "Oxford"),
    "hu": ("Győr", "Pécs", "Szűcsi", "Debrecen"),
    "tr": ("Kadıköy", "Üsküdar", "Beyoğlu", "Çankaya"),
}
_NOTARIES = {
    "en": "Notary Public of {place}",
    "hu": "{place} {number}. sz. közjegyző",
    "tr": "{place} {number}. Noterliği",
}


@dataclass(frozen=True)
class SignatureCircular:
    """What it says (`truth`, as in the JSON answer) and its lines of text."""

    language: str
    truth: Json
    lines: tuple[str, ...]


def make_circular(seed: int, language: str) -> SignatureCircular:
    rng = Random(f"circular {seed} {language}")  # noqa: S311  # a seeded example, no secret
    words, authority = _WORDS[language], rng.choice(("joint", "sole"))
    company = company_name(rng, language)
    notary = _NOTARIES[language].format(place=rng.choice(_PLACES[language]), number=rng.randint(2, 29))
    signatories: list[str] = []
    while len(signatories) < 2:
        name = person_name(rng, language)
        signatories += [name] if name not in signatories else []
    day = date(2019, 1, 1) + timedelta(days=rng.randrange(2500))
    lines = [words["title"], f"{words['company']}: {company}", f"{words['notary']}: {notary}"]
    lines += [f"{words['date']}: {shown_day(day, language)}", ""]
    lines += [f"{place}. {name}, {rng.choice(_TITLES[language])}" for place, name in enumerate(signatories, start=1)]
    lines += ["", words[authority]]
    truth = {"company": company, "notary": notary, "signatories": signatories, "authority": authority}
    return SignatureCircular(language, truth, tuple(lines))
