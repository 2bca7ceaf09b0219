"""Runs a StepPlan on the model: states cleared and restored, prompts prefilled, tokens sampled and drafted.

Owns the model's memory. On a GPU a decode step is two captured graphs, the model and the sampling, with room between
them for what the host does to logits; on a CPU the same functions are called one by one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from onebox.engine.batch import ExactPacker
from onebox.engine.capture import GraphRecorder
from onebox.engine.config import EngineConfig
from onebox.engine.decode import DecodeOutcome, Decoder, DecodeStep, PlainStep
from onebox.engine.draft.kinds import Drafter
from onebox.engine.draft.vocabulary import ROWS_PER_STEP
from onebox.engine.graphs import GraphDecoder
from onebox.engine.images import PictureCache, content_tokens, encode_images
from onebox.engine.inputs import last_row
from onebox.engine.logits import RowLogprobs, allow_all, apply_adjustments
from onebox.engine.logprobs import LogprobRows, TokenLogprob
from onebox.engine.prefill import Prefiller, PrefillGraphs
from onebox.engine.request import Vision
from onebox.engine.shapes import MAX_STEP_ROWS, StepShapes
from onebox.engine.step import (
    DecodeRows,
    DraftDepths,
    EncodedImages,
    PromptChunk,
    Result,
    StepOutput,
    StepPlan,
    StepRun,
)
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35
from onebox.model.vision import Tower
from onebox.spec.errors import UnsupportedError

__all__ = ["ModelRunner"]

T = TypeVar("T")

_LOGPROB_ROWS = 64
"""Tokens of a prompt whose log-probabilities are computed together: the memory plan has room for so many."""


class ModelRunner:
    """The model, its memory, and the graphs of its decode steps."""

    def __init__(self, model: Qwen35, memory: Memory, config: EngineConfig, tower: Tower | None = None) -> None:
        self._model = model
        self._memory = memory
        self._config = config
        self._tower = tower
        self._pictures = PictureCache()
        with_mtp = config.speculation.with_mtp and model.mtp is not None
        self._prefiller = Prefiller(model, memory, config.max_num_seqs, with_mtp)
        self._decoder = Decoder(model, memory)
        self._packer = ExactPacker(model.device)
        self._prefill_graphs: PrefillGraphs | None = None
        self._graphs: GraphDecoder | None = None
        is_pinned = model.device.type == "cuda"
        self._row_numbers = torch.empty(2 * ROWS_PER_STEP, dtype=torch.int64, pin_memory=is_pinned)

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def memory(self) -> Memory:
        """Steps write into it; others may touch only pages and checkpoints that the scheduler holds for them."""
        return self._memory

    @property
    def first_checkpoint(self) -> int:
        """The memory's row of checkpoint 0: slots come before."""
        return self._config.max_num_seqs

    def capture_graphs(
        self, report: Callable[[int, int], None] = lambda *_: None, recorder: GraphRecorder | None = None
    ) -> None:
        """Captures the graphs of short prefills and of all decode steps, on a GPU; without them, steps run without.

        `report` is called with the number of captured shapes and of all. A `recorder` of its own takes the GPU's place.
        """
        if recorder is None:
            if self._model.device.type != "cuda":
                return
            recorder = GraphRecorder(self._model.device)
        shapes = StepShapes.of(self._config)
        prefills = PrefillGraphs(self._prefiller, recorder, self._config, shapes.num_pages)
        graphs = GraphDecoder(self._decoder, shapes, recorder)
        captured, total = itertools.count(1), len(prefills.num_rows) + len(graphs.sizes)
        with torch.inference_mode():
            for part in (prefills, graphs):
                part.capture(lambda: report(next(captured), total))
        self._prefill_graphs, self._graphs = prefills, graphs

    def put_draft_rows(self, places: Sequence[int], token_ids: Sequence[int]) -> None:
        """On the device's queue, between two steps: at most ROWS_PER_STEP rows. The host does not wait for it."""
        # The buffer was read before the outcome of the step that followed the last call.
        numbers = self._row_numbers[: 2 * len(places)].view(2, -1)
        numbers.copy_(torch.tensor([*places, *token_ids]).view(2, -1))
        with torch.inference_mode():
            self._model.put_draft_rows(*numbers.to(self._model.device, non_blocking=True))

    def rehearse(self) -> None:
        """Does what no request of the warm-up asks for, so that a device has its code loaded before one does.

        Rows of the head for drafts are replaced by themselves, and a row of logits gets a mask that allows everything.
        """
        with torch.inference_mode():
            allow_all(torch.zeros(1, self.vocab_size, device=self._model.device))
        if head := self._model.draft_head:
            token_ids = head.token_ids[:ROWS_PER_STEP].tolist()
            self.put_draft_rows(range(len(token_ids)), token_ids)

    def num_kernels(self) -> int:
        """Kernels in the graphs of the last decode step; 0 where there are no graphs."""
        return self._graphs.num_kernels() if self._graphs else 0

    def encode_images(self, prompt: tuple[int, ...], vision: Vision) -> EncodedImages:
        with torch.inference_mode():
            tower, device = self._vision_tower(), self._model.device
            return encode_images(self._model.spec, tower, prompt, vision, device, self._pictures)

    def cache_tokens(self, prompt: tuple[int, ...], vision: Vision) -> tuple[int, ...]:
        return content_tokens(self._model.spec, self._vision_tower(), prompt, vision)

    def _vision_tower(self) -> Tower:
        if self._tower is None:
            raise UnsupportedError("This model was started without its vision tower; send text only.")
        return self._tower

    def start(self, plan: StepPlan) -> StepRun:
        """Prepares the slots and queues the first group of decode rows, where captured graphs make that quick."""
        groups = list(_in_groups(plan.rows, lambda part: len(part.token_ids)))
        queued = None
        with torch.inference_mode():
            for slot in plan.cleared_slots:
                self._memory.clear(slot)
            for checkpoint, slot in plan.restored:
                self._memory.copy(self._config.max_num_seqs + checkpoint, slot)
            for chunk in plan.chunks:
                self._decoder.drop_context(chunk.slot)
            if self._graphs and groups:
                queued = self._queue_graphs(groups[0], is_alone=_is_alone(plan, groups))
        return _ModelRun(self, plan, groups, queued)

    def finish(self, run: "_ModelRun") -> StepOutput:
        """Computes what `start` did not queue, and reads all results.

        The prompts are queued behind the first group of rows, so that the device has work while that is read.
        """
        plan, queued = run.plan, run.queued
        with torch.inference_mode():
            hidden = self._queue_chunks(plan.chunks) if plan.chunks else ()
            results: list[Result | Exception] = []
            for parts in run.groups:
                is_alone = _is_alone(plan, run.groups)
                group = queued or self._queue_graphs(parts, is_alone=is_alone) or self._queue_plain(parts)
                queued = None
                results += _read(group)
            chunks = self._chunk_results(plan.chunks, hidden) if plan.chunks else ()
            return StepOutput(chunks, tuple(results))

    def _queue_chunks(self, chunks: tuple[PromptChunk, ...]) -> "Sequence[Tensor] | Exception":
        """The hidden states of each chunk's tokens, [n, H], valid until the next call; or why there are none."""
        try:
            hidden = self._prefill_graphs.start(chunks) if self._prefill_graphs else None
            if hidden is None:
                hidden = self._prefiller.run(chunks)
        except torch.OutOfMemoryError as error:
            # Only their own slots, pages and checkpoints were written: the answers beside them can go on.
            return error
        lengths = [len(chunk.token_ids) for chunk in chunks]
        return torch.split(hidden[: sum(lengths)], lengths)

    def _chunk_results(
        self, chunks: tuple[PromptChunk, ...], hidden: "Sequence[Tensor] | Exception"
    ) -> tuple[Result | Exception, ...]:
        if isinstance(hidden, Exception):
            return (hidden,) * len(chunks)
        results = [self._chunk_result(chunk, rows) for chunk, rows in zip(chunks, hidden, strict=True)]
        drawing = [place for place, chunk in enumerate(chunks) if chunk.draw]
        for group in _in_groups(drawing, lambda _: 1):
            last = torch.stack([hidden[place][-1] for place in group])
            parts = [last_row(chunks[place]) for place in group]
            for place, result in zip(group, self._sample_after(parts, last), strict=True):
                before = results[place]
                if isinstance(before, Exception):
                    result = before
                elif isinstance(result, Result):
                    result = result._replace(num_accepted=0, prompt_logprobs=before.prompt_logprobs)
                results[place] = result
        return tuple(results)

    def _sample_after(self, parts: list[DecodeRows], hidden: Tensor) -> list[Result | Exception]:
        """Results of parts of one row each whose hidden states [n, H] are computed already."""
        depths = _depths(parts)
        step = self._graphs.start_after(parts, depths, hidden) if self._graphs else None
        if step is None:
            inputs = self._packer.inputs(parts, depths.most, is_computed=True)
            forwarded = self._decoder.logits_for(hidden)
            step = PlainStep(self._decoder, forwarded, inputs, depths, parts)
        return _read(_sample(parts, step))

    def _chunk_result(self, chunk: PromptChunk, hidden: Tensor) -> Result | Exception:
        """The result of a chunk whose hidden states [n, H] are computed, before anything is sampled after it."""
        try:
            return Result(prompt_logprobs=self._prompt_logprobs(chunk, hidden))
        except Exception as error:
            return error

    def _prompt_logprobs(self, chunk: PromptChunk, hidden: Tensor) -> Sequence[TokenLogprob]:
        """Of the tokens after this chunk's [n, H], up to the end of the prompt."""
        if chunk.prompt_logprobs is None:
            return ()
        following = [*chunk.token_ids[1:], *([] if chunk.following is None else [chunk.following])]
        found: list[LogprobRows] = []
        for start in range(0, len(following), _LOGPROB_ROWS):
            tokens = following[start : start + _LOGPROB_ROWS]
            values = RowLogprobs(self._model.logits(hidden[start : start + len(tokens)]))
            found.append(values.rows_of(list(range(len(tokens))), tokens, chunk.prompt_logprobs))
        return LogprobRows.join(found)

    def _queue_graphs(self, parts: list[DecodeRows], *, is_alone: bool) -> "_QueuedGroup | None":
        """Gives the device a group of rows, up to the drafts; None where no graphs of its shape were captured."""
        step = self._graphs.start(parts, _depths(parts), is_alone=is_alone) if self._graphs else None
        return _sample(parts, step) if step else None

    def _queue_plain(self, parts: list[DecodeRows]) -> "_QueuedGroup":
        """The same without graphs."""
        depths = _depths(parts)
        inputs = self._packer.inputs(self._graphs.leave(parts) if self._graphs else parts, depths.most)
        forwarded = self._decoder.forward(inputs.batch)
        return _sample(parts, PlainStep(self._decoder, forwarded, inputs, depths, parts))


class _QueuedGroup(NamedTuple):
    """Decode rows that the device computes."""

    parts: list[DecodeRows]
    step: DecodeStep
    logprobs: RowLogprobs | Exception | None
    """Of all rows, where one of the parts asks for logprobs; the error where they could not be computed."""
    failed_rows: dict[int, Exception]
    """Rows whose logits could not be adjusted: no token of theirs may be used."""


class _ModelRun(NamedTuple):
    """A step under way on the model."""

    runner: ModelRunner
    plan: StepPlan
    groups: list[list[DecodeRows]]
    queued: _QueuedGroup | None
    """The first group, where the device has it already."""

    def finish(self) -> StepOutput:
        return self.runner.finish(self)


def _sample(parts: list[DecodeRows], step: DecodeStep) -> _QueuedGroup:
    """Queues the sampling of a step whose forward pass is queued."""
    num_rows = sum(len(part.token_ids) for part in parts)
    has_logprobs = any(part.draw.sampling.logprobs is not None for part in parts)
    if has_logprobs or any(part.draw.adjustments for part in parts):
        step.complete()
    logprobs = _logprobs(step.forwarded.logits[:num_rows]) if has_logprobs else None
    failed_rows = apply_adjustments(step.forwarded.logits, parts)
    step.sample()
    return _QueuedGroup(parts, step, logprobs, failed_rows)


def _logprobs(logits: Tensor) -> RowLogprobs | Exception:
    try:
        return RowLogprobs(logits)
    except Exception as error:
        return error


def _read(group: _QueuedGroup) -> list[Result | Exception]:
    """The results of a group, in its order; waits for the device."""
    outcome = group.step.read()
    results, first_row = list[Result | Exception](), 0
    for place, part in enumerate(group.parts):
        try:
            results.append(_result(group, place, first_row, outcome))
        except Exception as error:
            results.append(error)
        first_row += len(part.token_ids)
    return results


def _result(group: _QueuedGroup, place: int, first_row: int, outcome: DecodeOutcome) -> Result:
    """The result of one part, whose rows start at `first_row`; raises where it cannot be used."""
    part, logprobs = group.parts[place], group.logprobs
    num_accepted, draw = outcome.num_accepted[place], part.draw
    first_new, end = first_row + draw.first_new, first_row + num_accepted
    if not all(outcome.is_finite[first_row:end]):
        raise FloatingPointError("its logits are not finite numbers")
    for row in range(first_row, end):
        if row in group.failed_rows:
            raise group.failed_rows[row]
    token_ids = outcome.token_ids[first_new:end]
    num_top = draw.sampling.logprobs
    values: tuple[TokenLogprob, ...] = ()
    if logprobs and token_ids and num_top is not None:
        if isinstance(logprobs, Exception):
            raise logprobs
        values = logprobs.of(list(range(first_new, end)), token_ids, num_top)
    return Result(tuple(token_ids), num_accepted, tuple(outcome.drafts[place][: draw.depth]), values)


def _is_alone(plan: StepPlan, groups: list[list[DecodeRows]]) -> bool:
    """Whether the next step's rows follow from one group of this step: a sequence at its prompt's end joins them."""
    return len(groups) == 1 and not any(chunk.draw for chunk in plan.chunks)


def _depths(parts: Sequence[DecodeRows]) -> DraftDepths:
    mtp = block = 0
    for part in parts:
        if part.draw.drafter is Drafter.DFLASH:
            block = max(block, part.draw.depth)
        else:
            mtp = max(mtp, part.draw.depth)
    return DraftDepths(mtp, block)


def _in_groups(parts: Sequence[T], num_rows: Callable[[T], int]) -> Iterator[list[T]]:
    """The parts in their order, split into groups of at most MAX_STEP_ROWS rows."""
    group: list[T] = []
    total = 0
    for part in parts:
        if total + num_rows(part) > MAX_STEP_ROWS:
            yield group
            group, total = [], 0
        group.append(part)
        total += num_rows(part)
    if group:
        yield group
