"""The table of Spark Arena and llama-benchy: prompts of `pp` tokens on a context of `depth`, answers of `tg` tokens.

The context is sent first in a separate request, so that a server with a prefix cache has it cached for the prompt. The
cell's figures are those of the second request; the context request is recorded too. Prompt and context together have
exactly the given length, template included. Answers are generated to their full length.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from onebox.bench.answer import Ask, StreamedAnswer
from onebox.bench.figures import CONTEXT_LABEL
from onebox.bench.fit import fit
from onebox.bench.record import Role, WorkloadKind, WorkloadRecord
from onebox.bench.session import Session
from onebox.bench.tally import WorkloadTally
from onebox.bench.tasks import Padding
from onebox.bench.texts import prose_words

__all__ = ["ARENA_DEPTHS", "Cell", "cells", "run_cell"]

ARENA_DEPTHS = (0, 4096, 8192, 16384, 32768, 65535, 100000)
_LOAD_QUESTION = "."


class Cell(NamedTuple):
    """One cell of the table, in tokens."""

    prompt: int
    answer: int
    depth: int = 0
    concurrency: int = 1

    @property
    def name(self) -> str:
        depth = f" d{self.depth}" if self.depth else ""
        return f"pp{self.prompt} tg{self.answer}{depth} c{self.concurrency}"


def cells(
    prompts: Sequence[int], answers: Sequence[int], depths: Sequence[int], concurrencies: Sequence[int]
) -> tuple[Cell, ...]:
    """All combinations; depth varies slowest, concurrency fastest."""
    product = itertools.product(depths, prompts, answers, concurrencies)
    return tuple(Cell(prompt, answer, depth, together) for depth, prompt, answer, together in product)


async def run_cell(session: Session, cell: Cell) -> WorkloadRecord:
    """Measures one cell; a cell longer than the context is skipped, because a shortened one would be another cell."""
    limit = session.max_model_len
    if limit is not None and cell.depth + cell.prompt + cell.answer > limit:
        return session.skipped(cell.name, WorkloadKind.SWEEP, f"the context holds {limit:,} tokens")
    if "ignore_eos" not in session.client.accepts:
        return session.skipped(
            cell.name,
            WorkloadKind.SWEEP,
            "the server does not accept ignore_eos, so answers cannot have a fixed length",
        )
    settings = session.settings
    each = cell.concurrency * (2 if cell.depth else 1)
    session.watch.begin(cell.name, each * (settings.runs + settings.warm_ups))
    writer = await _Writer.made(session, cell)
    kept = {**cell._asdict(), "runs": settings.runs, "latency_s": await session.latency_s()}
    tally = session.open(WorkloadTally(cell.name, WorkloadKind.SWEEP, kept, list(writer.notes)))
    for run in range(-settings.warm_ups, settings.runs):
        if run > 0 and tally.is_over(settings.limit_s, run, settings.runs):
            break
        role = Role.WARM_UP if run < 0 else Role.LOAD
        asks = [writer.asks(session.nonce()) for _ in range(cell.concurrency)]
        for place in range(len(asks[0])):
            before = await session.drafts()
            answers = await asyncio.gather(*(session.send(ask[place]) for ask in asks))
            if asks[0][place].label != CONTEXT_LABEL and run >= 0:
                tally.count_drafts(before, await session.drafts())
            for answer in answers:
                tally.add(answer, role, run=max(run, 0))
    short = [answer for answer in tally.answers if not answer.failure and _misses_length(answer)]
    if short:
        made = short[0].completion_tokens
        tally.notes.append(f"answers have {made} tokens, not {cell.answer}: the server does not follow ignore_eos")
    return await session.close(tally)


def _misses_length(answer: StreamedAnswer) -> bool:
    return answer.completion_tokens != answer.ask.max_tokens


class _Writer(NamedTuple):
    """Writes the prompts of a cell."""

    cell: Cell
    context: Padding
    prompt: Padding
    notes: tuple[str, ...] = ()

    @classmethod
    async def made(cls, session: Session, cell: Cell) -> "_Writer":
        """Fits the context alone first, then the prompt after it."""
        nonce, context = session.nonce(), Padding()
        if cell.depth:

            async def count_context(padding: Padding) -> int | None:
                return await session.client.count_prompt(cls(cell, padding, Padding())._load(nonce))

            context = (await fit(count_context, cell.depth)).padding

        async def count_whole(padding: Padding) -> int | None:
            return await session.client.count_prompt(cls(cell, context, padding)._measured(nonce))

        found = await fit(count_whole, cell.depth + cell.prompt)
        note = found.note(cell.depth + cell.prompt)
        return cls(cell, context, found.padding, (note,) if note else ())

    def asks(self, nonce: str) -> tuple[Ask, ...]:
        """The requests of one run, in order."""
        return (self._load(nonce), self._measured(nonce)) if self.cell.depth else (self._measured(nonce),)

    def _load(self, nonce: str) -> Ask:
        messages = (self._system(nonce), {"role": "user", "content": _LOAD_QUESTION})
        return Ask(messages, max_tokens=1, ignore_eos=True, thinking=False, label=CONTEXT_LABEL)

    def _measured(self, nonce: str) -> Ask:
        question = {"role": "user", "content": f"{_words(self.prompt, 1)} Tell the story on from here."}
        messages = (self._system(nonce), question)
        return Ask(messages, max_tokens=self.cell.answer, ignore_eos=True, thinking=False, label="cell")

    def _system(self, nonce: str) -> dict[str, Any]:
        return {"role": "system", "content": f"Story {nonce}. {_words(self.context, 0)}"}


def _words(padding: Padding, seed: int) -> str:
    return " ".join(itertools.islice(prose_words(seed), padding.words)) + " a" * padding.tail
