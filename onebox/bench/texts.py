"""Texts of the workloads: questions in three languages, an invoice, contracts of any length, tools.

Written for this project. Padding text is an infinite sequence of words, so that a prompt can have any length.
Independent of sizes, servers and settings.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

__all__ = [
    "AGENT_RESULTS",
    "AGENT_TASK",
    "ASIDE",
    "INVOICE",
    "KEY_CODE",
    "KEY_SENTENCE",
    "QUESTIONS",
    "TOOLS",
    "agent_result",
    "contract_words",
    "prose_words",
]

ASIDE = (
    "Write plainly and to the point. Give exact figures where there are any, say so where there are none, and keep to "
    "what was asked. Do not repeat the question."
)
"""Pads the system message of a short prompt; repeated as needed."""

QUESTIONS = {
    "qa": "What makes the sky look blue at noon and red in the evening?",
    "code": "Write a Python class for a least-recently-used cache with get and put in constant time, with type hints.",
    "json": (
        "Make up twelve employees of a small bookshop. Answer with a JSON array alone; each object has the keys id, "
        "name, role, email, hired (YYYY-MM-DD), salary and languages."
    ),
    "math": "A tank holds 840 litres and loses 7 litres an hour. After how many hours is it two thirds full?",
    "longcode": (
        "Write a complete command-line to-do list in Python: adding, listing, finishing, deleting, due dates, tags, "
        "search, storage in SQLite, and unit tests for every command. Show the whole program."
    ),
    "docai-qa": "Mi a különbség a korlátolt felelősségű társaság és a zártkörű részvénytársaság között?",
    "docai-code": "Write a binary search over a sorted list in Python, with a docstring and three examples.",
    "docai-kie": (
        "Olvasd ki a számla adatait, és válaszolj kizárólag egy JSON-objektummal, amelynek kulcsai: szamlaszam, kelt, "
        "hatarido, elado, vevo, adoszam, tetelek (nev, mennyiseg, egysegar), netto, afa, brutto."
    ),
    "docai-hungarian": (
        "Írj körülbelül kétszáz szavas összefoglalót arról, hogyan változott a magyar vasúti közlekedés az elmúlt "
        "ötven évben."
    ),
    "rag": (
        "Mi a raktárkulcs átadásának kódja, és ki a szerződések szerint a kapcsolattartó? Foglald össze röviden a "
        "felmondás feltételeit is, magyarul."
    ),
    "think": (
        "Three friends share 43 apples so that each has an odd number and no two have the same. The largest share is "
        "twice the smallest plus one. How many has each? Show that there is no other way."
    ),
    "text": "Describe a working day of a lighthouse keeper a hundred years ago, from waking to lighting the lamp.",
    "turkish": (
        "Türkiye'nin en kalabalık beş ilini yaklaşık nüfuslarıyla birlikte yaz ve bu şehirlerde yaşamanın güçlüklerini "
        "kısaca açıkla."
    ),
    "vision": "Read the document in the picture and write down every line of it, exactly as it stands.",
    "tools": "What will the weather be like in Szeged tomorrow, and is there a train from Budapest before nine?",
}

INVOICE = """\
SZÁMLA  Sorszám: 2026/00418
Eladó: Őrségi Faipari Kft., 9941 Őriszentpéter, Városszer 12.  Adószám: 23456781-2-18
Vevő: Tűzliliom Könyvesbolt Bt., 6720 Szeged, Kárász utca 7.
Kelt: 2026. március 4.  Fizetési határidő: 2026. március 18.
Könyvespolc, tölgy   6 db   42 500 Ft
Létra, bükk          2 db   18 900 Ft
Kiszállítás          1 alkalom   9 200 Ft
Nettó: 302 000 Ft  ÁFA 27%: 81 540 Ft  Bruttó: 383 540 Ft"""

KEY_CODE = "58214"
KEY_SENTENCE = f"A raktárkulcs átadásának kódja: {KEY_CODE}; őrzője Nádasdy Ilona, aki egyben a kapcsolattartó."

_FIRMS = (
    "Bükkalja Logisztika Zrt.",
    "Csörsz-árok Építő Kft.",
    "Őszirózsa Nyomda Bt.",
    "Tiszavirág Élelmiszer Kft.",
    "Gömör Gépgyár Zrt.",
    "Kőszegi Üvegipari Kft.",
)
_TOWNS = ("Győr, Árpád út", "Pécs, Zsolnay utca", "Kecskemét, Kőrösi út", "Nyíregyháza, Szőlő utca", "Eger, Érsek utca")
_CLAUSES = (
    "{firm} és {other} {year}. {month} {day}-án keretszerződést kötött irodaszerek és csomagolóanyagok szállítására.",
    "Havi díj: {amount} forint, amely az általános forgalmi adót nem tartalmazza.",
    "Fizetési határidő: a számla kézhezvételétől számított {days} nap.",
    "Késedelem esetén a megrendelő a jegybanki alapkamattal megegyező mértékű késedelmi kamatot köteles fizetni.",
    "Teljesítés helye: {town} {day}., a megrendelő telephelye, munkanapokon hét és tizenöt óra között.",
    "Felmondási idő: {days} nap, kizárólag írásban, tértivevényes levélben.",
    "A felek vitáikat elsősorban tárgyalás útján rendezik; ennek eredménytelensége esetén a bíróság dönt.",
    "A szállító szavatolja, hogy az áru megfelel az érvényes szabványoknak és rejtett hibától mentes.",
    "Melléklet: átadás-átvételi jegyzőkönyv, amelyet mindkét fél képviselője aláírt.",
    "Módosítás: a rendelt mennyiség {days} raklapról {more} raklapra nő, az egységár változatlan marad.",
    "Az árváltozást a szállító legalább {days} nappal korábban köteles írásban bejelenteni.",
    "Vis maior esetén a teljesítés határideje az akadály fennállásának idejével meghosszabbodik.",
)
_MONTHS = ("január", "február", "április", "május", "június", "szeptember", "október", "november")


def contract_words(seed: int = 0) -> Iterator[str]:
    """Infinite clauses of Hungarian contracts, word by word; deterministic for a seed."""
    draw = random.Random(seed)  # noqa: S311 - text, not secrets
    for number in itertools.count(1):
        yield from f"\n{number}. pont.".split(" ")
        for clause in draw.sample(_CLAUSES, 4):
            firm, other = draw.sample(_FIRMS, 2)
            yield from clause.format(
                firm=firm,
                other=other,
                town=draw.choice(_TOWNS),
                month=draw.choice(_MONTHS),
                year=draw.randint(2015, 2026),
                day=draw.randint(2, 28),
                days=draw.choice((8, 15, 30, 45, 60)),
                more=draw.randint(61, 120),
                amount=f"{draw.randint(120, 990)} {draw.randint(0, 999):03d}",
            ).split()


_SUBJECTS = ("The harbour master", "A young surveyor", "The printer's widow", "Our neighbour", "The night guard")
_VERBS = ("wrote down", "counted", "carried home", "sold", "repaired", "forgot", "sketched", "described")
_OBJECTS = ("the broken lanterns", "seven crates of paper", "an old map", "every passing ship", "the ledger of debts")
_PLACES = ("before the rain came", "behind the market hall", "on the last day of autumn", "while the bells rang")


def prose_words(seed: int = 0) -> Iterator[str]:
    """Infinite plain English sentences, word by word; deterministic for a seed."""
    draw = random.Random(seed)  # noqa: S311 - text, not secrets
    while True:
        parts = (draw.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES))
        yield from f"{' '.join(parts)}.".split()


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("get_weather", "The weather forecast of a place for a day.", place="City", day="Date, or today, tomorrow"),
    _tool("find_train", "Trains between two stations.", start="From", end="To", before="Latest departure, HH:MM"),
    _tool("run_command", "Runs a shell command in the project and gives its output.", command="The command line"),
)

AGENT_TASK = (
    "You are working in a Python project. One test fails. Find out why, step by step: say in two sentences what you "
    "learned from the last output and which command you would run next."
)
AGENT_RESULTS = (
    "tests/test_orders.py::test_total_with_discount FAILED: assert 1799 == 1800",
    "orders.py line 42: return int(price * quantity * (1 - discount))",
    "git log: 'use float prices' by K. Erdős, two days ago; 3 files changed",
    "python -c 'print(20 * 100 * (1 - 0.1))' prints 1800.0, with 0.1 from JSON it prints 1799.9999999999998",
    "mypy: Success: no issues found in 17 source files",
    "pip list: decimal-helpers 0.3.1, pytest 9.0.2, sqlalchemy 2.1.4",
)


def agent_result(turn: int, words: int) -> str:
    """A tool result of one turn: one relevant line and a log of about this many words."""
    log = " ".join(itertools.islice(prose_words(turn + 1), words))
    return f"Output of the command:\n{AGENT_RESULTS[turn % len(AGENT_RESULTS)]}\n{log}"
