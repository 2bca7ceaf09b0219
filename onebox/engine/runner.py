"""Runs a Batch through the plain float32 model: one row after the other, each against its own slot's cache.

A row is computed by itself, so its result cannot depend on its neighbours, and an exception in it ends it alone.
"""

import logging

import torch

from onebox.engine.batch import Batch, Row, StepOutput
from onebox.engine.sampler import sample
from onebox.model import reference
from onebox.model.reference import Cache, Weights
from onebox.spec.model import ModelSpec

__all__ = ["ReferenceRunner"]

_log = logging.getLogger(__name__)


class ReferenceRunner:
    """The model, its weights, and a cache for each slot in use."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._spec = spec
        self._weights = weights
        self._caches: dict[int, Cache] = {}

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    def run(self, batch: Batch) -> StepOutput:
        with torch.inference_mode():
            return StepOutput(tuple(self._guarded(row) for row in batch.rows))

    def release(self, slot: int) -> None:
        self._caches.pop(slot, None)

    def _guarded(self, row: Row) -> tuple[int, ...] | Exception:
        try:
            return self._compute(row)
        except Exception as error:
            _log.exception("request %s failed at position %d", row.request_id, row.start)
            return error

    def _compute(self, row: Row) -> tuple[int, ...]:
        if row.start == 0:
            self._caches[row.slot] = Cache.empty(self._spec)
        cache = self._caches[row.slot]
        hidden = reference.forward(self._spec, self._weights, torch.tensor(row.token_ids), cache)
        if row.sampling is None:
            return ()
        logits = reference.lm_head(self._spec, self._weights, hidden[-1:])[0]
        return (sample(logits.numpy(), row.sampling, row.end),)
