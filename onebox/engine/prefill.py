"""Prefill: chunks of several prompts in one pass over the model, their states saved at the planned places.

On a GPU a short prefill is bound by its launches, hundreds of them, so up to 1,024 rows it is a captured graph
of the next larger of a few numbers of rows. Its pass over the weights takes about as long whatever that number;
a longer prefill keeps the device busy while the host launches. Both compute the same bits: a row's do not depend on the
number of rows.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebox.engine.capture import GraphRecorder
from onebox.engine.config import EngineConfig
from onebox.engine.inputs import PageTable
from onebox.engine.prompts import PromptInputs, PromptPacker, PromptSizes, exact_prompt_inputs, prompt_inputs
from onebox.engine.step import PromptChunk
from onebox.model.batch import Batch
from onebox.model.memory import Memory
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.dflash_memory import CAPTURED_PREFILL_ROWS

__all__ = ["PrefillGraphs", "Prefiller"]

_GRAPH_ROWS = (64, 128, 192, 256, 384, 512, 768, CAPTURED_PREFILL_ROWS)
"""Rows of captured prefills. Up to 64 most experts are not yet read; from then on rows cost little."""
_MAX_CHUNKS = 8
"""Of a captured prefill: each takes programs in every launch, also where it is blank."""
_SAVES_PER_CHUNK = 3


@dataclass(frozen=True)
class Prefiller:
    """Computes prompts into memory. Checkpoint c is the memory's row first_checkpoint + c."""

    model: Qwen35
    memory: Memory
    first_checkpoint: int
    with_mtp: bool
    """Whether the MTP head's KV entries are written too."""

    def run(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Computes the chunks without graphs; the hidden states of their tokens, [R, H]."""
        num_hidden = len(self.memory.hidden)
        self.save_before(chunks)
        inputs = exact_prompt_inputs(chunks, self.first_checkpoint, num_hidden, self.model.device)
        hidden, features = self._compute(inputs)
        self.save_after(chunks, (inputs.batch, features))
        return hidden

    def save_before(self, chunks: Sequence[PromptChunk]) -> None:
        """Saves what a block drafter's rings hold now and a state inside a chunk needs: the chunk may overwrite it."""
        if (drafts := self.memory.drafts) is None:
            return
        for chunk in chunks:
            for num_tokens, checkpoint in chunk.saves:
                first = max(0, num_tokens - drafts.window)
                drafts.copy_tokens(chunk.slot, self.first_checkpoint + checkpoint, first, chunk.start)

    def save_after(self, chunks: Sequence[PromptChunk], computed: tuple[Batch, Tensor | None] | None = None) -> None:
        """Saves the rest of such a state's ring: the chunk's own tokens.

        Where a chunk is longer than a ring, its first tokens are gone; they are written again from what was `computed`.
        """
        if (drafts := self.memory.drafts) is None:
            return
        first_row = 0
        for chunk in chunks:
            for num_tokens, checkpoint in chunk.saves:
                first, row = max(chunk.start, num_tokens - drafts.window), self.first_checkpoint + checkpoint
                if first >= chunk.end - drafts.ring_tokens:
                    drafts.copy_tokens(chunk.slot, row, first, num_tokens)
                elif computed and computed[1] is not None:
                    rows = slice(first_row + first - chunk.start, first_row + num_tokens - chunk.start)
                    self._write_again(computed[0], computed[1][rows], rows, row, num_tokens)
                else:
                    raise RuntimeError(f"A chunk of {len(chunk.token_ids)} tokens is longer than a drafter's ring.")
            first_row += len(chunk.token_ids)

    def _write_again(self, batch: Batch, features: Tensor, rows: slice, row: int, num_tokens: int) -> None:
        """Writes these rows of the batch into the ring of the memory's row `row`, up to the sequence's num_tokens."""
        if self.memory.drafts is None:
            return
        numbers = [0, len(features)], [row], [num_tokens]
        edges, slots, seen = (torch.tensor(n, dtype=torch.int32, device=features.device) for n in numbers)
        own = replace(
            batch,
            positions=batch.positions[:, rows],
            cu_rows=edges,
            slots=slots,
            seen=seen,
            slot_mapping=batch.slot_mapping[rows],
        )
        self.model.prefill_context(own, features, self.memory.drafts)

    def forward(self, inputs: PromptInputs) -> Tensor:
        """The hidden states [R, H]; asks the device for no value, so that it can be captured."""
        return self._compute(inputs)[0]

    def _compute(self, inputs: PromptInputs) -> tuple[Tensor, Tensor | None]:
        """(hidden states, features for a block drafter)."""
        model, memory = self.model, self.memory
        hidden, taps = model.prefill_tapped(inputs.batch, memory)
        features = taps.features(model.dtype) if taps else None
        if features is not None and memory.drafts:
            model.prefill_context(inputs.batch, features, memory.drafts)
        if self.with_mtp and model.mtp and memory.mtp:
            previous = torch.cat([memory.hidden, hidden])[inputs.previous]
            model.prefill_draft_kv(inputs.batch, previous, memory.mtp)
        memory.hidden[inputs.kept_to] = hidden[inputs.kept_from]
        return hidden, features


@dataclass(frozen=True)
class _PrefillGraph:
    """A captured prefill of so many rows, what it reads and what it writes."""

    packer: PromptPacker
    words: Tensor
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    """[R, H]."""


class PrefillGraphs:
    """Short prefills, replayed."""

    def __init__(self, prefiller: Prefiller, recorder: GraphRecorder, config: EngineConfig, num_pages: int) -> None:
        self._prefiller = prefiller
        self._recorder = recorder
        self.num_rows = _GRAPH_ROWS[: bisect_left(_GRAPH_ROWS, config.max_num_batched_tokens) + 1]
        """Of each graph, ascending."""
        self._max_chunks = min(config.max_num_seqs, _MAX_CHUNKS)
        self._num_kept = self._max_chunks * (1 + _SAVES_PER_CHUNK)
        self._table = PageTable(self._max_chunks, num_pages, is_pinned=recorder.is_pinned)
        self._page_table = self._table.rows.to(recorder.device)
        self._copied = recorder.new_event()
        self._graphs: dict[int, _PrefillGraph] = {}
        """By number of rows."""

    def capture(self, report: Callable[[], None]) -> None:
        """Captures all, the largest first; reports after each."""
        for num_rows in reversed(self.num_rows):
            self._graphs[num_rows] = self._capture(num_rows, is_first=not self._graphs)
            report()

    def start(self, chunks: Sequence[PromptChunk]) -> Tensor | None:
        """Queues a prefill of these chunks; the hidden states of their tokens, [R, H], valid until the next one.

        None, and nothing done, where no graph holds them.
        """
        graph = self._find(chunks)
        if graph is None:
            return None
        # Nothing may be read of a prefill in the middle of a prompt: its inputs may still be on their way.
        self._copied.synchronize()
        prefiller = self._prefiller
        packed = graph.packer.pack(chunks, prefiller.first_checkpoint, len(prefiller.memory.hidden))
        graph.words.copy_(packed, non_blocking=True)
        if num_changed := self._table.put(chunks):
            self._page_table[:num_changed].copy_(self._table.rows[:num_changed], non_blocking=True)
        self._copied.record()
        prefiller.save_before(chunks)
        graph.graph.replay()
        prefiller.save_after(chunks)
        return graph.hidden

    def _find(self, chunks: Sequence[PromptChunk]) -> _PrefillGraph | None:
        sizes = PromptSizes.of(chunks)
        if sizes.num_chunks > self._max_chunks or sizes.num_kept > self._num_kept or any(c.images for c in chunks):
            return None
        place = bisect_left(self.num_rows, sizes.num_rows)
        return self._graphs[self.num_rows[place]] if place < len(self.num_rows) else None

    def _capture(self, num_rows: int, *, is_first: bool) -> _PrefillGraph:
        sizes = PromptSizes(num_rows, self._max_chunks, self._num_kept)
        packer = PromptPacker(sizes, is_pinned=self._recorder.is_pinned)
        words = packer.words.to(self._page_table.device)

        def work() -> Tensor:
            return self._prefiller.forward(prompt_inputs(words, sizes, self._page_table))

        if is_first:
            work()  # what is made once and kept, such as tables, must not be made in a capture
        graph, hidden = self._recorder.record(work)
        return _PrefillGraph(packer, words, graph, hidden)
