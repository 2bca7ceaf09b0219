"""Offline use: a model, prompts in, answers out.

    from onebox import LLM, SamplingParams
    answers = LLM("path/to/checkpoint").generate(["Once upon a time"], SamplingParams(max_tokens=64))

Runs the same engine as the server, with all its batching, caching and speculation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebox.checkpoint.hub import resolve_source
from onebox.engine.api import (
    Counts,
    EngineOptions,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestHandle,
    SamplingParams,
    TokenInfo,
    TokenLogprob,
    Tokens,
    plan_engine,
    start_engine,
)
from onebox.spec.errors import OneboxError, UsageError
from onebox.text.generation import GenerationDefaults
from onebox.text.tokenizer import Tokenizer
from onebox.text.vocabulary import token_table

__all__ = ["LLM", "Completion", "SamplingParams"]


@dataclass
class Completion:
    """One answer."""

    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    counts: Counts | None = None


class LLM:
    """A loaded model. Options are those of `onebox serve`, by the names of `EngineOptions`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        unknown = options.keys() - EngineOptions.__dataclass_fields__.keys()
        if unknown:
            raise UsageError(f"LLM has no option {sorted(unknown)[0]!r}.")
        directory = resolve_source(model)
        self.tokenizer = Tokenizer.load(directory)
        defaults = GenerationDefaults.load(directory)
        tokens = TokenInfo(
            defaults.eos_token_ids,
            self.tokenizer.message_token_ids,
            token_table(self.tokenizer, defaults.eos_token_ids),
            self.tokenizer.added_token_ids,
            self.tokenizer.thinking_token_ids,
        )
        self.plan = plan_engine(directory, EngineOptions(**options), tokens)
        self.engine = start_engine(self.plan, tokens)
        self._num_asked = 0

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
    ) -> list[Completion]:
        """Answers in the order of the prompts, texts or token ids; one set of parameters for all, or one for each.

        Any number of prompts: those that the queue does not hold yet are submitted as others finish.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"There are {len(prompts)} prompts and {len(each)} sets of sampling parameters.")
        token_ids = [self.tokenizer.encode(p) if isinstance(p, str) else tuple(p) for p in prompts]
        places = self.engine.config.max_num_seqs + self.engine.config.max_num_waiting
        handles: list[RequestHandle] = []
        answers: list[Completion] = []
        for prompt, sampling in zip(token_ids, each, strict=True):
            if len(handles) - len(answers) == places:
                answers.append(self._read(handles[len(answers)], token_ids[len(answers)]))
            self._num_asked += 1
            handles.append(self.engine.submit(Request(f"generate-{self._num_asked}", prompt, sampling)))
        while len(answers) < len(handles):
            answers.append(self._read(handles[len(answers)], token_ids[len(answers)]))
        return answers

    def _read(self, handle: RequestHandle, prompt: tuple[int, ...]) -> Completion:
        answer = Completion(prompt)
        for event in handle:
            match event:
                case Tokens():
                    answer.token_ids += event.token_ids
                    answer.logprobs += event.logprobs
                case PromptLogprobs():
                    answer.prompt_logprobs += event.logprobs
                case Finished():
                    answer.finish_reason, answer.counts = event.reason, event.counts
                case Failed():
                    raise OneboxError(event.message)
        answer.text = self.tokenizer.decode(answer.token_ids)
        return answer
