"""The pocket model's tokenizer: byte-level BPE of 8,192 tokens, with the family's control tokens and chat template.

Text is cut as Qwen's tokenizers cut it, with one digit per token: numbers of any length are then copied and added digit
by digit. The control tokens, names, order and template are those of the family (`model/random_text.py` has them once).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from onebox.model.random_text import text_files

__all__ = ["NUM_TOKENS", "balanced", "train_tokenizer", "write_text_files"]

NUM_TOKENS = 8192
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: Iterable[str], num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """A tokenizer of `num_tokens` ids, the control tokens being the last ones."""
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


def balanced(documents: Mapping[str, list[str]], characters: int) -> list[str]:
    """The same number of characters of every group; a group that has fewer is repeated until it has them."""
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
