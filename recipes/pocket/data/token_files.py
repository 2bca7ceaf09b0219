"""Documents to token files: one for training and one held out per source, and an index of them."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from onebox.spec.errors import DoesNotFitError
from recipes.pocket.data.sources import Source

__all__ = ["INDEX", "MOST_BYTES", "pack", "read_documents", "split"]

MOST_BYTES = 55_000_000  # what travels to the training machine
INDEX = "index.json"
_HELD_OUT_OF = 50


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, held out) documents of a source: one in 50 is held out, by its text, and at least one."""
    held_out = [document for document in documents if _is_held_out(document)] or documents[:1]
    kept_back = set(held_out)
    return [document for document in documents if document not in kept_back], held_out


def _is_held_out(document: str) -> bool:
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_OF == 0


def pack(
    documents: Mapping[str, list[str]], sources: Iterable[Source], tokenizer: Tokenizer, directory: Path
) -> dict[str, dict[str, Any]]:
    """Writes tokens/<source>.bin and tokens/heldout-<source>.bin (uint16 ids) and the index; returns the index.

    The files of an earlier run stay until all new ones are written.
    """
    tokens = directory / "tokens.partial"
    shutil.rmtree(tokens, ignore_errors=True)
    tokens.mkdir(parents=True)
    index: dict[str, dict[str, Any]] = {}
    for source in sources:
        training, held_out = split(documents[source.name])
        index[source.name] = {
            "tokens": _write(training, tokenizer, tokens / f"{source.name}.bin"),
            "heldout_tokens": _write(held_out, tokenizer, tokens / f"heldout-{source.name}.bin"),
            "language": source.language,
            "licence": source.licence,
        }
    num_bytes = sum(path.stat().st_size for path in tokens.glob("*.bin"))
    if num_bytes > MOST_BYTES:
        raise DoesNotFitError(
            f"The token files hold {num_bytes:,} bytes and at most {MOST_BYTES:,} may travel: "
            "lower most_characters of a source."
        )
    shutil.rmtree(directory / "tokens", ignore_errors=True)
    tokens.rename(directory / "tokens")
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return index


def _write(documents: list[str], tokenizer: Tokenizer, path: Path) -> int:
    """Ids of documents one after the other, each ended by <|endoftext|>; returns how many."""
    end = tokenizer.token_to_id("<|endoftext|>")
    count = 0
    with path.open("wb") as file:
        for first in range(0, len(documents), 256):  # a batch is encoded by all cores
            for encoding in tokenizer.encode_batch(documents[first : first + 256], add_special_tokens=False):
                ids = np.array([*encoding.ids, end], dtype=np.uint16)
                ids.tofile(file)
                count += len(ids)
    return count


def read_documents(path: Path, end_token_id: int) -> list[np.ndarray[Any, np.dtype[np.uint16]]]:
    """The ids of each document of a token file, without its end token."""
    ids = np.fromfile(path, dtype=np.uint16)
    ends = np.flatnonzero(ids == end_token_id)
    return [ids[start:stop] for start, stop in zip([0, *(ends[:-1] + 1)], ends, strict=True)] if len(ends) else []
