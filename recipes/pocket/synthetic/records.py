"""Small records as JSON, tables and lines of text: converted, searched, sorted, renamed, counted."""

from collections.abc import Callable
from random import Random
from typing import Any

from recipes.pocket.synthetic.example import Example, answer_json, json_value, text_is
from recipes.pocket.synthetic.words import CITIES, GOODS, LANGUAGES, identifier, number_name, person, pick

__all__ = ["records"]

Row = dict[str, Any]
_FIELDS: dict[str, Callable[[Random, str], Any]] = {
    "id": lambda rng, _: rng.randint(1, 9999),
    "name": person,
    "city": lambda rng, language: rng.choice(CITIES[language]),
    "age": lambda rng, _: rng.randint(18, 90),
    "email": lambda rng, _: f"{identifier(rng)}@{identifier(rng)}.com",
    "active": lambda rng, _: rng.random() < 0.5,
    "score": lambda rng, _: rng.randint(0, 1000) / 10,
    "product": lambda rng, language: rng.choice(GOODS[language]),
    "price": lambda rng, _: rng.randint(1, 50_000) / 100,
    "stock": lambda rng, _: rng.randint(0, 500),
    "code": lambda rng, _: number_name(rng),
    "color": pick,
    "year": lambda rng, _: rng.randint(1950, 2030),
    "tags": lambda rng, language: [pick(rng, language) for _ in range(rng.randint(0, 3))],
}
_SINGLE = [name for name in _FIELDS if name != "tags"]


def records(rng: Random) -> Example:
    return rng.choice((_from_lines, _from_table, _get, _select, _sorted, _renamed, _pretty, _to_table, _count, _list))(
        rng
    )


def _rows(rng: Random, count: int, fields: list[str] | None = None) -> list[Row]:
    language = rng.choice(LANGUAGES)
    fields = fields or rng.sample(_SINGLE, rng.randint(2, 5))
    return [{field: _FIELDS[field](rng, language) for field in fields} for _ in range(count)]


def _json_example(rng: Random, question: str, value: Any, thought: str) -> Example:
    return Example.ask(question, answer_json(value), json_value(value), reasoning=thought if rng.random() < 0.3 else "")


def _from_lines(rng: Random) -> Example:
    [row] = _rows(rng, 1, rng.sample(list(_FIELDS), rng.randint(2, 6)))
    separator = rng.choice((": ", " = ", ": ", " - "))
    shown = {key: ", ".join(value) if isinstance(value, list) else _plain(value) for key, value in row.items()}
    body = rng.choice(("\n", "\n", "; ")).join(f"{key}{separator}{value}" for key, value in shown.items())
    ask = rng.choice(
        ("Write this record as JSON:", "Turn this into a JSON object:", "Írd át JSON-ná:", "Bunu JSON'a çevir:")
    )
    return _json_example(rng, f"{ask}\n{body}", row, f"The keys are {', '.join(row)}.")


def _plain(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _table(rows: list[Row], separator: str) -> str:
    return "\n".join([separator.join(rows[0]), *(separator.join(map(_plain, row.values())) for row in rows)])


def _from_table(rng: Random) -> Example:
    rows = _rows(rng, rng.randint(1, 4))
    ask = rng.choice(
        (
            "Convert this table to a JSON list:",
            "Give the rows as JSON:",
            "Alakítsd JSON listává:",
            "JSON listesine çevir:",
        )
    )
    body = _table(rows, rng.choice((",", ";", " | ", "\t")))
    return _json_example(rng, f"{ask}\n{body}", rows, f"The columns are {', '.join(rows[0])}.")


def _to_table(rng: Random) -> Example:
    rows = _rows(rng, rng.randint(1, 4))
    table = _table(rows, ";")
    ask = rng.choice(
        ("Write this JSON as CSV with semicolons:", "Írd pontosvesszős CSV-be:", "Noktalı virgüllü CSV yap:")
    )
    return Example.ask(f"{ask}\n{answer_json(rows)}", table, text_is(table))


def _get(rng: Random) -> Example:
    rows = _rows(rng, rng.randint(1, 4), ["code", *rng.sample([name for name in _SINGLE if name != "code"], 3)])
    row = rng.choice(rows)
    key = rng.choice([name for name in row if name != "code"])
    ask = rng.choice(
        ("What is the {key} of {code}?", "Give the {key} where code is {code}.", "Mi a {key} értéke itt: {code}?")
    )
    question = f"{answer_json(rows, pretty=rng.random() < 0.3)}\n\n{ask.format(key=key, code=row['code'])}"
    thought = f"The record is {answer_json(row)}." if rng.random() < 0.4 else ""
    # Two records may have the same code by chance; then both answers are right.
    answers = [_plain(other[key]) for other in rows if other["code"] == row["code"]]
    return Example.ask(question, _plain(row[key]), text_is(*answers), reasoning=thought)


def _select(rng: Random) -> Example:
    rows = _rows(rng, rng.randint(2, 5))
    key = rng.choice(list(rows[0]))
    ask = rng.choice(
        (
            "Give only the values of {} as a JSON list.",
            "List every {} as JSON.",
            "Csak a {} értékeket add meg JSON listában.",
        )
    )
    return _json_example(
        rng, f"{answer_json(rows)}\n\n{ask.format(key)}", [row[key] for row in rows], f"There are {len(rows)} records."
    )


def _sorted(rng: Random) -> Example:
    key = rng.choice(("age", "stock", "year", "id"))
    rows = _rows(rng, rng.randint(2, 4), [key, rng.choice(("name", "city", "product", "code"))])
    ordered = sorted(rows, key=lambda row: row[key])
    ask = rng.choice(
        (
            "Sort the records by {}, smallest first.",
            "Rendezd {} szerint növekvő sorrendbe.",
            "{} değerine göre artan sırala.",
        )
    )
    thought = f"The order of {key} is {', '.join(str(row[key]) for row in ordered)}."
    return _json_example(rng, f"{answer_json(rows)}\n\n{ask.format(key)}", ordered, thought)


def _renamed(rng: Random) -> Example:
    [row] = _rows(rng, 1)
    old = rng.choice(list(row))
    new = identifier(rng) if rng.random() < 0.5 else f"{old}_{rng.choice(('value', 'new', 'text', 'field'))}"
    value = {new if key == old else key: item for key, item in row.items()}
    ask = rng.choice(("Rename the key {} to {}.", "Nevezd át a {} kulcsot erre: {}.", "{} anahtarının adını {} yap."))
    return _json_example(rng, f"{answer_json(row)}\n\n{ask.format(old, new)}", value, f"{old} becomes {new}.")


def _pretty(rng: Random) -> Example:
    [row] = _rows(rng, 1, rng.sample(list(_FIELDS), rng.randint(2, 5)))
    ask = rng.choice(
        (
            "Format this JSON with two spaces per level:",
            "Pretty-print this JSON:",
            "Formázd szépen:",
            "Bu JSON'u biçimlendir:",
        )
    )
    return Example.ask(f"{ask}\n{answer_json(row)}", answer_json(row, pretty=True), json_value(row))


def _count(rng: Random) -> Example:
    rows = _rows(rng, rng.randint(1, 6), ["id", rng.choice(("name", "city", "product"))])
    ask = rng.choice(("How many records are there?", "Hány rekord van?", "Kaç kayıt var?"))
    return Example.ask(f"{answer_json(rows)}\n\n{ask}", str(len(rows)), text_is(str(len(rows))))


def _list(rng: Random) -> Example:
    words = [pick(rng, rng.choice(LANGUAGES)) for _ in range(rng.randint(1, 6))]
    ask = rng.choice(("Write these as a JSON list:", "Írd JSON listába:", "JSON listesi yap:"))
    return _json_example(rng, f"{ask} {', '.join(words)}", words, f"There are {len(words)} words.")
