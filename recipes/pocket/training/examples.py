"""Generated examples as training reads them: which workloads, how often, and as token ids."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import MismatchError
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.workloads import WORKLOADS, render
from recipes.pocket.training.feed import Rendered, Work

__all__ = ["SHARES", "end_token", "example_work"]

SHARES: dict[str, float] = {
    "invoice": 3.0,
    "tools": 2.0,
    "records": 1.5,
    "arithmetic": 2.0,
    "retrieval": 1.5,
    "chat": 2.0,
    "text": 1.0,
    "code": 1.5,
}
"""How often each workload is drawn, beside the others."""


def end_token(model: Path = MODEL_DIRECTORY) -> int:
    """The id of <|endoftext|>, the first of the special tokens."""
    token_id, *rest = Tokenizer.load(model).encode("<|endoftext|>")
    if rest:
        raise MismatchError(f"The tokenizer in {model} has no <|endoftext|>: make it with `recipes.pocket.prepare`.")
    return token_id


def example_work(data: Path, kind_of: dict[str, int], model: Path = MODEL_DIRECTORY) -> Work:
    """What the workers that make examples do, with the tokenizer in `model` and running text from `data`."""
    return Work(lambda: _draw_with(data, model), end_token(model), kind_of)


def _draw_with(data: Path, model: Path) -> Callable[[Random], Rendered]:
    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    use_documents(data, tokenizer)
    names, shares = list(SHARES), list(SHARES.values())

    def draw(random: Random) -> Rendered:
        name = random.choices(names, shares)[0]
        ids, answer_start = render(WORKLOADS[name](random), tokenizer, template)
        return Rendered(ids, answer_start, name)

    return draw
