"""Whether answers of this model on this device are the same alone, in company, with drafts and from cached prefixes.

A benchmark's figures count only where they are: run before anything is timed.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from onebox.engine.api import (
    Engine,
    EngineConfig,
    Finished,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
    Tokens,
)
from onebox.engine.runner import ModelRunner
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.states import StateDtype

__all__ = ["find_differences"]

_PROMPT_TOKENS = (5, 70, 130, 300, 1100)
"""Within a page, across pages, and more than one captured prefill holds."""
_ANSWER_TOKENS = 20
_DRAFTS = 2
_CHECKPOINTS = 16

Answers = dict[str, tuple[int, ...]]


def find_differences(model: Qwen35, kv: str = "bf16", state_dtype: StateDtype = StateDtype.FLOAT32) -> list[str]:
    """A sentence for each answer that is not the one computed alone, without drafts and cache."""
    requests = _requests(model.spec.vocab_size)
    expected: Answers = {}
    formats = KVFormat.parse(kv), state_dtype
    with _engine(model, formats, num_seqs=1, drafts=0) as engine:
        for request in requests:
            expected |= _run(engine, [request])
    found = []
    for drafts in (0, _DRAFTS) if model.mtp else (0,):
        with _engine(model, formats, num_seqs=len(requests), drafts=drafts) as engine:
            for name, cached in (("in company", False), ("into the prefix cache", True), ("from it", True)):
                answers = _run(engine, [replace(request, cache_prompt=cached) for request in requests])
                wrong = [request_id for request_id, answer in answers.items() if answer != expected[request_id]]
                how = f"with {drafts} drafts, {kv} KV, {state_dtype} states"
                found += [f"{request_id} differs {name}, {how}." for request_id in wrong]
    return found


def _requests(vocab_size: int) -> list[Request]:
    draw = random.Random(1)  # noqa: S311 - prompts, no secrets
    requests = []
    for length in _PROMPT_TOKENS:
        prompt = tuple(draw.choices(range(vocab_size), k=length))
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(temperature=temperature, seed=length, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
            name = f"The answer after {length} tokens at temperature {temperature}"
            requests.append(Request(name, prompt, sampling, cache_prompt=False))
    return requests


@contextmanager
def _engine(model: Qwen35, formats: tuple[KVFormat, StateDtype], num_seqs: int, drafts: int) -> Iterator[Engine]:
    method = SpeculationMethod.MTP if drafts else SpeculationMethod.NONE
    length = max(_PROMPT_TOKENS) + _ANSWER_TOKENS + 16
    num_pages = num_seqs * (-(-length // PAGE_TOKENS) + 1)
    config = EngineConfig(
        max_model_len=length,
        num_pages=num_pages,
        num_checkpoints=_CHECKPOINTS,
        max_num_seqs=num_seqs,
        speculation=SpeculationConfig(method, drafts),
    )
    with_mtp = config.speculation.with_mtp
    kv, state_dtype = formats
    shape = MemoryShape(kv, num_pages + 1, num_seqs, _CHECKPOINTS, 1 + drafts, with_mtp, state_dtype)
    with torch.inference_mode():
        memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    runner = ModelRunner(model, memory, config)
    runner.capture_graphs()
    with Engine(runner, config) as engine:
        yield engine


def _run(engine: Engine, requests: list[Request]) -> Answers:
    answers: Answers = {}
    for request, handle in zip(requests, engine.submit_all(requests), strict=True):
        events = list(handle)
        if not isinstance(events[-1], Finished):
            raise RuntimeError(f"{request.request_id} failed: {events[-1]}")
        tokens = (event.token_ids for event in events if isinstance(event, Tokens))
        answers[request.request_id] = tuple(token for part in tokens for token in part)
    return answers
