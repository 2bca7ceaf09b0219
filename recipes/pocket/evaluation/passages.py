"""Held-out tokens that a model is asked to predict: real text where it was collected, and generated examples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from onebox.spec.model import read_json
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.data.token_files import read_documents
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, render

__all__ = ["Passage", "example_passages", "text_passages"]

_FEWEST_TOKENS = 32
"""A shorter document says little of how well text is predicted."""


@dataclass(frozen=True)
class Passage:
    """Tokens of which those from `start` on (never the first) are to be predicted; `name` is what they count under."""

    name: str
    token_ids: tuple[int, ...]
    start: int


def text_passages(data: Path, tokenizer: Tokenizer, count: int, max_tokens: int) -> Iterator[Passage]:
    """The beginnings of up to `count` held-out documents of each source; none where no text was collected."""
    if not (data / "index.json").exists():
        return
    (end_token,) = tokenizer.encode("<|endoftext|>")
    for source in read_json(data / "index.json"):
        documents = read_documents(data / "tokens" / f"heldout-{source}.bin", end_token)
        long_enough = [document for document in documents if len(document) >= _FEWEST_TOKENS]
        for document in Random(0).sample(long_enough, min(count, len(long_enough))):  # noqa: S311
            yield Passage(source, tuple(map(int, document[:max_tokens])), 1)


def example_passages(tokenizer: Tokenizer, template: ChatTemplate, count: int, max_tokens: int) -> Iterator[Passage]:
    """`count` held-out examples of each workload, of which the answers are to be predicted; long ones are left out."""
    for name, generate in MEASURED.items():
        for number in range(count):
            ids, start = render(generate(Random(HELD_OUT_SEED + number)), tokenizer, template)  # noqa: S311
            if len(ids) <= max_tokens:
                yield Passage(name, tuple(ids), start)
