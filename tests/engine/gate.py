"""The equality gate: whatever else an engine does, a request's tokens and log-probabilities are the same bits.

A `Variant` is one point of the product of all that may not matter: cache, drafts, company, aborts, chunks, memory. A
`Gate` asks its cases of an engine set up as a variant says and compares with the reference: one request at a time, in
one piece, nothing cached, nothing drafted. Within one format of KV and states: formats differ, as they should.

The engine is the real one. The test acts between its steps, on its own thread (`SteppedRunner`), so that arrivals and
aborts come at the same moments every time.
"""

import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path

import torch

from onebox.engine.api import Engine, EngineConfig, EngineStats, RequestHandle, SpeculationConfig, SpeculationMethod
from onebox.engine.capture import GraphRecorder
from onebox.engine.draft.kinds import Drafter
from onebox.engine.draft.speculate import SequenceDrafts, Speculator
from onebox.engine.draft.vocabulary import DraftVocabulary, PutRows, Renewal
from onebox.engine.request import (
    Failed,
    Finished,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenLogprob,
    Tokens,
    Vision,
)
from onebox.engine.runner import ModelRunner
from onebox.engine.step import EncodedImages, Runner, StepPlan, StepRun
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.build import trim_model
from onebox.model.dflash import DFlash
from onebox.model.dummy import dummy_drafter
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.model.vision import Tower
from onebox.spec.dflash import SLIDING, DFlashSpec
from onebox.spec.dflash_memory import ring_tokens
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.states import StateDtype
from onebox.spec.weights import WeightFormat
from tests.engine.gate_pictures import with_tower
from tests.engine.gate_prompts import BOUNDARY, EOS, HAS_GRAMMARS, TOKEN_TABLE, Case, message, text
from tests.engine.tiny_disk import damage_files, disk_config, forget_memory, open_tier

DIMENSIONS = {
    "kv": ("bf16", "fp8", "turboquant"),
    "cache": ("cold", "warm", "evicted", "disk", "restarted", "damaged"),
    "drafts": (
        "none",
        "mtp1",
        "mtp2",
        "mtp3",
        "mtp4",
        "listed3",
        "ngram",
        "auto",
        "oracle4",
        "oracle8",
        "dflash7",
        "mixed15",
    ),
    "load": ("alone", "two", "eight", "random"),
    "aborts": ("calm", "aborts"),
    "chunk": ("64", "512", "whole"),
    "pages": ("ample", "few"),
}
STATES = {"bf16": StateDtype.FLOAT32, "fp8": StateDtype.BFLOAT16, "turboquant": StateDtype.FLOAT16}
"""The dtype of DeltaNet states beside each KV format. So every dtype meets every value of the other dimensions, and a
variant is still compared with one of three references."""
SPECULATION = {
    "none": SpeculationConfig(),
    **{f"mtp{depth}": SpeculationConfig(SpeculationMethod.MTP, depth) for depth in (1, 2, 3, 4)},
    # From a list of tokens that changes before every step.
    "listed3": SpeculationConfig(SpeculationMethod.MTP, 3, draft_vocab_size=50),
    "ngram": SpeculationConfig(SpeculationMethod.NGRAM, 4),
    "auto": SpeculationConfig(SpeculationMethod.AUTO, 4),
    # The head drafts, but the oracle mostly speaks in its place.
    "oracle4": SpeculationConfig(SpeculationMethod.MTP, 4),
    # With eight sequences more rows than a step's kernels take at once.
    "oracle8": SpeculationConfig(SpeculationMethod.NGRAM, 8),
    **{f"dflash{depth}": SpeculationConfig(SpeculationMethod.DFLASH, depth, block_size=8) for depth in (3, 7)},
    # Every sequence has another drafter in every step, and the oracle mostly speaks in its place.
    "mixed7": SpeculationConfig(SpeculationMethod.AUTO, 7, block_size=8),
    "mixed15": SpeculationConfig(SpeculationMethod.AUTO, 15, block_size=16),
}
SLOTS = {"alone": 1, "two": 2, "eight": 8, "random": 4}
CHUNK = {"64": 64, "512": 512, "whole": 32768}
NUM_CHECKPOINTS = {"evicted": 3}
"""Of cache states that have another number than MANY."""
MANY = 128
ON_DISK = ("disk", "restarted", "damaged")
"""Cache states with prefixes on disk: dropped from memory, read by another engine, and read where files are damaged."""
MAX_PAGES = 1024
MAX_OTHERS = 5
"""Requests beside those of a round that are aborted."""
MAX_STEPS = 20_000
"""Of one round of questions; an engine that needs more is going in circles."""


@dataclass(frozen=True)
class Variant:
    """One way to run an engine. Fields take the values of `DIMENSIONS`."""

    kv: str
    cache: str = "cold"
    drafts: str = "none"
    load: str = "alone"
    aborts: str = "calm"
    chunk: str = "whole"
    pages: str = "ample"

    def __str__(self) -> str:
        return "-".join(astuple(self))


def all_variants() -> list[Variant]:
    """The whole product; memory, which is no dimension of the promise, is ample and short in turns."""
    values = [DIMENSIONS[field.name] for field in fields(Variant)[:-1]]
    return [Variant(*point, DIMENSIONS["pages"][place % 2]) for place, point in enumerate(product(*values))]


def covering_sample() -> list[Variant]:
    """Variants among which every two values of two dimensions meet.

    Each begins with a pair that has not met yet; every other value is the one that then meets most others for the first
    time, and between equals the one that was used least.
    """
    uncovered = {pair for point in product(*DIMENSIONS.values()) for pair in combinations(enumerate(point), 2)}
    num_uses: Counter[tuple[int, str]] = Counter()
    variants: list[Variant] = []
    while uncovered:
        chosen = [*min(uncovered)]
        for place in set(range(len(DIMENSIONS))) - dict(chosen).keys():
            candidates = [(place, value) for value in [*DIMENSIONS.values()][place]]
            gains = [sum(tuple(sorted((one, other))) in uncovered for other in chosen) for one in candidates]
            chosen.append(min(zip(gains, candidates, strict=True), key=lambda c: (-c[0], num_uses[c[1]]))[1])
        chosen.sort()
        num_uses.update(chosen)
        uncovered -= set(combinations(chosen, 2))
        variants.append(Variant(*(value for _, value in chosen)))
    return variants


@dataclass(frozen=True)
class Answer:
    """All that a client learns, but for how it came to be."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    reason: str
    num_sampled: int


def read(handle: RequestHandle) -> Answer:
    """Waits for the request's end."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    for event in handle:
        match event:
            case Tokens():
                token_ids += event.token_ids
                logprobs += event.logprobs
            case PromptLogprobs():
                prompt_logprobs += event.logprobs
            case Finished():
                made = event.counts.completion_tokens
                return Answer(tuple(token_ids), tuple(logprobs), tuple(prompt_logprobs), event.reason.value, made)
            case Failed():
                raise AssertionError(event.message)
    raise AssertionError(f"Request {handle.request_id} has no end.")


def difference(expected: Answer, answer: Answer) -> str | None:
    """Where two answers part, to the bit; None where they do not."""
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        ours, theirs = getattr(answer, name), getattr(expected, name)
        # Two numbers are written alike only if they have the same bits.
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if repr(a) != repr(b)), None)
        if place is not None:
            return f"{name}[{place}] is {ours[place]}, not {theirs[place]}"
        if len(ours) != len(theirs):
            return f"{len(ours)} {name}, not {len(theirs)}"
    if (answer.reason, answer.num_sampled) != (expected.reason, expected.num_sampled):
        return (
            f"ends with {answer.reason} after {answer.num_sampled}, not {expected.reason} after {expected.num_sampled}"
        )
    return None


class SteppedRunner:
    """A runner with somebody who acts before each step, on the engine's thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.before_step: Callable[[], None] = lambda: None

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def start(self, plan: StepPlan) -> StepRun:
        self.before_step()
        return self._runner.start(plan)

    def put_draft_rows(self, places: Sequence[int], token_ids: Sequence[int]) -> None:
        self._runner.put_draft_rows(places, token_ids)

    def encode_images(self, prompt: tuple[int, ...], vision: Vision) -> EncodedImages:
        return self._runner.encode_images(prompt, vision)

    def cache_tokens(self, prompt: tuple[int, ...], vision: Vision) -> tuple[int, ...]:
        return self._runner.cache_tokens(prompt, vision)


class RestlessVocabulary(DraftVocabulary):
    """Lists other tokens before every step, whatever was said."""

    def __init__(self, size: int, vocab_size: int) -> None:
        self._rng = random.Random(size)
        super().__init__(range(vocab_size), size, vocab_size, {})

    def tend(self, put_rows: PutRows) -> None:
        others = [token_id for token_id in range(len(self._counts)) if not self._is_listed[token_id]]
        places = self._rng.sample(range(len(self._token_ids)), 7)
        self._put_some(Renewal(places, self._rng.sample(others, 7)), put_rows)


class Oracle(Speculator):
    """Drafts what is known to come, spoilt here and there: long acceptances, and wrong drafts at every depth."""

    def __init__(self, config: SpeculationConfig, answers: dict[int, tuple[int, ...]]) -> None:
        """Answers by seed."""
        super().__init__(config)
        self._answers = answers

    def start(
        self,
        prompt: tuple[int, ...],
        seed: int | None,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        is_plain: bool = False,
    ) -> SequenceDrafts:
        answer = self._answers.get(seed or 0, ())
        return self.drafts()(self, prompt, seed, stop_token_ids, answer, is_plain=is_plain)

    def drafts(self) -> "type[_OracleDrafts]":
        return _OracleDrafts


class _OracleDrafts(SequenceDrafts):
    def __init__(
        self,
        speculator: Oracle,
        prompt: tuple[int, ...],
        seed: int | None,
        stop_token_ids: frozenset[int],
        answer: tuple[int, ...],
        *,
        is_plain: bool,
    ) -> None:
        super().__init__(speculator, prompt, seed, stop_token_ids, is_plain=is_plain)
        if isinstance(speculator, MixedOracle):
            self._auto = self._index = None  # nothing is chosen by what was measured
        self._answer = answer
        self._num_sampled = 0
        self._rng = random.Random(seed)

    def extend(self, token_ids: tuple[int, ...]) -> None:
        super().extend(token_ids)
        self._num_sampled += len(token_ids)

    def propose(self, room: int) -> tuple[int, ...]:
        drafts = super().propose(room)
        if self._rng.random() < 0.2:
            return drafts
        depth = self._rng.randint(0, min(room, self._config.max_drafts))
        known = [*self._answer[self._num_sampled : self._num_sampled + depth], EOS, 0, 1, 2, 3, 4, 5, 6][:depth]
        return tuple(self._rng.randrange(EOS) if self._rng.random() < 0.12 else token for token in known)


class MixedOracle(Oracle):
    """An oracle whose sequences draft with the MTP head, in blocks or not at all, to any depth, as chance has it."""

    def drafts(self) -> "type[_OracleDrafts]":
        return _MixedDrafts


class _MixedDrafts(_OracleDrafts):
    def plan_next(self, room: int) -> tuple[Drafter, int]:
        drafter = self._rng.choice((Drafter.MTP, Drafter.DFLASH, Drafter.DFLASH, Drafter.NONE))
        config = self._config
        most = {Drafter.MTP: config.max_mtp_drafts, Drafter.DFLASH: config.max_block_drafts, Drafter.NONE: 0}[drafter]
        most = min(room, most)
        depth = most if self._rng.random() < 0.5 else self._rng.randint(0, most)
        return (drafter, depth) if depth else (Drafter.NONE, 0)


class Client:
    """Asks questions of an engine as a variant says; beside them, where it says so, others that are aborted."""

    def __init__(self, engine: Engine, variant: Variant, cases: Sequence[Case]) -> None:
        self._engine = engine
        self._variant = variant
        self._cases = cases
        self._rng = random.Random(str(variant))
        self._to_come: deque[Request] = deque()
        self._handles: list[RequestHandle] = []
        self._others: list[RequestHandle] = []
        self._not_aborted: list[str] = []
        self._num_others = self._num_steps = 0

    def ask(self, requests: Sequence[Request]) -> dict[str, Answer]:
        """The answers by request id. The engine is idle before and after."""
        self._to_come.extend(self._rng.sample(requests, len(requests)))
        self._handles, self._others, self._num_steps = [], [], 0
        answers: dict[str, Answer] = {}
        while self._to_come:
            # Whatever comes later comes between steps; only where nothing is left to step does this go around.
            self._submit(1 if self._variant.load == "random" else len(self._to_come))
            while len(answers) < len(self._handles):
                handle = self._handles[len(answers)]
                answers[handle.request_id] = read(handle)
        for handle in self._others:
            read(handle)
        return answers

    def before_step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise RuntimeError(f"{MAX_STEPS} steps were not enough")
        if self._to_come and self._rng.random() < 0.3:
            self._submit(1)
        if self._variant.aborts == "aborts":
            self._disturb()

    def _submit(self, count: int) -> None:
        self._handles += self._engine.submit_all([self._to_come.popleft() for _ in range(count)])

    def _disturb(self) -> None:
        is_over = not self._to_come and all(h.request_id not in self._engine._open for h in self._handles)
        for name in list(self._not_aborted):
            if is_over or self._rng.random() < 0.15:
                self._not_aborted.remove(name)
                self._engine.abort(name)
        if not is_over and len(self._others) < MAX_OTHERS and self._rng.random() < 0.25:
            self._others.append(self._engine.submit(self._other()))

    def _other(self) -> Request:
        """Often the beginning of a case's prompt, so that it writes into the same cache."""
        self._num_others += 1
        name, length = f"other {self._num_others}", self._rng.randint(1, 150)
        self._not_aborted.append(name)
        known = [case.prompt for case in self._cases if case.vision is None]
        prompt = self._rng.choice(known)[:length] if known and self._rng.random() < 0.7 else text(length, name)
        sampling = SamplingParams(seed=10**6 + self._num_others, max_tokens=20)
        return Request(name, prompt, sampling, priority=self._rng.choice((-1, 0, 0, 1)))


@dataclass(frozen=True)
class GateReport:
    """What a variant came to."""

    differences: list[str]
    stats: EngineStats


class Gate:
    """A model and what it answers when nothing disturbs it."""

    def __init__(self, model: Qwen35, new_recorder: Callable[[], GraphRecorder] | None = None) -> None:
        """`new_recorder` takes the GPU's place where steps are captured."""
        self._model, self._tower = with_tower(model)
        self._new_recorder = new_recorder
        self._references: dict[tuple[str, str], Answer] = {}
        self._shared: dict[tuple[str, int | None], ModelRunner] = {}

    def run(
        self, variant: Variant, cases: Sequence[Case], wrap: Callable[[Runner], Runner] = lambda runner: runner
    ) -> GateReport:
        """Asks the cases as the variant says. `wrap` may come between the engine and its runner."""
        expected = self.reference(variant.kv, cases)
        rounds, questions = _rounds_before(variant, cases), [case.request(case.name) for case in cases]
        with tempfile.TemporaryDirectory() as root:
            if variant.cache in ("restarted", "damaged"):
                self._ask(variant, cases, wrap, Path(root), rounds)
                rounds = []
            if variant.cache == "damaged":
                damage_files(Path(root))
            engine, answers = self._ask(variant, cases, wrap, Path(root), [*rounds, questions])
        found = {name: difference(expected[name], answer) for name, answer in sorted(answers.items())}
        return GateReport([f"{variant}, {name}: {what}" for name, what in found.items() if what], engine.stats())

    def _ask(
        self,
        variant: Variant,
        cases: Sequence[Case],
        wrap: Callable[[Runner], Runner],
        root: Path,
        rounds: Sequence[Sequence[Request]],
    ) -> tuple[Engine, dict[str, Answer]]:
        """An engine that was asked round after round and closed, and the answers of the last one."""
        engine, stepped = self.open(variant, cases, wrap, root)
        answers: dict[str, Answer] = {}
        with engine:
            client = Client(engine, variant, cases)
            stepped.before_step = client.before_step
            for requests in rounds:
                if variant.cache == "disk":
                    forget_memory(engine)
                answers = client.ask(requests)
        check_nothing_leaks(engine)
        return engine, answers

    def open(
        self,
        variant: Variant,
        cases: Sequence[Case],
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
        root: Path | None = None,
    ) -> tuple[Engine, SteppedRunner]:
        """An engine for these cases, with prefixes on disk under `root` where the variant has them; close it."""
        config = self.config(variant, cases)
        runner, disk = self._runner(variant.kv, config), None
        if root and variant.cache in ON_DISK:
            config = replace(config, prefix_disk=disk_config(root))
            heads = f"{config.speculation.with_mtp} {config.speculation.with_dflash}"
            disk = open_tier(runner, root, {"kv": variant.kv, "heads": heads})
        stepped = SteppedRunner(wrap(runner))
        size = config.speculation.draft_vocab_size
        listed = RestlessVocabulary(size, runner.vocab_size) if size else None
        table = TOKEN_TABLE if HAS_GRAMMARS else None
        engine = Engine(stepped, config, table, disk=disk, draft_vocabulary=listed)
        if variant.drafts.startswith(("oracle", "mixed")):
            expected = self.reference(variant.kv, cases)
            known = {case.sampling.seed or 0: expected[case.name].token_ids for case in cases}
            speak = Oracle if variant.drafts.startswith("oracle") else MixedOracle
            engine._speculator = speak(config.speculation, known)
        return engine, stepped

    def config(self, variant: Variant, cases: Sequence[Case]) -> EngineConfig:
        """Of an engine for these cases."""
        return _config(variant, cases)

    def reference(self, kv: str, cases: Sequence[Case]) -> dict[str, Answer]:
        """By name: alone, in one piece, without a cache or drafts."""
        missing = [case for case in cases if (kv, case.name) not in self._references]
        if missing:
            config = EngineConfig(4608, MAX_PAGES, max_num_seqs=1, max_num_batched_tokens=8192, eos_token_ids=(EOS,))
            with Engine(self._runner(kv, config), config, TOKEN_TABLE if HAS_GRAMMARS else None) as engine:
                for case in missing:
                    self._references[kv, case.name] = read(engine.submit(case.request(case.name)))
        return {case.name: self._references[kv, case.name] for case in cases}

    def _runner(self, kv: str, config: EngineConfig) -> ModelRunner:
        """On a GPU all variants of a KV format share one: its graphs are dear, and its memory is then never clean."""
        if not uses_kernels(self._model.device):
            return new_runner(self._model, kv, config, tower=self._tower)
        size = config.speculation.draft_vocab_size
        if (kv, size) not in self._shared:
            widest = EngineConfig(
                4608,
                MAX_PAGES,
                num_checkpoints=MANY,
                speculation=SpeculationConfig(SpeculationMethod.AUTO, 15, draft_vocab_size=size, block_size=16),
            )
            recorder = self._new_recorder() if self._new_recorder else None
            self._shared[kv, size] = new_runner(self._model, kv, widest, recorder, self._tower)
        return self._shared[kv, size]


def new_runner(
    model: Qwen35,
    kv: str,
    config: EngineConfig,
    recorder: GraphRecorder | None = None,
    tower: Tower | None = None,
) -> ModelRunner:
    """With the memory and, on a GPU or over a `recorder`, the graphs of this config."""
    shape = MemoryShape(
        KVFormat.parse(kv),
        1 + config.num_pages,
        config.max_num_seqs,
        config.num_checkpoints,
        config.rows_per_sequence,
        config.speculation.with_mtp,
        STATES[kv],
        kept_rows=0 if uses_kernels(model.device) else 20,
    )
    if config.speculation.with_dflash:
        drafter = small_drafter(model, config.speculation.block_size)
        model = replace(model, drafter=drafter, tap_ids=drafter.spec.target_layer_ids)
        shape = replace(
            shape, drafter=drafter.spec, ring_tokens=ring_tokens(drafter.spec, config.max_num_batched_tokens)
        )
    if size := config.speculation.draft_vocab_size:
        model = trim_model(model, torch.arange(size))
    runner = ModelRunner(model, Memory.allocate(model.spec, shape, model.dtype, model.device), config, tower)
    runner.capture_graphs(recorder=recorder)
    return runner


def small_drafter(model: Qwen35, block_size: int) -> DFlash:
    """Random, for this model: two layers that slide over 40 tokens and one that sees all."""
    target = model.spec
    spec = DFlashSpec(
        hidden_size=target.hidden_size,
        num_hidden_layers=3,
        layer_types=(SLIDING, SLIDING, "full_attention"),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=target.vocab_size,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        sliding_window=40,
        is_causal=None,
        target_layer_ids=(0, target.num_hidden_layers - 1),
        mask_token_id=3,
        block_size=block_size,
        num_target_layers=target.num_hidden_layers,
    )
    return dummy_drafter(spec, WeightFormat.BF16, model.device, model.dtype)


def _config(variant: Variant, cases: Sequence[Case]) -> EngineConfig:
    largest = max(-(-(len(case.prompt) + (case.sampling.max_tokens or 0)) // PAGE_TOKENS) for case in cases)
    # Few: the largest just fits, as do the requests that come beside.
    num_pages = max(3, largest) if variant.pages == "few" else MAX_PAGES
    return EngineConfig(
        max_model_len=4608,
        num_pages=num_pages,
        num_checkpoints=NUM_CHECKPOINTS.get(variant.cache, MANY),
        max_num_seqs=SLOTS[variant.load],
        max_num_waiting=200,
        max_num_batched_tokens=CHUNK[variant.chunk],
        eos_token_ids=(EOS,),
        boundary_token_ids=(BOUNDARY,),
        speculation=SPECULATION[variant.drafts],
    )


def _rounds_before(variant: Variant, cases: Sequence[Case]) -> list[list[Request]]:
    """What fills the cache with the cases' prompts, and what drives them out of it."""
    one_token = {"max_tokens": 1, "min_tokens": 0}
    warming = [
        replace(r, sampling=replace(r.sampling, **one_token)) for r in (case.request(case.name) for case in cases)
    ]
    prompts = [message(70, f"filler {i}") + message(115, f"filling {i}") for i in range(4)]
    driving = [Request(f"filler {i}", prompt, SamplingParams(max_tokens=1)) for i, prompt in enumerate(prompts)]
    return {"cold": [], "evicted": [warming, driving]}.get(variant.cache, [warming])


def check_nothing_leaks(engine: Engine) -> None:
    """Of a closed engine that was idle: every page is free or cached, and free once the cache is cleared."""
    scheduler = engine._scheduler
    assert scheduler.is_idle
    assert not engine._speculator._drafting
    scheduler.check()
    stats = scheduler.stats()
    assert stats.num_free_pages + stats.prefix.num_pages == stats.num_pages
    scheduler.clear_cache()
    scheduler.check()
    assert scheduler.stats().num_free_pages == stats.num_pages
