"""One measurement under way: the client, the settings that all workloads share, and who watches."""

import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from onebox.bench.answer import Ask, StreamedAnswer, check_text_count
from onebox.bench.client import Client
from onebox.bench.figures import Slo
from onebox.bench.fit import PromptFit, fit
from onebox.bench.metrics import DraftCounters, draft_counters
from onebox.bench.record import WorkloadKind, WorkloadRecord
from onebox.bench.tally import WorkloadTally
from onebox.bench.tasks import Padding, Task, Wanted

__all__ = ["BenchSettings", "Prepared", "Session", "Silence", "Watch"]

_LEAST_ANSWER = 16
"""Fewer tokens than this tell nothing about speed."""
_NONCE_DIGITS = 12
"""Digits, because vocabularies cut so many of them into the same number of tokens whichever they are."""


class Watch(Protocol):
    """Receives the progress of a measurement."""

    def begin(self, name: str, total: int | None) -> None:
        """A workload begins, of so many requests if that is known."""
        ...

    def answered(self, answer: StreamedAnswer) -> None: ...

    def end(self, workload: WorkloadRecord) -> None: ...


class Silence:
    """Watches and says nothing."""

    def begin(self, name: str, total: int | None) -> None:
        pass

    def answered(self, answer: StreamedAnswer) -> None:
        pass

    def end(self, workload: WorkloadRecord) -> None:
        pass


@dataclass(frozen=True)
class BenchSettings:
    """What all workloads of a run share."""

    runs: int = 3
    warm_ups: int = 1
    ignore_eos: bool = False
    """Answers go on to their limit; else the model ends them, as it does for its users."""
    seed: int = 0
    """Of prompts' nonces and of arrival times."""
    limit_s: float | None = None
    """A workload of single requests or a cell starts no further run after so long; the first always runs."""
    max_context: int | None = None
    """Treats the server's context as no longer than this."""
    slo: Slo = field(default_factory=Slo)


class Prepared(NamedTuple):
    """A task whose prompt has its length."""

    task: Task
    wanted: Wanted
    fit: PromptFit
    too_long: str = ""
    """Why it cannot be sent at all, where it cannot."""

    def ask(self, nonce: str) -> Ask:
        ask = self.task.ask(nonce, self.fit.padding, self.wanted.max_tokens)
        return replace(ask, prompt_tokens=self.fit.prompt_tokens)

    @property
    def notes(self) -> tuple[str, ...]:
        pictures = self.task.with_picture
        found = (self.wanted.note, "" if pictures else self.fit.note(self.wanted.prompt_tokens))
        return tuple(note for note in found if note)

    @property
    def settings(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.wanted.prompt_tokens,
            "max_tokens": self.wanted.max_tokens,
            "temperature": self.task.temperature,
            "thinking": self.task.thinking,
        }


class Session:
    """Shared by the workloads of a run, one after the other."""

    def __init__(self, client: Client, settings: BenchSettings, watch: Watch) -> None:
        self.client = client
        self.settings = settings
        self.watch = watch
        self.tally: WorkloadTally | None = None
        """Of the workload under way."""
        self.warmed: set[str] = set()
        """Tasks whose prompts the server has seen the like of."""
        self._draw = random.Random(settings.seed)  # noqa: S311 - repeatable, not secret

    @property
    def max_model_len(self) -> int | None:
        limits = (self.client.server.max_model_len, self.settings.max_context)
        return min((limit for limit in limits if limit is not None), default=None)

    def nonce(self) -> str:
        """A beginning that no prompt had before."""
        return "".join(self._draw.choices("0123456789", k=_NONCE_DIGITS))

    def reason_to_skip(self, task: Task) -> str:
        if task.with_picture and "image" not in self.client.server.modalities:
            return "the server takes no pictures"
        return ""

    async def prepare(self, task: Task) -> Prepared:
        """Scales the task to the context and makes its prompt's length exact; takes time, so never within a timing."""
        wanted, nonce = task.scaled(self.max_model_len), self.nonce()
        if task.with_picture:
            return Prepared(task, wanted, PromptFit(Padding(), None))

        async def count(padding: Padding) -> int | None:
            return await self.client.count_prompt(task.ask(nonce, padding, wanted.max_tokens))

        found = await fit(count, wanted.prompt_tokens)
        return self._within(Prepared(task, wanted, found))

    def _within(self, made: Prepared) -> Prepared:
        """A question may be longer in this server's tokens than its task's length: then the answer is shorter."""
        limit, prompt = self.max_model_len, made.fit.prompt_tokens
        if limit is None or prompt is None or prompt + made.wanted.max_tokens <= limit:
            return made
        room = limit - prompt
        if room < _LEAST_ANSWER:
            return made._replace(too_long=f"its prompt has {prompt:,} tokens and the context holds {limit:,}")
        note = f"the answer is cut to {room} tokens from {made.task.max_tokens:,}: the context holds {limit:,}"
        return made._replace(wanted=Wanted(made.wanted.prompt_tokens, room, note))

    async def send(self, ask: Ask) -> StreamedAnswer:
        answer = await self.client.ask(ask)
        self.watch.answered(answer)
        return answer

    def open(self, tally: WorkloadTally) -> WorkloadTally:
        """From here on an interruption keeps what the tally holds."""
        tally.slo = self.settings.slo
        self.tally = tally
        return tally

    async def close(self, tally: WorkloadTally) -> WorkloadRecord:
        """Judges the answers, now that nothing is timed, and gives the workload."""
        for answer in tally.answers:
            await self._judge(answer)
        workload = tally.workload()
        self.tally = None
        self.watch.end(workload)
        return workload

    def skipped(self, name: str, kind: WorkloadKind, reason: str) -> WorkloadRecord:
        workload = WorkloadRecord(name, kind, skipped=reason)
        self.watch.end(workload)
        return workload

    async def _judge(self, answer: StreamedAnswer) -> None:
        """Holds usage against the text where no token ids came."""
        if answer.failure or answer.has_token_ids or not answer.text:
            return
        ids = await self.client.token_ids(answer.text)
        if ids is not None:
            check_text_count(answer, len(ids))

    async def drafts(self) -> DraftCounters | None:
        return draft_counters(await self.client.metrics())
