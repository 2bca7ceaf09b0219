"""The tokenizer (byte-level BPE of 8,192 tokens), and documents as files of token ids.

Text is split as Qwen's tokenizers split it, but with one token per digit, so that numbers of any length can be copied
and added digit by digit. The control tokens, their order and the chat template are those of the model family
(`onebox/model/random_text.py` defines them). Each source has a token file for training and one of held-out documents.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from onebox.model.random_text import text_files
from onebox.spec.errors import DoesNotFitError, MismatchError
from recipes.pocket.data.sources import TextSource

__all__ = [
    "INDEX",
    "MAX_BYTES",
    "NUM_TOKENS",
    "TOKENIZER_MARK",
    "balance_groups",
    "check_token_files",
    "mark_token_files",
    "read_documents",
    "split_held_out",
    "train_tokenizer",
    "write_text_files",
    "write_token_files",
]

NUM_TOKENS = 8192
MAX_BYTES = 55_000_000
"""Of all token files together: they are copied to the training machine."""
INDEX = "index.json"
TOKENIZER_MARK = "tokenizer.sha256"
"""Says, beside the index, which tokenizer made the token files."""
_HELD_OUT_OF = 50
_ENCODE_BATCH = 256
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: Iterable[str], num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """A tokenizer of `num_tokens` ids; the control tokens have the last ids."""
    family = json.loads(text_files()["tokenizer.json"])["added_tokens"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(family),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    for token in family:
        tokenizer.add_tokens([AddedToken(token["content"], special=token["special"], normalized=False)])
    return tokenizer


def balance_groups(documents: Mapping[str, list[str]], characters: int) -> list[str]:
    """About `characters` characters of every group; a group with fewer is repeated."""
    chosen: list[str] = []
    for group in documents.values():
        taken = 0
        while group and taken < characters:
            for document in group:
                if taken >= characters:
                    break
                chosen.append(document)
                taken += len(document)
    return chosen


def write_text_files(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of the pocket model."""
    directory.mkdir(parents=True, exist_ok=True)
    files = text_files()
    generation = json.loads(files["generation_config.json"])
    end, message_end = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    generation |= {"bos_token_id": end, "eos_token_id": [message_end, end], "pad_token_id": end}
    files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    files["tokenizer.json"] = tokenizer.to_str(pretty=False) + "\n"
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def split_held_out(documents: list[str]) -> tuple[list[str], list[str]]:
    """(training, held out) documents of a source: by a hash of its text one in 50 is held out, and at least one."""
    held_out = [document for document in documents if _is_held_out(document)] or documents[:1]
    excluded = set(held_out)
    return [document for document in documents if document not in excluded], held_out


def _is_held_out(document: str) -> bool:
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_OF == 0


def write_token_files(
    documents: Mapping[str, list[str]], sources: Iterable[TextSource], tokenizer: Tokenizer, directory: Path
) -> dict[str, dict[str, Any]]:
    """Writes tokens/<source>.bin and tokens/heldout-<source>.bin (uint16 ids) and the index; returns the index.

    The files of an earlier run are replaced after all new ones are written.
    """
    tokens = directory / "tokens.partial"
    shutil.rmtree(tokens, ignore_errors=True)
    tokens.mkdir(parents=True)
    index: dict[str, dict[str, Any]] = {}
    for source in sources:
        training, held_out = split_held_out(documents[source.name])
        index[source.name] = {
            "tokens": _write(training, tokenizer, tokens / f"{source.name}.bin"),
            "heldout_tokens": _write(held_out, tokenizer, tokens / f"heldout-{source.name}.bin"),
            "language": source.language,
            "licence": source.licence,
        }
    num_bytes = sum(path.stat().st_size for path in tokens.glob("*.bin"))
    if num_bytes > MAX_BYTES:
        raise DoesNotFitError(
            f"The token files have {num_bytes:,} bytes and the limit is {MAX_BYTES:,}: "
            "lower max_characters of a source."
        )
    shutil.rmtree(directory / "tokens", ignore_errors=True)
    tokens.rename(directory / "tokens")
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    mark_token_files(directory, tokenizer)
    return index


def mark_token_files(directory: Path, tokenizer: Tokenizer) -> None:
    (directory / TOKENIZER_MARK).write_text(_fingerprint(tokenizer) + "\n", encoding="utf-8")


def check_token_files(directory: Path, model: Path) -> None:
    """Refuses token files that another tokenizer made: under this one their ids would be other words."""
    mark = directory / TOKENIZER_MARK
    made_by = mark.read_text(encoding="utf-8").strip() if mark.exists() else None
    if made_by != _fingerprint(Tokenizer.from_file(str(model / "tokenizer.json"))):
        raise MismatchError(
            f"The token files in {directory} were not made with the tokenizer in {model}: make them again with "
            f"`python -m recipes.pocket.prepare --tokenizer {model} --output {directory}`."
        )


def _fingerprint(tokenizer: Tokenizer) -> str:
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _write(documents: list[str], tokenizer: Tokenizer, path: Path) -> int:
    """Writes the ids of all documents, each followed by <|endoftext|>; returns the number of ids."""
    end = tokenizer.token_to_id("<|endoftext|>")
    count = 0
    with path.open("wb") as file:
        for first in range(0, len(documents), _ENCODE_BATCH):  # a batch is encoded by all cores
            batch = documents[first : first + _ENCODE_BATCH]
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                ids = np.array([*encoding.ids, end], dtype=np.uint16)
                ids.tofile(file)
                count += len(ids)
    return count


def read_documents(path: Path, end_token_id: int) -> list[NDArray[np.uint16]]:
    """The ids of each document of a token file, without its end token."""
    ids = np.fromfile(path, dtype=np.uint16)
    ends = np.flatnonzero(ids == end_token_id)
    return [ids[start:stop] for start, stop in zip([0, *(ends[:-1] + 1)], ends, strict=True)] if len(ends) else []
