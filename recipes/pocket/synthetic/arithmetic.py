"""Sums, differences and products of small numbers, with or without intermediate steps."""

from random import Random

from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.words import LANGUAGES

__all__ = ["arithmetic"]

_ASK = {
    "en": ("What is {}?", "Calculate {}.", "{} = ?", "How much is {}?", "Please compute {}."),
    "hu": ("Mennyi {}?", "Számold ki: {}", "{} = ?", "Mennyi az eredmény: {}?"),
    "tr": ("{} kaç eder?", "Hesapla: {}", "{} = ?", "{} işleminin sonucu nedir?"),
}


def arithmetic(rng: Random) -> Example:
    language = rng.choice(LANGUAGES)
    sign = rng.choice("++--**")
    if sign == "*":
        a, b = rng.randint(0, rng.choice((9, 12, 99))), rng.randint(0, 12)
    else:
        most = rng.choice((9, 99, 99, 999, 999, 9999))
        a, b = rng.randint(0, most), rng.randint(0, most)
        if sign == "-" and a < b:
            a, b = b, a
    shown = {"+": "+", "-": "-", "*": rng.choice("*×")}[sign]
    space = rng.choice(("", " ", " "))
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    steps = {"+": _added, "-": _subtracted, "*": _multiplied}[sign](a, b) if rng.random() < 0.5 else ""
    question = rng.choice(_ASK[language]).format(f"{a}{space}{shown}{space}{b}")
    return Example.ask(question, str(result), text_is(str(result)), reasoning=steps)


def _added(a: int, b: int) -> str:
    """Digit by digit from the right, with carries."""
    width = max(len(str(a)), len(str(b)))
    lines, carry = [], 0
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}: {total % 10}, {total // 10}")
        carry = total // 10
    return "\n".join([*lines, f"{a} + {b} = {a + b}"])


def _subtracted(a: int, b: int) -> str:
    """Digit by digit from the right, with borrows; a >= b."""
    lines, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        left = x - y - borrow
        owed = int(left < 0)
        lines.append(f"{x} - {y} - {borrow} = {left}: {left + 10 * owed}, {owed}")
        borrow = owed
    return "\n".join([*lines, f"{a} - {b} = {a - b}"])


def _multiplied(a: int, b: int) -> str:
    """Tens and ones separately."""
    tens, ones = a // 10 * 10, a % 10
    return f"{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n{tens * b} + {ones * b} = {a * b}"
