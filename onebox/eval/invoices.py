"""Generated invoices with known fields: to be extracted as JSON from text, or from an image (`ocr.py`).

Three languages with their own dates, number formats and labels. Each invoice depends only on its seed.
"""

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from onebox.eval.question import Check, Json, Question, Truth, TruthKind, one_turn

__all__ = [
    "Invoice",
    "company_name",
    "invoice_questions",
    "make_invoice",
    "person_name",
    "schema_questions",
    "shown_day",
]

LANGUAGES = ("en", "hu", "tr")
_MAX_TOKENS = 400

_FAMILIES = {
    "en": ("Baker", "Cooper", "Ellis", "Foster", "Hughes", "Morgan", "Parker", "Walker"),
    "hu": ("Kovács", "Szűcs", "Tóth", "Fehér", "Mészáros", "Török", "Juhász", "Győri"),
    "tr": ("Yılmaz", "Çelik", "Öztürk", "Aydın", "Doğan", "Şahin", "Kılıç", "Güneş"),
}
_GIVEN = {
    "en": ("Alice", "Henry", "Laura", "Victor"),
    "hu": ("Eszter", "Gábor", "Zsófia", "István"),
    "tr": ("Ayşe", "Çağla", "Mehmet", "İbrahim"),
}
_FORMS = {
    "en": ("{} Ltd", "{} & Sons Ltd", "{} Inc."),
    "hu": ("{} Kft.", "{} és Társa Bt.", "{} Zrt."),
    "tr": ("{} Ltd. Şti.", "{} Ticaret A.Ş.", "{} Sanayi A.Ş."),
}
_GOODS = {
    "en": ("paper", "lamp", "desk chair", "cable", "printer", "keyboard"),
    "hu": ("papír", "asztali lámpa", "szék", "kábel", "nyomtató", "billentyűzet"),
    "tr": ("kağıt", "masa lambası", "sandalye", "kablo", "yazıcı", "klavye"),
}
_LABELS: dict[str, dict[str, str]] = {
    "en": {
        "title": "INVOICE",
        "vendor": "Seller",
        "customer": "Customer",
        "invoice_number": "Invoice number",
        "date": "Date",
        "due_date": "Due date",
        "subtotal": "Subtotal",
        "tax": "VAT",
        "total": "Total",
    },
    "hu": {
        "title": "SZÁMLA",
        "vendor": "Eladó",
        "customer": "Vevő",
        "invoice_number": "Számla sorszáma",
        "date": "Kelt",
        "due_date": "Fizetési határidő",
        "subtotal": "Nettó",
        "tax": "ÁFA",
        "total": "Összesen",
    },
    "tr": {
        "title": "FATURA",
        "vendor": "Satıcı",
        "customer": "Müşteri",
        "invoice_number": "Fatura numarası",
        "date": "Tarih",
        "due_date": "Vade tarihi",
        "subtotal": "Ara toplam",
        "tax": "KDV",
        "total": "Toplam",
    },
}
_CURRENCIES = {"en": ("USD", "EUR", "GBP"), "hu": ("HUF", "EUR"), "tr": ("TRY", "EUR")}
_TAX_PERCENT = {"en": (5, 20), "hu": (5, 27), "tr": (10, 20)}
_PUNCTUATION = {"en": (",", "."), "hu": (" ", ","), "tr": (".", ",")}
_ASKED_KEYS = (
    ("vendor", "invoice_number", "date", "total"),
    ("invoice_number", "customer", "due_date", "currency"),
    ("date", "due_date", "subtotal", "tax", "total"),
    ("vendor", "customer", "invoice_number", "currency", "total"),
)
_REQUEST = "Extract the following as JSON: {}. Dates as YYYY-MM-DD, amounts as numbers."


@dataclass(frozen=True)
class Invoice:
    """The fields of an invoice (`truth`, as in the JSON answer) and its lines of text."""

    language: str
    truth: Json
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def make_invoice(seed: int, language: str) -> Invoice:
    rng = Random(f"invoice {seed} {language}")  # noqa: S311  # a seeded example, no secret
    currency = rng.choice(_CURRENCIES[language])
    is_whole = currency == "HUF"
    items = [
        (rng.choice(_GOODS[language]), rng.randint(1, 9), rng.randrange(5, 900) * (10_000 if is_whole else 25))
        for _ in range(rng.randint(1, 3))
    ]
    net = sum(quantity * cents for _, quantity, cents in items)
    percent = rng.choice(_TAX_PERCENT[language])
    tax = net * percent // 100
    tax -= tax % 100 if is_whole else 0
    issued = date(2019, 1, 1) + timedelta(days=rng.randrange(2500))
    due = issued + timedelta(days=rng.choice((8, 14, 30)))
    truth = {
        "vendor": company_name(rng, language),
        "customer": person_name(rng, language),
        "invoice_number": f"{rng.choice('ABEKMRST')}{rng.choice('CDFGHLNP')}-{rng.randrange(10_000, 99_999)}",
        "date": issued.isoformat(),
        "due_date": due.isoformat(),
        "currency": currency,
        "subtotal": _number(net),
        "tax": _number(tax),
        "total": _number(net + tax),
    }
    shown = {"date": shown_day(issued, language), "due_date": shown_day(due, language)}
    for key, cents in (("subtotal", net), ("tax", tax), ("total", net + tax)):
        shown[key] = f"{_amount(cents, language, is_whole)} {currency}"
    label = dict(_LABELS[language], tax=f"{_LABELS[language]['tax']} ({percent}%)")
    head = ["vendor", "customer", "invoice_number", "date", "due_date"]
    rng.shuffle(head)
    lines = [label["title"], *(f"{label[key]}: {shown.get(key, truth[key])}" for key in head), ""]
    for name, quantity, cents in items:
        lines.append(f"{name} | {quantity} | {_amount(cents, language, is_whole)} {currency}")
    lines += ["", *(f"{label[key]}: {shown[key]}" for key in ("subtotal", "tax", "total"))]
    return Invoice(language, truth, tuple(lines))


def company_name(rng: Random, language: str) -> str:
    return rng.choice(_FORMS[language]).format(rng.choice(_FAMILIES[language]))


def person_name(rng: Random, language: str) -> str:
    given, family = rng.choice(_GIVEN[language]), rng.choice(_FAMILIES[language])
    return f"{family} {given}" if language == "hu" else f"{given} {family}"


def _number(cents: int) -> float | int:
    return cents // 100 if cents % 100 == 0 else cents / 100


def _amount(cents: int, language: str, is_whole: bool) -> str:
    """1,234.50 in English, 1 234,50 in Hungarian, 1.234,50 in Turkish."""
    thousands, point = _PUNCTUATION[language]
    units = f"{cents // 100:,}".replace(",", thousands)
    return units if is_whole else f"{units}{point}{cents % 100:02d}"


def shown_day(day: date, language: str) -> str:
    return {"en": day.isoformat(), "hu": f"{day:%Y. %m. %d.}", "tr": f"{day:%d.%m.%Y}"}[language]


def invoice_questions(count: int, seed: int) -> list[Question]:
    """`count` invoices; the keys are requested in the prompt."""
    return [_question(Check.INVOICES, number, seed) for number in range(count)]


def schema_questions(count: int, seed: int) -> list[Question]:
    """`count` other invoices; the answer is constrained to a JSON schema by `response_format`."""
    return [_question(Check.SCHEMA, number, seed + 1_000_000) for number in range(count)]


def _question(check: Check, number: int, seed: int) -> Question:
    language = LANGUAGES[number % len(LANGUAGES)]
    invoice = make_invoice(seed + number, language)
    keys = _ASKED_KEYS[(number // len(LANGUAGES)) % len(_ASKED_KEYS)]
    listed, more, schema = ", ".join(keys), {}, None
    if check is Check.SCHEMA:
        schema = _schema(keys)
        named = {"name": "invoice", "schema": schema, "strict": True}
        more = {"response_format": {"type": "json_schema", "json_schema": named}}
    truth = Truth(TruthKind.JSON, {key: invoice.truth[key] for key in keys}, language, schema)
    body = one_turn(f"{_REQUEST.format(listed)}\n\n{invoice.text}", **more)
    return Question(f"{check.value}/{number:03d}", check, language, body, truth, _MAX_TOKENS)


def _schema(keys: tuple[str, ...]) -> dict[str, Any]:
    properties = {
        key: {"type": "number" if key in ("subtotal", "tax", "total") else "string"}
        if key != "currency"
        else {"type": "string", "enum": sorted({code for codes in _CURRENCIES.values() for code in codes})}
        for key in keys
    }
    return {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
