"""What a family is for: the parts of its fingerprint in clear, in its about.json."""

import json
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from onebox.store.chunk import VERSION
from onebox.store.files import read_json_object, write_json_object
from onebox.store.keys import KEY_BYTES

__all__ = ["fingerprint_of", "read_about", "read_rates", "write_about", "write_rates"]

ABOUT = "about.json"
RATES = "rates.json"


def fingerprint_of(parts: Mapping[str, str]) -> str:
    """The name of the family (40 hexadecimal digits): a digest of all that decides its bits and of the file format."""
    text = json.dumps({"format": VERSION, "parts": dict(parts)}, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


def read_about(family: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(parts, label) of a family; both empty where its about.json is not what its name is the digest of."""
    found = read_json_object(family / ABOUT)
    parts, label = _strings(found.get("parts")), _strings(found.get("label"))
    return (parts, label) if fingerprint_of(parts) == family.name else ({}, {})


def write_about(family: Path, parts: Mapping[str, str], label: Mapping[str, str]) -> None:
    """Says what a family is for, unless it is said already. Raises OSError."""
    if read_about(family) != (dict(parts), dict(label)):
        value = {"parts": dict(parts), "label": dict(label), "written": time.time()}
        write_json_object(family / ABOUT, value, family / "tmp")


def read_rates(family: Path) -> dict[str, float]:
    """The figures of `write_rates`; positive and finite."""
    found = read_json_object(family / RATES).items()
    return {name: float(value) for name, value in found if _is_number(value) and 0 < value < 1e18}


def write_rates(family: Path, rates: Mapping[str, float]) -> None:
    """Keeps figures that an engine measured. Raises OSError."""
    write_json_object(family / RATES, dict(rates), family / "tmp")


def _strings(value: Any) -> dict[str, str]:
    items = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in items if isinstance(text, str)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
