"""Runs a StepPlan on the model: states cleared and restored, prompts prefilled, tokens drawn and drafted.

Owns the model's memory. On a GPU a decode step is two captured graphs, the model and the drawing, with room between
them for what the host does to logits; on a CPU the same functions are called.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from onebox.engine.logits import apply_adjustments
from onebox.engine.step import StepPlan, PromptChunk, Result, DecodeRows, EncodedImages, StepOutput
from onebox.engine.config import EngineConfig
from onebox.engine.decode import Decoder, DecodeOutcome, PlainStep, DecodeStep
from onebox.engine.graphs import GraphDecoder
from onebox.engine.inputs import InputPacker, StepSizes, StepInputs, exact_sizes, last_row, unpack
from onebox.engine.logits import RowLogprobs
from onebox.engine.prefill import prefill
from onebox.engine.request import TokenLogprob, Vision
from onebox.engine.images import see
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35
from onebox.model.vision import Tower
from onebox.spec.errors import UnsupportedError

__all__ = ["ModelRunner"]

MAX_ROWS = 64
"""DecodeRows that the decode kernels take at once; a larger step is computed in parts, with the same bits."""

T = TypeVar("T")


class ModelRunner:
    """The model, its memory, and the graphs of its decode steps."""

    def __init__(self, model: Qwen35, memory: Memory, config: EngineConfig, tower: Tower | None = None) -> None:
        self._model = model
        self._memory = memory
        self._config = config
        self._tower = tower
        self._decoder = Decoder(model, memory)
        self._graphs = GraphDecoder(self._decoder, model.device) if model.device.type == "cuda" else None

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    def num_kernels(self) -> int:
        """Kernels in the graphs of the last decode step; 0 where there are no graphs."""
        return self._graphs.num_kernels() if self._graphs else 0

    def see(self, prompt: tuple[int, ...], vision: Vision) -> EncodedImages:
        if self._tower is None:
            raise UnsupportedError("This model was started without its vision tower; send text only.")
        with torch.inference_mode():
            return see(self._model.spec, self._tower, prompt, vision, self._model.device)

    def run(self, batch: StepPlan, meanwhile: Callable[[], None]) -> StepOutput:
        with torch.inference_mode():
            if batch.pieces:
                meanwhile()  # prompts are not queued in an instant
            for slot in batch.cleared_slots:
                self._memory.clear(slot)
            for checkpoint, slot in batch.restored:
                self._memory.copy(self._config.max_num_seqs + checkpoint, slot)
            pieces = self._run_pieces(batch.pieces) if batch.pieces else ()
            return StepOutput(pieces, tuple(self._run_rows(batch, meanwhile)))

    def _run_pieces(self, pieces: tuple[PromptChunk, ...]) -> tuple[Result | Exception, ...]:
        with_mtp = self._config.speculation.with_mtp and self._model.mtp is not None
        hidden = prefill(self._model, self._memory, pieces, self._config.max_num_seqs, with_mtp=with_mtp)
        results: list[Result | Exception] = [
            Result(prompt_logprobs=self._prompt_logprobs(piece, rows))
            for piece, rows in zip(pieces, hidden, strict=True)
        ]
        drawing = [place for place, piece in enumerate(pieces) if piece.draw]
        for group in _in_groups(drawing, lambda _: 1):
            last = torch.stack([hidden[place][-1] for place in group])
            parts = [last_row(pieces[place]) for place in group]
            for place, result in zip(group, self._draw_after(parts, last), strict=True):
                told = results[place]
                if isinstance(result, Result) and isinstance(told, Result):
                    result = result._replace(num_kept=0, prompt_logprobs=told.prompt_logprobs)
                results[place] = result
        return tuple(results)

    def _draw_after(self, parts: list[DecodeRows], hidden: Tensor) -> list[Result | Exception]:
        """Results of parts of one row each whose hidden states [n, H] are known."""
        depth = _depth(parts)
        sizes, inputs = self._inputs(parts, depth)
        return self._draw(parts, PlainStep(self._decoder, self._decoder.judge(hidden), inputs, sizes, depth))

    def _prompt_logprobs(self, piece: PromptChunk, hidden: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the tokens after this piece's [n, H], as far as the prompt goes."""
        if piece.prompt_logprobs is None:
            return ()
        following = [*piece.token_ids[1:], *([] if piece.following is None else [piece.following])]
        found: list[TokenLogprob] = []
        for start in range(0, len(following), MAX_ROWS):
            tokens = following[start : start + MAX_ROWS]
            values = RowLogprobs(self._model.logits(hidden[start : start + len(tokens)]))
            found += values.of(list(range(len(tokens))), tokens, piece.prompt_logprobs)
        return tuple(found)

    def _run_rows(self, batch: StepPlan, meanwhile: Callable[[], None]) -> Iterator[Result | Exception]:
        groups = list(_in_groups(batch.rows, lambda part: len(part.token_ids)))
        # Whoever has come to the end of its prompt is in the next step too.
        is_alone = len(groups) == 1 and not any(piece.draw for piece in batch.pieces)
        for parts in groups:
            depth = _depth(parts)
            if self._graphs:
                step = self._graphs.start(parts, depth, meanwhile, is_alone=is_alone)
            else:
                step = self._start(parts, depth, meanwhile)
            yield from self._draw(parts, step, meanwhile)

    def _start(self, parts: Sequence[DecodeRows], depth: int, meanwhile: Callable[[], None]) -> DecodeStep:
        """What `GraphDecoder.start` does, without graphs."""
        meanwhile()
        sizes, inputs = self._inputs(parts, depth)
        return PlainStep(self._decoder, self._decoder.forward(inputs.batch), inputs, sizes, depth)

    def _inputs(self, parts: Sequence[DecodeRows], depth: int) -> tuple[StepSizes, StepInputs]:
        sizes = exact_sizes(parts, depth)
        return sizes, unpack(InputPacker(sizes).pack(parts).to(self._model.device), sizes)

    def _draw(
        self, parts: list[DecodeRows], step: DecodeStep, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Result | Exception]:
        """What the parts' rows give, from the model's word on them."""
        num_rows = sum(len(part.token_ids) for part in parts)
        are_wanted = any(part.draw.sampling.logprobs is not None for part in parts)
        values = RowLogprobs(step.forwarded.logits[:num_rows]) if are_wanted else None
        apply_adjustments(step.forwarded.logits, parts)
        step.draw()
        meanwhile()
        outcome = step.read()
        results, first_row = list[Result | Exception](), 0
        for place, part in enumerate(parts):
            results.append(_result(part, place, first_row, outcome, values))
            first_row += len(part.token_ids)
        return results


def _result(part: DecodeRows, place: int, first_row: int, outcome: DecodeOutcome, values: RowLogprobs | None) -> Result | Exception:
    """One part of what was decided."""
    kept, draw = outcome.num_kept[place], part.draw
    first_new, end = first_row + draw.first_new, first_row + kept
    if not all(outcome.is_number[first_row:end]):
        return FloatingPointError("its logits are not finite numbers")
    token_ids = outcome.token_ids[first_new:end]
    num_top = draw.sampling.logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if values and token_ids and num_top is not None:
        logprobs = values.of(list(range(first_new, end)), token_ids, num_top)
    return Result(tuple(token_ids), kept, tuple(outcome.drafts[place][: draw.depth]), logprobs)


def _depth(parts: Sequence[DecodeRows]) -> int:
    return max(part.draw.depth for part in parts)


def _in_groups(parts: Sequence[T], num_rows: Callable[[T], int]) -> Iterator[list[T]]:
    """The parts in their order, cut into groups of at most MAX_ROWS rows."""
    group: list[T] = []
    total = 0
    for part in parts:
        if total + num_rows(part) > MAX_ROWS:
            yield group
            group, total = [], 0
        group.append(part)
        total += num_rows(part)
    if group:
        yield group
