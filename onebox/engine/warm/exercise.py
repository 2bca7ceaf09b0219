"""Uses an engine once in every way before it is ready, and sets aside the memory that this took.

What a GPU does lazily (loading code, growing workspaces) then happens here. After `reserve_workspace` the engine's
own process takes no more device memory: what a step needs beyond the model and its memory comes from the reserved
block, and an allocation that does not fit there fails its own request instead of growing.
"""

from dataclasses import replace

import torch

from onebox.engine.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.request import Failed, Request, SamplingParams
from onebox.engine.step import Runner
from onebox.spec.errors import OneboxError
from onebox.spec.hardware import MIB
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["exercise", "reserve_workspace"]

_NUM_TOKENS = 4
_SMALL_BYTES = 48 * MIB
"""For tensors up to 1 MiB, which torch keeps apart from the others."""
_SPARE_BYTES = 128 * MIB
"""Beyond the largest use seen: other sizes of prompts divide the block in other ways."""


def exercise(runner: Runner, config: EngineConfig, *, fully: bool) -> None:
    """Runs prompts and a few steps, with one slot and with all slots taken.

    `fully`: also the largest prompt chunk, a cached prefix, log-probabilities, penalties and biases. On an engine of
    its own, so that neither counts nor cached prefixes remain.
    """
    plain = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    short = _request(runner, config, PAGE_TOKENS + 1, plain)
    if short is None:
        return
    with Engine(runner, config) as engine:
        _run(engine, short, 1)
        # Its prompt is in the prefix cache now.
        adjusted = _request(runner, config, PAGE_TOKENS + 1, _adjusted(plain))
        _run(engine, adjusted if fully else short, config.max_num_seqs)
        if fully:
            _run(engine, _request(runner, config, config.max_num_batched_tokens + PAGE_TOKENS + 1, plain), 1)


def _adjusted(plain: SamplingParams) -> SamplingParams:
    """With everything that is done to logits, and log-probabilities of the prompt and of the answer."""
    return replace(
        plain,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        min_tokens=2,
        logprobs=5,
        prompt_logprobs=5,
    )


def _request(runner: Runner, config: EngineConfig, num_prompt: int, sampling: SamplingParams) -> Request | None:
    """A request with a prompt of so many tokens, or as many as the context leaves room for."""
    num_prompt = min(num_prompt, config.max_model_len // 2, (config.num_pages - 1) * PAGE_TOKENS)
    if num_prompt < 1:
        return None
    prompt = tuple(place % runner.vocab_size for place in range(num_prompt))
    max_tokens = min(_NUM_TOKENS, config.max_model_len - num_prompt)
    sampling = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
    return Request("warm-up", prompt, sampling)


def _run(engine: Engine, request: Request | None, count: int) -> None:
    for handle in engine.submit_copies(request, count) if request else ():
        *_, last = handle
        if isinstance(last, Failed):
            raise OneboxError(f"The model was loaded and cannot be run. {last.message}")


def reserve_workspace(runner: Runner, config: EngineConfig, device: torch.device, *, owns_process: bool) -> None:
    """Sets aside what steps take beyond model, memory and graphs.

    Measured by a run whose largest use is that of any later step: a whole chunk of prompt tokens, with logprobs. In a
    process of the engine's own, torch may take no more than it holds then; others may have more work for it.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    exercise(runner, config, fully=True)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    block = torch.empty(peak + _SPARE_BYTES, dtype=torch.uint8, device=device)
    small = [torch.empty(MIB, dtype=torch.uint8, device=device) for _ in range(_SMALL_BYTES // MIB)]
    del block, small
    if owns_process:
        held, total = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, held / total), device.index or 0)
