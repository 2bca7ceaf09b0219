"""A runner whose model is a hash: the token after a text follows from all of the text, and memory holds what was told.

Its memory is modelled, not skipped. A slot's state and every place of every KV page hold the hash of the text up to
there, and each step is refused unless the state, the pages and the scheduler's own word agree. So a page written by a
stranger, a state restored at the wrong place or a draft folded in by mistake ends the test where it happens.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onebox.engine.config import EngineConfig
from onebox.engine.disk.jobs import PrefixDisk
from onebox.engine.draft.speculate import Speculator
from onebox.engine.logits import LogitsRules
from onebox.engine.request import Event, Finished, FinishReason, Request, SamplingParams, TokenLogprob, Tokens
from onebox.engine.scheduler import Scheduler
from onebox.engine.sequence import Sequence
from onebox.engine.step import DecodeRows, DraftCheck, Draw, PromptChunk, Result, StepOutput, StepPlan
from onebox.spec.kv import PAGE_TOKENS
from tests.engine.scripted import DeferredRun

VOCAB_SIZE = 48
FAILING = VOCAB_SIZE - 1
"""A prompt with this token cannot be computed."""

MAX_STEPS = 50_000

NOTHING = np.empty(0, dtype=np.int64)


def followed(state: int, token_id: int) -> int:
    """The state after one more token; every earlier token has a part in it."""
    state = (state ^ token_id * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & (1 << 63) - 1
    return state ^ state >> 29


def states_after(state: int, token_ids) -> np.ndarray:
    """The states after each of the tokens: int64 [n]."""
    states = []
    for token_id in token_ids:
        state = followed(state, token_id)
        states.append(state)
    return np.array(states, dtype=np.int64)


def target(state: int, last: int, banned: tuple[int, ...] = ()) -> int:
    """The token that follows: mostly one that repeats itself in a period, so that looking back helps, else any."""
    token_id = (last * 5 + 3) % 7 if state % 3 else (state >> 8) % (VOCAB_SIZE - 1)
    while token_id in banned:
        token_id = (token_id + 1) % (VOCAB_SIZE - 1)
    return token_id


class Answer(NamedTuple):
    token_ids: list[int]
    reason: FinishReason
    num_sampled: int


def plain_answer(prompt: tuple[int, ...], max_tokens: int, stop_token_ids=frozenset(), min_tokens: int = 0) -> Answer:
    """The same model without an engine: token after token over the whole text."""
    states, last, made = states_after(0, prompt), prompt[-1], []
    state = int(states[-1])
    for count in range(max_tokens):
        banned = tuple(stop_token_ids) if count < min_tokens else ()
        last = target(state, last, tuple(sorted(banned)))
        if last in stop_token_ids:
            return Answer(made, FinishReason.STOP, count + 1)
        made.append(last)
        state = followed(state, last)
    return Answer(made, FinishReason.LENGTH, max_tokens)


@dataclass
class Slot:
    """What a slot's recurrent state has been through, and the last step's rows, of which some may yet be kept."""

    history: np.ndarray
    pending: np.ndarray = field(default_factory=lambda: NOTHING)

    def last(self) -> int:
        return int(self.history[-1]) if len(self.history) else 0


class FakeRunner:
    """The model above behind the engine's Runner. `gate` holds every step until it is set."""

    vocab_size = VOCAB_SIZE

    def __init__(self, config: EngineConfig, draft_accuracy: float = 0.7, seed: int = 0) -> None:
        self.config = config
        self.scheduler: Scheduler | None = None
        """Asked, where it is set, who holds which page and which text a sequence has."""
        self.gate = threading.Event()
        self.gate.set()
        self.plans: list[StepPlan] = []
        self.num_prompt_tokens = 0
        self._draft_accuracy = draft_accuracy
        self._random = random.Random(seed)
        self._pages = np.zeros((config.num_pages + 1, PAGE_TOKENS), dtype=np.int64)
        self._slots: dict[int, Slot] = {}
        self._checkpoints: dict[int, np.ndarray] = {}
        self._writers: dict[int, str] = {}
        self._holders: Counter[int] = Counter()

    def start(self, plan: StepPlan) -> DeferredRun:
        return DeferredRun(lambda: self.run(plan))

    def run(self, plan: StepPlan) -> StepOutput:
        self.gate.wait()
        self.plans.append(plan)
        self._writers = {}
        self._holders = holders(self.scheduler) if self.scheduler else Counter()
        parts = [*plan.chunks, *plan.rows]
        assert len({part.slot for part in parts}) == len(parts), "a slot was given to two"
        assert len({part.request_id for part in parts}) == len(parts), "a request is in the step twice"
        total = sum(len(chunk.token_ids) for chunk in plan.chunks)
        assert total <= self.config.max_num_batched_tokens, "a step takes more prompt than it may"
        for slot in plan.cleared_slots:
            self._slots[slot] = Slot(NOTHING)
        for checkpoint, slot in plan.restored:
            self._slots[slot] = Slot(self._checkpoints[checkpoint])
        saved = [save.checkpoint for chunk in plan.chunks for save in chunk.saves]
        assert len(set(saved)) == len(saved), "two states were to be saved under one number"
        return StepOutput(tuple(map(self._chunk, plan.chunks)), tuple(map(self._rows, plan.rows)))

    def _chunk(self, chunk: PromptChunk) -> Result | Exception:
        slot = self._slots[chunk.slot]
        assert not len(slot.pending), "a prompt goes on after an answer began"
        assert chunk.start % PAGE_TOKENS == 0, "a chunk starts off the grid"
        assert chunk.token_ids, "a chunk is empty"
        assert chunk.end % PAGE_TOKENS == 0 or chunk.draw, "a chunk ends off the grid before its prompt does"
        assert (chunk.following is None) == (chunk.draw is not None), "nothing is drawn where the prompt ends"
        if FAILING in chunk.token_ids:
            return ArithmeticError("a scripted failure")
        states = self._write(chunk, slot, states_after(slot.last(), chunk.token_ids))
        slot.history = np.concatenate([slot.history, states])
        self.num_prompt_tokens += len(chunk.token_ids)
        self._save(chunk, slot)
        logprobs = self._prompt_logprobs(chunk)
        if chunk.draw is None:
            return Result(prompt_logprobs=logprobs)
        assert len(chunk.draw.next_ids) == 1, "a prompt's end draws once"
        token_ids, _ = _drawn(chunk.draw, states[-1:], chunk.token_ids[-1:])
        drafts = self._drafts(chunk.draw, int(states[-1]), token_ids)
        return Result(token_ids, 0, drafts, _logprobs(chunk.draw, token_ids), logprobs)

    def _rows(self, rows: DecodeRows) -> Result | Exception:
        slot = self._slots[rows.slot]
        assert rows.num_accepted <= len(slot.pending), "more tokens are kept than there were rows"
        slot.history = np.concatenate([slot.history, slot.pending[: rows.num_accepted]])
        assert 1 <= len(rows.token_ids) <= self.config.rows_per_sequence, "too many rows"
        slot.pending = self._write(rows, slot, states_after(slot.last(), rows.token_ids))
        token_ids, num_accepted = _drawn(rows.draw, slot.pending, rows.token_ids)
        drafts = self._drafts(rows.draw, int(slot.pending[num_accepted - 1]), token_ids)
        return Result(token_ids, num_accepted, drafts, _logprobs(rows.draw, token_ids))

    def _write(self, part: PromptChunk | DecodeRows, slot: Slot, states: np.ndarray) -> np.ndarray:
        """Puts the new tokens' states into the pages, once all that stands before them is found to be right."""
        assert part.start == len(slot.history), "a token was skipped or fed twice"
        assert len(part.pages) * PAGE_TOKENS >= part.end, "the pages end before the tokens do"
        assert len(set(part.pages.tolist())) == len(part.pages), "a page stands twice in a table"
        assert part.pages.min() > 0, "the scratch page was given away"
        self._check_text(part, slot)
        places = np.arange(part.end)
        pages, offsets = part.pages[places // PAGE_TOKENS], places % PAGE_TOKENS
        before = self._pages[pages[: part.start], offsets[: part.start]]
        assert np.array_equal(before, slot.history), "the pages do not hold what the state has seen"
        for page in set(pages[part.start :].tolist()):
            other = self._writers.setdefault(page, part.request_id)
            assert other == part.request_id, f"page {page} is written by {other} and {part.request_id}"
            assert not self.scheduler or self._holders[page] == 1, f"page {page} is shared and was written"
        self._pages[pages[part.start :], offsets[part.start :]] = states
        return states

    def _check_text(self, part: PromptChunk | DecodeRows, slot: Slot) -> None:
        """The state is that of the request's own text."""
        if self.scheduler:
            text = self.scheduler._running[part.request_id].tokens
            assert np.array_equal(states_after(0, text[: part.start]), slot.history), "a state of another text"
            certain = part.token_ids[: len(text) - part.start]
            assert list(certain) == text[part.start : part.start + len(certain)], "other tokens than the request's"

    def _save(self, chunk: PromptChunk, slot: Slot) -> None:
        positions = [save.num_tokens for save in chunk.saves]
        assert positions == sorted(set(positions)), "states are to be kept out of order"
        for save in chunk.saves:
            assert chunk.start < save.num_tokens <= chunk.end, "a state is to be kept outside its chunk"
            assert save.num_tokens % PAGE_TOKENS == 0, "a state is to be kept off the grid"
            assert 0 <= save.checkpoint < self.config.num_checkpoints, "there is no such checkpoint"
            self._checkpoints[save.checkpoint] = slot.history[: save.num_tokens]

    def _prompt_logprobs(self, chunk: PromptChunk) -> tuple[TokenLogprob, ...]:
        if chunk.prompt_logprobs is None:
            return ()
        following = [*chunk.token_ids[1:], *([] if chunk.following is None else [chunk.following])]
        return tuple(
            TokenLogprob(token_id, -float(position), 1)
            for position, token_id in enumerate(following, start=chunk.start + 1)
        )

    def _drafts(self, draw: Draw, state: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What follows the new tokens, with a mistake now and then."""
        assert 0 <= draw.depth <= self.config.speculation.max_drafts, "drafts that no step could check"
        if not token_ids:
            assert not draw.depth, "drafts were asked for where the text is known already"
            return ()
        drafts: list[int] = []
        last = token_ids[-1]
        for _ in range(draw.depth):
            state = followed(state, last)
            last = target(state, last)
            if self._random.random() > self._draft_accuracy:
                last = (last + 1) % (VOCAB_SIZE - 1)
            drafts.append(last)
        return tuple(drafts)


def _drawn(draw: Draw, states: np.ndarray, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """(the new tokens, how many rows are kept), by the rule: a draft stands if it is the token that is drawn."""
    count = len(token_ids)
    assert len(draw.next_ids) == len(draw.checks) == count, "a row without its next token"
    assert draw.next_ids[:-1] == token_ids[1:], "what follows a row is not the next row"
    assert all(check is DraftCheck.ACCEPT for check in draw.checks[: draw.first_new]), "a certain token is doubted"
    assert len(draw.adjustments) in (0, count - draw.first_new), "rows and adjustments do not match"
    made: list[int] = []
    for place, (state, token_id) in enumerate(zip(states.tolist(), token_ids, strict=True)):
        adjustment = draw.adjustments[place - draw.first_new] if draw.adjustments and place >= draw.first_new else None
        drawn = target(state, token_id, tuple(adjustment.banned.tolist()) if adjustment else ())
        following, check = draw.next_ids[place], draw.checks[place]
        stands = check is DraftCheck.ACCEPT or (check is DraftCheck.COMPARE and drawn == following)
        made.append(following if stands else drawn)
        if not stands:
            break
    return tuple(made[draw.first_new :]), len(made)


def _logprobs(draw: Draw, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    if draw.sampling.logprobs is None:
        return ()
    return tuple(TokenLogprob(token_id, -float(token_id), 1) for token_id in token_ids)


def holders(scheduler: Scheduler) -> Counter[int]:
    """Page -> how many hold it, sequences, the prefix cache and the disk together."""
    counts = Counter(scheduler._prefix.holders())
    counts.update(scheduler._disk.holders())
    for sequence in scheduler._running.values():
        counts.update(sequence.pages.tolist())
    return counts


def wait_until(condition) -> None:
    """Waits for what must come; the limit only keeps a defect from waiting for ever."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)


class Stand:
    """A scheduler on the fake runner, step by step and without threads; what clients hear is kept by request."""

    def __init__(
        self,
        config: EngineConfig,
        draft_accuracy: float = 0.7,
        seed: int = 0,
        open_disk: Callable[[FakeRunner], PrefixDisk] | None = None,
    ) -> None:
        self.config = config
        self.runner = FakeRunner(config, draft_accuracy, seed)
        self.scheduler = Scheduler(config, open_disk(self.runner) if open_disk else None)
        self.runner.scheduler = self.scheduler
        self.speculator = Speculator(config.speculation)
        self.events: dict[str, list[Event]] = {}
        self.sequences: dict[str, Sequence] = {}
        self.num_steps = 0

    def submit(self, request: Request, now: float = 0.0) -> Sequence:
        sequence = sequence_of(request, self.config, self.speculator, now)
        self.events[request.request_id] = []
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def ask(self, name: str, prompt, *, priority: int = 0, client=None, **sampling) -> Sequence:
        return self.submit(Request(name, tuple(prompt), SamplingParams(**sampling), priority, client=client))

    def step(self, seconds: float = 0.01) -> StepPlan:
        """One step, after which every invariant holds; no test needs more than MAX_STEPS of them."""
        self.num_steps += 1
        assert self.num_steps <= MAX_STEPS, f"still open after {MAX_STEPS} steps: {list(self.sequences)}"
        plan = self.scheduler.plan()
        output = self.runner.run(plan)
        self.scheduler.observe(plan, seconds, self.speculator)
        self.hear(self.scheduler.commit(plan, output))
        self.scheduler.check()
        reserved = self.scheduler._prefix.reserved - set(self.scheduler._disk.reserved())
        assert not reserved, "a checkpoint's number is kept for nothing"
        return plan

    def drain(self, limit: int = 5000) -> None:
        """Steps until nothing is alive, which must not take more than `limit`."""
        for _ in range(limit):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError(f"after {limit} steps requests are still open: {list(self.sequences)}")

    def hear(self, events: list[Event]) -> None:
        for event in events:
            self.events[event.request_id].append(event)

    def token_ids(self, name: str) -> list[int]:
        return tokens_of(self.events[name])

    def end(self, name: str) -> Finished:
        last = self.events[name][-1]
        assert isinstance(last, Finished), last
        return last


def tokens_of(events) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def sequence_of(request: Request, config: EngineConfig, speculator: Speculator, now: float = 0.0) -> Sequence:
    """A request as the scheduler takes it, without the refusals of the engine's door."""
    sampling = request.sampling
    stops = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else config.eos_token_ids)
    return Sequence(
        request,
        sampling.max_tokens or config.max_model_len - len(request.prompt),
        stops,
        LogitsRules(sampling, request.prompt, stops, None),
        speculator.start(request.prompt, sampling.seed),
        deadline=None if request.timeout_s is None else now + request.timeout_s,
    )
