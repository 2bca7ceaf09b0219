"""All generators of examples by name, how often training draws each, and examples as token ids.

Training uses seeds from 0 on, `WORKLOADS[name](Random(seed))`. Evaluation uses seeds from HELD_OUT_SEED on,
`MEASURED[name](Random(seed))`: the workloads as they were when the shipped model was trained.
"""

from dataclasses import replace
from functools import partial
from random import Random

from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.arithmetic import arithmetic
from recipes.pocket.synthetic.chat import chat
from recipes.pocket.synthetic.code import code
from recipes.pocket.synthetic.editing import editing
from recipes.pocket.synthetic.example import Example, Generator
from recipes.pocket.synthetic.invoice import invoice
from recipes.pocket.synthetic.recall import key_retrieval
from recipes.pocket.synthetic.records import records
from recipes.pocket.synthetic.text import text_tasks
from recipes.pocket.synthetic.tools import tool_calls
from recipes.pocket.synthetic.unknown import unknown

__all__ = ["HELD_OUT_SEED", "MEASURED", "SHARES", "WORKLOADS", "prompt_text", "render"]

HELD_OUT_SEED = 10**9
_MESSAGE_END = "<|im_end|>"

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are the pocket model of onebox.",
    "Answer briefly.",
    "Segítőkész asszisztens vagy.",
    "Yardımsever bir asistansın.",
)


def _in_conversation(generator: Generator) -> Generator:
    """The generator's examples, some of them with a system message or after an earlier question."""

    def generate(rng: Random) -> Example:
        example = generator(rng)
        messages = example.messages
        if messages[0]["role"] == "system":
            return example
        if rng.random() < 0.12:
            earlier = rng.choice((chat, arithmetic, records))(rng)
            answer = earlier.answer.rpartition("</think>\n\n")[2]
            messages = [*earlier.messages, {"role": "assistant", "content": answer}, *messages]
        if rng.random() < 0.15:
            messages = [{"role": "system", "content": rng.choice(_SYSTEMS)}, *messages]
        return replace(example, messages=messages)

    return generate


_GENERATORS: dict[str, Generator] = {
    "invoice": invoice,
    "tools": tool_calls,
    "records": records,
    "arithmetic": arithmetic,
    "retrieval": key_retrieval,
    "chat": chat,
    "text": text_tasks,
    "code": code,
    "editing": editing,
    "unknown": unknown,
}
WORKLOADS: dict[str, Generator] = {name: _in_conversation(generator) for name, generator in _GENERATORS.items()}
"""The generators for training."""
SHARES: dict[str, float] = {
    "invoice": 3.5,
    "tools": 2.0,
    "records": 1.5,
    "arithmetic": 2.0,
    "retrieval": 1.5,
    "chat": 2.0,
    "text": 1.0,
    "code": 1.5,
    "editing": 2.0,
    "unknown": 1.0,
}
"""Relative frequency of each workload in training."""
MEASURED: dict[str, Generator] = {
    "invoice": _in_conversation(partial(invoice, ordinary=0.0)),
    "invoice, ordinary names": _in_conversation(partial(invoice, ordinary=1.0)),
    **{name: generator for name, generator in WORKLOADS.items() if name != "invoice"},
}
"""The generators for evaluation. The first edition was trained without companies with ordinary names, and without
`editing` and `unknown`."""


def prompt_text(example: Example, template: ChatTemplate) -> str:
    """The rendered prompt, which ends where the answer starts."""
    return template.render(example.messages, {"enable_thinking": example.thinking}, example.tools or ())


def render(example: Example, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], int]:
    """Token ids of prompt, answer and <|im_end|>, and the index of the answer's first token."""
    prompt = tokenizer.encode(prompt_text(example, template))
    return [*prompt, *tokenizer.encode(example.answer + _MESSAGE_END)], len(prompt)
