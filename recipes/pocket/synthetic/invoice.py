"""Invoices in three languages and many layouts, to be converted to JSON by a list of keys or a schema."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from recipes.pocket.synthetic.example import Example, answer_json, json_value
from recipes.pocket.synthetic.words import (
    CITIES,
    GOODS,
    LANGUAGES,
    MONTHS,
    ORDINARY_SHARE,
    company,
    identifier,
    made_up,
    number_name,
    person,
)

__all__ = ["LABELS", "InvoiceStyle", "ask_for_fields", "invoice", "invoice_facts", "invoice_style"]


def _labels(english: str, hungarian: str, turkish: str) -> dict[str, list[str]]:
    return {"en": english.split("|"), "hu": hungarian.split("|"), "tr": turkish.split("|")}


LABELS = {
    "title": _labels("INVOICE|Invoice|Tax invoice|Bill", "SZÁMLA|Számla", "FATURA|Fatura"),
    "vendor": _labels("Seller|From|Vendor|Supplier", "Eladó|Szállító|Kibocsátó", "Satıcı|Düzenleyen|Firma"),
    "customer": _labels("Bill to|Customer|Buyer|To", "Vevő|Megrendelő|Címzett", "Alıcı|Müşteri|Sayın"),
    "invoice_number": _labels(
        "Invoice no.|Invoice number|Number|Reference",
        "Számla sorszáma|Számlaszám|Sorszám",
        "Fatura no|Fatura numarası|No",
    ),
    "date": _labels(
        "Date|Issued|Invoice date|Date of issue", "Kelt|Kiállítás dátuma|Dátum", "Tarih|Fatura tarihi|Düzenleme tarihi"
    ),
    "due_date": _labels(
        "Due|Due date|Payable until|Payment due", "Fizetési határidő|Esedékesség|Határidő", "Son ödeme|Vade tarihi|Vade"
    ),
    "subtotal": _labels("Subtotal|Net", "Nettó|Részösszeg", "Ara toplam|Net"),
    "tax": _labels("VAT|Tax", "ÁFA", "KDV"),
    "total": _labels(
        "Total|Amount due|Grand total", "Összesen|Fizetendő|Végösszeg", "Toplam|Genel toplam|Ödenecek tutar"
    ),
    "tax_id": _labels("Tax ID|VAT no.", "Adószám", "Vergi no|VKN"),
    "email": _labels("Email|E-mail", "E-mail", "E-posta"),
}
_CURRENCIES = {"en": ("USD", "EUR", "GBP"), "hu": ("HUF", "EUR"), "tr": ("TRY", "EUR")}
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£", "HUF": "Ft", "TRY": "TL"}
_TAX_PERCENT = {"en": (0, 5, 10, 20), "hu": (5, 18, 27), "tr": (1, 10, 20)}
_ASK = {
    "en": (
        "Extract the following as JSON: {keys}",
        "Extract the {keys} from this invoice. Answer in JSON.",
        "Extract {keys} as JSON.",
        "Read the invoice and give {keys} as a JSON object.",
        "Return JSON with the keys {keys}.",
    ),
    "hu": (
        "Add meg JSON-ként: {keys}.",
        "Olvasd ki a számlából JSON formában ezeket: {keys}.",
        "JSON kulcsok: {keys}.",
    ),
    "tr": (
        "Şunları JSON olarak ver: {keys}.",
        "Faturadan {keys} alanlarını JSON olarak çıkar.",
        "JSON anahtarları: {keys}.",
    ),
}
_ASK_ALL = {
    "en": ("Extract the data of this invoice as JSON.", "Turn this invoice into JSON.", "Read this invoice as JSON."),
    "hu": ("Add meg a számla adatait JSON-ként.", "Alakítsd a számlát JSON-ná."),
    "tr": ("Faturanın verilerini JSON olarak ver.", "Bu faturayı JSON'a çevir."),
}
_ALL_KEYS = ["vendor", "customer", "invoice_number", "date", "currency", "total"]
_ASK_SCHEMA = {
    "en": "Extract the data as JSON that follows this schema:",
    "hu": "Add meg az adatokat JSON-ként e séma szerint:",
    "tr": "Verileri şu şemaya uyan JSON olarak ver:",
}
_THOUGHTS = {
    "en": "The invoice is in {name}. I give {keys}.",
    "hu": "A számla nyelve: {name}. Ezek kellenek: {keys}.",
    "tr": "Faturanın dili: {name}. İstenenler: {keys}.",
}
_NAMES = {
    "en": {"en": "English", "hu": "Hungarian", "tr": "Turkish"},
    "hu": {"en": "angol", "hu": "magyar", "tr": "török"},
    "tr": {"en": "İngilizce", "hu": "Macarca", "tr": "Türkçe"},
}
_DOMAINS = ("com", "hu", "com.tr", "eu")
_SYSTEMS = (
    "You read invoices and answer with JSON only.",
    "Answer with one JSON object and nothing else.",
    "You are a careful data entry clerk.",
)
_SCHEMA_TYPES: dict[str, Any] = {
    "subtotal": {"type": "number"},
    "tax": {"type": "number"},
    "total": {"type": "number"},
    "items": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "description": {"type": "string"},
                "quantity": {"type": "integer"},
                "price": {"type": "number"},
            },
        },
    },
}


@dataclass(frozen=True)
class InvoiceStyle:
    """How an invoice formats dates and amounts."""

    language: str
    currency: str
    write_date: Callable[[date], str]
    sign_first: bool
    code: bool

    def amount(self, cents: int) -> str:
        number = _grouped(cents, self.language, whole=self.currency == "HUF")
        if self.code:
            return f"{number} {self.currency}"
        sign = _SIGNS[self.currency]
        return f"{sign}{number}" if self.sign_first else f"{number} {sign}"


def _grouped(cents: int, language: str, *, whole: bool) -> str:
    """1,234.50 in English, 1 234,50 in Hungarian, 1.234,50 in Turkish."""
    thousands, point = {"en": (",", "."), "hu": (" ", ","), "tr": (".", ",")}[language]
    units = f"{cents // 100:,}".replace(",", thousands)
    return units if whole else f"{units}{point}{cents % 100:02d}"


def invoice_style(rng: Random, language: str) -> InvoiceStyle:
    currency = rng.choice(_CURRENCIES[language])
    months = MONTHS[language]
    ways: dict[str, list[Callable[[date], str]]] = {
        "en": [
            date.isoformat,
            lambda d: f"{d.day} {months[d.month - 1]} {d.year}",
            lambda d: f"{months[d.month - 1]} {d.day}, {d.year}",
        ],
        "hu": [date.isoformat, lambda d: f"{d:%Y. %m. %d.}", lambda d: f"{d.year}. {months[d.month - 1]} {d.day}."],
        "tr": [date.isoformat, lambda d: f"{d:%d.%m.%Y}", lambda d: f"{d.day} {months[d.month - 1]} {d.year}"],
    }
    sign_first = currency in ("USD", "GBP") or (currency == "EUR" and language == "en")
    return InvoiceStyle(language, currency, rng.choice(ways[language]), sign_first, rng.random() < 0.4)


def _number(cents: int, currency: str) -> float | int:
    return cents // 100 if currency == "HUF" or cents % 100 == 0 else cents / 100


def invoice_facts(
    rng: Random, style: InvoiceStyle, ordinary: float
) -> tuple[dict[str, Any], list[tuple[str, int, int]], int]:
    """(the fields as in the JSON, items as (description, quantity, cents each), tax in percent) of an invoice."""
    step = 10_000 if style.currency == "HUF" else rng.choice((1, 50, 100))
    most = 900 if style.currency == "HUF" else 60_000 // step
    items = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        name = rng.choice(GOODS[style.language]) if rng.random() < 0.7 else made_up(rng).capitalize()
        items.append((name, rng.randint(1, 12), rng.randint(1, most) * step))
    percent = rng.choice(_TAX_PERCENT[style.language])
    net = sum(quantity * each for _, quantity, each in items)
    tax = net * percent // 100
    if style.currency == "HUF":
        tax -= tax % 100
    issued = date(2015, 1, 1) + timedelta(days=rng.randrange(365 * 15))
    due = issued + timedelta(days=rng.choice((7, 8, 14, 15, 30, 45, 60)))
    vendor = company(rng, style.language, ordinary)
    facts: dict[str, Any] = {
        "vendor": vendor,
        "customer": person(rng, style.language) if rng.random() < 0.5 else company(rng, style.language, ordinary),
        "invoice_number": number_name(rng),
        "date": issued.isoformat(),
        "due_date": due.isoformat(),
        "currency": style.currency,
        "subtotal": _number(net, style.currency),
        "tax": _number(tax, style.currency),
        "total": _number(net + tax, style.currency),
        "tax_id": "-".join(str(rng.randrange(10**n, 10 ** (n + 1))) for n in rng.choice(((7, 0, 1), (9,), (3, 4)))),
        "email": f"{rng.choice(('info', 'office', identifier(rng)))}@{identifier(rng)}.{rng.choice(_DOMAINS)}",
        "items": [{"description": n, "quantity": q, "price": _number(e, style.currency)} for n, q, e in items],
        "_issued": issued,
        "_due": due,
        "_cents": (net, tax),
    }
    return facts, items, percent


def _lines(
    rng: Random, style: InvoiceStyle, facts: dict[str, Any], items: list[tuple[str, int, int]], percent: int
) -> list[str]:
    """The invoice as text: title, parties and references in random order, items, sums."""
    separator = rng.choice((": ", ": ", " - ", ":\n"))

    def labelled(field: str, text: str) -> str:
        return rng.choice(LABELS[field][style.language]) + separator + text

    net, tax = facts["_cents"]
    city = rng.choice(CITIES[style.language])
    head = [
        labelled("vendor", facts["vendor"]),
        labelled("customer", facts["customer"]),
        labelled("invoice_number", facts["invoice_number"]),
        labelled("date", style.write_date(facts["_issued"])),
        labelled("due_date", style.write_date(facts["_due"])),
        labelled("tax_id", facts["tax_id"]),
        labelled("email", facts["email"]),
    ]
    rng.shuffle(head)
    if rng.random() < 0.5:
        head.insert(rng.randrange(len(head)), f"{city}, {rng.randint(1, 99)}")
    sums = [
        labelled("subtotal", style.amount(net)),
        rng.choice(LABELS["tax"][style.language]) + f" ({percent}%)" + separator + style.amount(tax),
        labelled("total", style.amount(net + tax)),
    ]
    title = rng.choice(LABELS["title"][style.language])
    return [title, *head, "", *_item_lines(rng, style, items), "", *sums]


def _item_lines(rng: Random, style: InvoiceStyle, items: list[tuple[str, int, int]]) -> list[str]:
    layout = rng.choice(
        (
            "{n} | {q} | {e} | {s}",
            "{q} x {n} @ {e} = {s}",
            "- {n}, {q} × {e}",
            "{n}\t{q}\t{e}\t{s}",
            "{i}. {n}: {q} x {e}",
        )
    )
    return [
        layout.format(i=index + 1, n=name, q=quantity, e=style.amount(each), s=style.amount(quantity * each))
        for index, (name, quantity, each) in enumerate(items)
    ]


def _keys(rng: Random) -> list[str]:
    keys = ["vendor", "invoice_number", "date", "total"]
    others = ["customer", "due_date", "currency", "subtotal", "tax", "tax_id", "email", "items"]
    if rng.random() < 0.75:
        keys = rng.sample([*keys, *others], rng.randint(1, 8))
    else:
        keys += rng.sample(others, rng.randint(0, 3))
    return keys


def ask_for_fields(rng: Random, language: str) -> tuple[list[str], str, str]:
    """(the keys, the request for them, its language) for an invoice in `language`."""
    keys = _keys(rng)
    asked_in = language if rng.random() < 0.6 else "en"
    way = rng.random()
    if way < 0.1:
        return _ALL_KEYS, rng.choice(_ASK_ALL[asked_in]), asked_in
    if way < 0.3:
        schema = {"type": "object", "properties": {key: _SCHEMA_TYPES.get(key, {"type": "string"}) for key in keys}}
        return keys, f"{_ASK_SCHEMA[asked_in]}\n{answer_json(schema)}", asked_in
    return keys, rng.choice(_ASK[asked_in]).format(keys=", ".join(keys)), asked_in


def invoice(rng: Random, ordinary: float = ORDINARY_SHARE) -> Example:
    """An invoice and a list of keys or a schema; the answer holds exactly these keys, in this order.

    `ordinary` is the share of companies named by ordinary words.
    """
    language = rng.choice(LANGUAGES)
    style = invoice_style(rng, language)
    facts, items, percent = invoice_facts(rng, style, ordinary)
    text = "\n".join(_lines(rng, style, facts, items, percent))
    keys, request, asked_in = ask_for_fields(rng, language)
    question = f"{request}\n\n{text}" if rng.random() < 0.7 else f"{text}\n\n{request}"
    value = {key: facts[key] for key in keys}
    thought = _THOUGHTS[asked_in].format(name=_NAMES[asked_in][language], keys=", ".join(keys))
    return Example.ask(
        question,
        answer_json(value),
        json_value(value),
        reasoning=thought if rng.random() < 0.4 else "",
        system=rng.choice(_SYSTEMS) if rng.random() < 0.3 else None,
    )
