"""Texts, code and JSON to be copied, or copied with one change: answers that repeat long parts of their question."""

import json
import re
from random import Random

from recipes.pocket.synthetic.code import code
from recipes.pocket.synthetic.example import Example, answer_json, json_value, text_is
from recipes.pocket.synthetic.filler import passage
from recipes.pocket.synthetic.invoice import invoice_facts, invoice_style
from recipes.pocket.synthetic.words import LANGUAGES, identifier, pick

__all__ = ["editing"]

_ASKS = {
    "copy": ("Copy this text exactly:", "Repeat this word for word:", "Másold le pontosan:", "Bunu aynen yaz:"),
    "replace": (
        "Replace {old} by {new} in this text:",
        "Write this text again with {new} instead of {old}:",
        "Cseréld ki ezt: {old}, erre: {new}, a szövegben:",
        "Metinde {old} yerine {new} yaz:",
    ),
    "rename": ("Rename {old} to {new} in this code:", "Rename the variable {old} to {new}:"),
    "set": ("Set {old} to {new} in this JSON:", "Change {old} to {new}:", "Állítsd be: {old} = {new}."),
    "delete": (
        "Delete line {old}:",
        "Remove line {old} of this text:",
        "Töröld a(z) {old}. sort:",
        "{old}. satırı sil:",
    ),
}


def editing(rng: Random) -> Example:
    return rng.choice((_copied, _copied, _replaced, _renamed, _set, _deleted))(rng)


def _text(rng: Random) -> str:
    """40 to 600 characters on one line."""
    text = " ".join(passage(rng, rng.randint(60, 700)).split())[: rng.randint(40, 600)]
    return text.strip() or pick(rng, "en")


def _asked(rng: Random, way: str, body: str, answer: str, old: str = "", new: str = "") -> Example:
    question = f"{rng.choice(_ASKS[way]).format(old=old, new=new)}\n\n{body}"
    return Example.ask(question, answer, text_is(answer), _thought(rng, old, new))


def _thought(rng: Random, old: str, new: str) -> str:
    """What changes, in a fifth of the examples."""
    if rng.random() >= 0.2:
        return ""
    return f"{old} becomes {new}." if new else f"Line {old} goes." if old else "Nothing changes."


def _copied(rng: Random) -> Example:
    text = _text(rng)
    return _asked(rng, "copy", text, text)


def _replaced(rng: Random) -> Example:
    text = _text(rng)
    words = sorted(set(re.findall(r"\w{3,}", text))) or [text]
    old, new = rng.choice(words), pick(rng, rng.choice(LANGUAGES))
    return _asked(rng, "replace", text, re.sub(rf"\b{re.escape(old)}\b", lambda _: new, text), old, new)


def _renamed(rng: Random) -> Example:
    """A name of a generated function, everywhere in it."""
    source = code(rng).answer.rpartition("</think>\n\n")[2]
    names = sorted(set(re.findall(r"\b[a-z_]{3,}\b", source)))
    old, new = rng.choice(names or ["x"]), identifier(rng)
    return _asked(rng, "rename", source, re.sub(rf"\b{re.escape(old)}\b", new, source), old, new)


def _set(rng: Random) -> Example:
    """One field of a JSON object."""
    facts, _, _ = invoice_facts(rng, invoice_style(rng, rng.choice(LANGUAGES)), 0.5)
    kept = rng.sample([key for key in facts if not key.startswith("_") and key != "items"], rng.randint(3, 8))
    value = {key: facts[key] for key in kept}
    changed = rng.choice(kept)
    new = rng.randint(1, 9999) if isinstance(value[changed], int | float) else pick(rng, rng.choice(LANGUAGES))
    pretty = rng.random() < 0.5
    after = {**value, changed: new}
    question = rng.choice(_ASKS["set"]).format(old=changed, new=json.dumps(new, ensure_ascii=False))
    body = answer_json(value, pretty=pretty)
    thought = _thought(rng, changed, str(new))
    return Example.ask(f"{question}\n\n{body}", answer_json(after, pretty=pretty), json_value(after), thought)


def _deleted(rng: Random) -> Example:
    lines = [_text(rng)[:80].strip() or "-" for _ in range(rng.randint(3, 6))]
    place = rng.randrange(len(lines))
    answer = "\n".join(lines[:place] + lines[place + 1 :]).strip()
    return _asked(rng, "delete", "\n".join(lines), answer, str(place + 1))
