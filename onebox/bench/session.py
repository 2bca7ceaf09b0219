"""State of a running measurement: the client, the settings shared by all workloads, and the progress observer."""

import random
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from onebox.bench.answer import Ask, StreamedAnswer, check_text_count
from onebox.bench.client import Client
from onebox.bench.cost import Prices
from onebox.bench.figures import Slo
from onebox.bench.fit import PromptFit, fit
from onebox.bench.meter import Meter
from onebox.bench.metrics import DraftCounters, draft_counters
from onebox.bench.record import WorkloadKind, WorkloadRecord
from onebox.bench.tally import WorkloadTally
from onebox.bench.tasks import Padding, Task, Wanted

__all__ = ["BenchSettings", "Prepared", "Session", "Silence", "Watch"]

_LEAST_ANSWER = 16
"""Minimum answer tokens for a meaningful speed."""
_NONCE_DIGITS = 12
"""Digits, because any string of this many digits has the same number of tokens in common vocabularies."""


class Watch(Protocol):
    """Receives the progress of a measurement."""

    def begin(self, name: str, total: int | None) -> None:
        """A workload starts, with its number of requests if known."""
        ...

    def answered(self, answer: StreamedAnswer) -> None: ...

    def end(self, workload: WorkloadRecord) -> None: ...


class Silence:
    """Ignores progress."""

    def begin(self, name: str, total: int | None) -> None:
        pass

    def answered(self, answer: StreamedAnswer) -> None:
        pass

    def end(self, workload: WorkloadRecord) -> None:
        pass


@dataclass(frozen=True)
class BenchSettings:
    """Settings shared by all workloads of a run."""

    runs: int = 3
    warm_ups: int = 1
    ignore_eos: bool = False
    """Generate answers to their token limit; else the model ends them, as in normal use."""
    seed: int = 0
    """Seed of the prompts' nonces and of arrival times."""
    limit_s: float | None = None
    """Time after which a single-stream workload or a cell starts no further run; the first always runs."""
    max_context: int | None = None
    """Upper limit on the server's context."""
    slo: Slo = field(default_factory=Slo)
    idle_s: float = 0.0
    """Time before the first request in which the sensors of an idle server are read."""
    prices: Prices = field(default_factory=Prices)


class Prepared(NamedTuple):
    """A task with its prompt padded to length."""

    task: Task
    wanted: Wanted
    fit: PromptFit
    too_long: str = ""
    """Why it cannot be sent, if so."""

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
    """Shared by the workloads of a run, which run one after the other."""

    def __init__(self, client: Client, settings: BenchSettings, watch: Watch, meter: Meter | None = None) -> None:
        self.client = client
        self.meter = meter
        self.settings = settings
        self.watch = watch
        self.tally: WorkloadTally | None = None
        """Requests of the running workload."""
        self.warmed: set[str] = set()
        """Tasks for which the server is warmed up."""
        self._latency_s: float | None = None
        self._draw = random.Random(settings.seed)  # noqa: S311 - repeatable, not secret

    @property
    def max_model_len(self) -> int | None:
        limits = (self.client.server.max_model_len, self.settings.max_context)
        return min((limit for limit in limits if limit is not None), default=None)

    def nonce(self) -> str:
        """A unique beginning for a prompt."""
        return "".join(self._draw.choices("0123456789", k=_NONCE_DIGITS))

    def reason_to_skip(self, task: Task) -> str:
        if task.with_picture and "image" not in self.client.server.modalities:
            return "the server takes no images"
        return ""

    async def prepare(self, task: Task) -> Prepared:
        """Scales the task to the context and pads its prompt to the exact length; slow, never called while timing."""
        wanted, nonce = task.scaled(self.max_model_len), self.nonce()
        if task.with_picture:
            return Prepared(task, wanted, PromptFit(Padding(), None))

        async def count(padding: Padding) -> int | None:
            return await self.client.count_prompt(task.ask(nonce, padding, wanted.max_tokens))

        found = await fit(count, wanted.prompt_tokens)
        return self._within(Prepared(task, wanted, found))

    def _within(self, made: Prepared) -> Prepared:
        """A prompt may have more tokens on this server than its task's length: then the answer is shortened."""
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
        """From here on an interruption keeps the requests in the tally."""
        tally.slo = self.settings.slo
        self.tally = tally
        return tally

    async def close(self, tally: WorkloadTally) -> WorkloadRecord:
        """Checks the answers after timing and returns the workload."""
        for answer in tally.answers:
            await self._judge(answer)
        workload = self.measured(tally)
        self.tally = None
        self.watch.end(workload)
        return workload

    def measured(self, tally: WorkloadTally) -> WorkloadRecord:
        """The workload so far, with the figures of the sensors where there are any."""
        workload = tally.workload()
        sensed = self.meter.figures(workload, tally.began_at) if self.meter else {}
        return replace(workload, figures={**workload.figures, **sensed}) if workload.figures else workload

    def skipped(self, name: str, kind: WorkloadKind, reason: str) -> WorkloadRecord:
        workload = WorkloadRecord(name, kind, skipped=reason)
        self.watch.end(workload)
        return workload

    async def _judge(self, answer: StreamedAnswer) -> None:
        """Checks usage against the text if no token ids were sent."""
        if answer.failure or answer.has_token_ids or not answer.text:
            return
        ids = await self.client.token_ids(answer.text)
        if ids is not None:
            check_text_count(answer, len(ids))

    async def latency_s(self) -> float:
        """Measured once in a run."""
        if self._latency_s is None:
            self._latency_s = await self.client.latency_s()
        return self._latency_s

    async def drafts(self) -> DraftCounters | None:
        return draft_counters(await self.client.metrics())
