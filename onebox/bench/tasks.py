"""The single-stream workloads: prompts, lengths of prompt and answer, and settings.

Three sets, modelled on published results for this family: `short` (five prompts of a well-known harness), `docai`
(document work in Hungarian, with long contexts) and `modes` (thinking, prose, Turkish, an image, tools). Lengths are
targets in the server's own tokens; `fit.py` makes them exact. Independent of any server.
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from onebox.bench.answer import Ask
from onebox.bench.client import picture_part
from onebox.bench.texts import ASIDE, INVOICE, KEY_SENTENCE, QUESTIONS, TOOLS, contract_words
from onebox.spec.errors import UsageError

__all__ = ["SETS", "TASKS", "Padding", "Task", "Wanted", "chosen_tasks", "document_picture"]


@dataclass(frozen=True)
class Padding:
    """Padding that brings a prompt to its length."""

    words: int = 0
    tail: int = 0
    """Single letters at the end, for the last few tokens."""


@dataclass(frozen=True)
class Wanted:
    """Lengths in tokens, and the reason if they differ from the task's own."""

    prompt_tokens: int
    max_tokens: int
    note: str = ""


@dataclass(frozen=True)
class Task:
    """One single-stream workload."""

    key: str
    title: str
    prompt_tokens: int
    """Including the chat template and the nonce."""
    max_tokens: int
    question: str
    document: str = ""
    """Text before the question. "contracts" is generated to the needed length; any other text is used as given."""
    temperature: float = 0.0
    thinking: bool | None = False
    with_tools: bool = False
    with_picture: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def scaled(self, max_model_len: int | None) -> Wanted:
        """Lengths that fit a context. The prompt is shortened first; the answer keeps at least a quarter of it."""
        whole = self.prompt_tokens + self.max_tokens
        if max_model_len is None or whole <= max_model_len:
            return Wanted(self.prompt_tokens, self.max_tokens)
        answer = min(self.max_tokens, max(max_model_len // 4, max_model_len - self.prompt_tokens))
        prompt = min(self.prompt_tokens, max_model_len - answer)
        note = (
            f"scaled down to {prompt:,} + {answer:,} tokens from {self.prompt_tokens:,} + {self.max_tokens:,}: "
            f"the context holds {max_model_len:,}"
        )
        return Wanted(prompt, answer, note)

    def ask(self, nonce: str, padding: Padding, max_tokens: int) -> Ask:
        """The request. Its prompt begins with the nonce, so that no prefix is cached."""
        system, document = f"Session {nonce}.", self.document
        if self.document == "contracts":
            words = list(itertools.islice(contract_words(), padding.words))
            # The sentence with the answer is a third of the way into the document.
            words.insert(len(words) // 3, f"\n{KEY_SENTENCE}\n")
            document = " ".join(words) + " a" * padding.tail
        else:
            system += "".join(f" {word}" for word in itertools.islice(_aside(), padding.words)) + " a" * padding.tail
        text = f"{document}\n\n{self.question}" if document else self.question
        content: Any = text
        if self.with_picture:
            content = [picture_part(document_picture()), {"type": "text", "text": text}]
        return Ask(
            ({"role": "system", "content": system}, {"role": "user", "content": content}),
            max_tokens=max_tokens,
            temperature=self.temperature,
            thinking=self.thinking,
            tools=_named_tools(nonce) if self.with_tools else (),
            extra=dict(self.extra),
            label=self.key,
        )


def _aside() -> Iterator[str]:
    return itertools.cycle(ASIDE.split())


def _named_tools(nonce: str) -> tuple[dict[str, Any], ...]:
    """Templates put tools before the system message, so the nonce must also be in the tools."""
    first, *rest = TOOLS
    function = {**first["function"], "description": f"Catalogue {nonce}. {first['function']['description']}"}
    return ({**first, "function": function}, *rest)


def document_picture() -> bytes:
    """A page with an invoice, as PNG. ASCII letters only, because Pillow's default font has few others."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("RGB", (896, 640), "white")
    pen = ImageDraw.Draw(page)
    pen.text((48, 32), "INVOICE 2026/00418", fill="black", font=ImageFont.load_default(40))
    lines = (
        "Seller: Orseg Timber Works Ltd., 12 Forest Row, Wetherby",
        "Buyer: Fire Lily Bookshop, 7 Mill Lane, Hexham",
        "Issued: 4 March 2026     Due: 18 March 2026",
        "Bookshelf, oak          6    42.50    255.00",
        "Ladder, beech           2    18.90     37.80",
        "Delivery                1     9.20      9.20",
        "Net 302.00     VAT 20% 60.40     Total 362.40",
        "Signed by: I. Nadasdy and P. Holloway, jointly authorised",
    )
    for row, line in enumerate(lines):
        pen.text((48, 120 + 58 * row), line, fill="black", font=ImageFont.load_default(26))
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()


def _task(key: str, title: str, prompt_tokens: int, max_tokens: int, **rest: Any) -> Task:
    return Task(key, title, prompt_tokens, max_tokens, rest.pop("question", None) or QUESTIONS[key], **rest)


_SEED_000: dict[str, Any] = {"temperature": 0.3, "extra": {"seed": 1}}
"""Published results of the third set use this temperature; the seed makes it repeatable."""

SETS: dict[str, tuple[Task, ...]] = {
    "short": (
        _task("qa", "Q&A", 64, 256),
        _task("code", "Code", 64, 512),
        _task("json", "JSON", 96, 1024),
        _task("math", "Math", 96, 64),
        _task("longcode", "LongCode", 96, 2048),
    ),
    "docai": (
        _task("docai-qa", "DocAI Q&A", 96, 256),
        _task("docai-code", "DocAI Code", 64, 300),
        _task("docai-kie", "DocAI JSON-KIE", 512, 320, document=INVOICE),
        _task("docai-hungarian", "DocAI Hungarian", 96, 320),
        _task("rag-8k", "Long-RAG-8K", 8192 - 256, 256, question=QUESTIONS["rag"], document="contracts"),
        _task("rag-32k", "Long-RAG-32K", 32768 - 256, 256, question=QUESTIONS["rag"], document="contracts"),
    ),
    "modes": (
        _task("think", "Think mode", 128, 400, thinking=True, **_SEED_000),
        _task("text", "Text", 96, 500, **_SEED_000),
        _task("turkish", "Turkish", 128, 200, **_SEED_000),
        _task("vision", "Vision/OCR", 1024, 524, with_picture=True, **_SEED_000),
        _task("tools", "Tool calling", 512, 128, with_tools=True, **_SEED_000),
    ),
}
TASKS: dict[str, Task] = {task.key: task for tasks in SETS.values() for task in tasks}


def chosen_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """Tasks by name or set name, each once, in the order of the sets."""
    wanted: set[str] = set()
    for name in names:
        if name == "all":
            wanted |= set(TASKS)
        elif name in SETS:
            wanted |= {task.key for task in SETS[name]}
        elif name in TASKS:
            wanted.add(name)
        else:
            raise UsageError(f"There is no workload {name!r}; there are all, {', '.join(SETS)}, {', '.join(TASKS)}.")
    return tuple(task for key, task in TASKS.items() if key in wanted)
