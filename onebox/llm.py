"""Offline use: a model, prompts in, answers out.

    from onebox import LLM, SamplingParams
    answers = LLM("path/to/checkpoint").generate(["Once upon a time"], SamplingParams(max_tokens=64))

Runs the same engine as the server, with all its batching, caching and speculation. Names are those of vLLM's offline
API: its snippets run with the import replaced.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onebox.checkpoint.hub import resolve_source
from onebox.engine.api import (
    Counts,
    EngineOptions,
    Failed,
    Finished,
    FinishReason,
    Pictures,
    PromptLogprobs,
    Request,
    RequestHandle,
    SamplingParams,
    TokenInfo,
    TokenLogprob,
    Tokens,
    Vision,
    plan_engine,
    start_engine,
)
from onebox.spec.errors import OneboxError, UsageError
from onebox.spec.model import read_config
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.patches import PictureReader
from onebox.text.tokenizer import Tokenizer
from onebox.text.vocabulary import token_table

__all__ = ["LLM", "Completion", "SamplingParams"]

_log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]


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
    prompt: str | None = None
    """As text; None where token ids were given."""
    request_id: str = ""
    index: int = 0
    finished: bool = True

    @property
    def outputs(self) -> tuple["Completion"]:
        """The answers to its prompt, as vLLM has them: this one."""
        return (self,)


class LLM:
    """A loaded model. Options are those of `onebox serve`, by the names of `EngineOptions`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        known = EngineOptions.__dataclass_fields__.keys()
        for name in options.keys() - known:
            _explain(name, options.pop(name))
        directory = self._directory = resolve_source(model)
        self.tokenizer = Tokenizer.load(directory)
        defaults = self._defaults = GenerationDefaults.load(directory)
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

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as transformers has it, with `apply_chat_template`."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the checkpoint's generation_config.json."""
        names = [name for name in self._defaults.__dataclass_fields__ if name != "eos_token_ids"]
        return SamplingParams(**{name: getattr(self._defaults, name) for name in names})

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Answers to one conversation, or to each of several, by the checkpoint's chat template.

        Without parameters those of the checkpoint are used. The text begins with the reasoning, where there is one.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        template = ChatTemplate.load(self._directory)
        prompts = []
        for conversation in conversations:
            text = template.render(conversation, chat_template_kwargs, tools, shield=self.tokenizer.shield)
            prompts.append(self.tokenizer.encode_rendered(text))
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int] | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,  # noqa: ARG002 - vLLM's; nothing is drawn here
    ) -> list[Completion]:
        """Answers in the order of the prompts, texts or token ids; one set of parameters for all, or one for each.

        A prompt may be {"prompt": text} or {"prompt_token_ids": ids} too; a text with <|image_pad|> in it comes with
        {"multi_modal_data": {"image": image or list of images}}, each a file's bytes or an image of Pillow. Any number
        of prompts: those that the queue does not hold yet are submitted as others finish.
        """
        given = [prompts] if isinstance(prompts, str) else prompts
        plain = [_plain_prompt(p) for p in given]
        params = SamplingParams() if sampling_params is None else sampling_params
        each = [params] * len(plain) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(plain):
            raise UsageError(f"There are {len(plain)} prompts and {len(each)} sets of sampling parameters.")
        encoded = [self._encode(text, _images(p)) for text, p in zip(plain, given, strict=True)]
        token_ids = [prompt for prompt, _ in encoded]
        places = self.engine.config.max_num_seqs + self.engine.config.max_num_waiting
        handles: list[RequestHandle] = []
        answers: list[Completion] = []
        for (prompt, vision), sampling in zip(encoded, each, strict=True):
            if len(handles) - len(answers) == places:
                answers.append(self._read(handles[len(answers)], token_ids[len(answers)]))
            self._num_asked += 1
            handles.append(self.engine.submit(Request(f"generate-{self._num_asked}", prompt, sampling, vision=vision)))
        while len(answers) < len(handles):
            answers.append(self._read(handles[len(answers)], token_ids[len(answers)]))
        for answer, prompt_text in zip(answers, plain, strict=True):
            answer.prompt = prompt_text if isinstance(prompt_text, str) else None
        return answers

    def _encode(self, prompt: str | Sequence[int], images: Sequence[Any]) -> tuple[tuple[int, ...], Vision | None]:
        """Token ids, with a pad for each embedding of the images, and the images' patches."""
        if not images:
            return self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt), None
        if not isinstance(prompt, str):
            raise UsageError("Images come with a prompt as text, which has <|image_pad|> in the place of each.")
        reader = PictureReader.load(self._directory, read_config(self._directory))
        pictures = [reader.open("image", _file_bytes(image)) for image in images]
        patches = np.concatenate([picture.read() for picture in pictures])
        vision = Vision(Pictures(patches, tuple(picture.grid for picture in pictures)))
        return reader.encode(prompt, pictures, self.tokenizer.encode), vision

    def _read(self, handle: RequestHandle, prompt: tuple[int, ...]) -> Completion:
        answer = Completion(prompt, request_id=handle.request_id)
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


def _plain_prompt(prompt: str | Sequence[int] | Mapping[str, Any]) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"}
    if unknown or not prompt.keys() & {"prompt", "prompt_token_ids"}:
        raise UsageError(
            f"A prompt holds {sorted(unknown)}; it takes prompt or prompt_token_ids, and multi_modal_data."
        )
    found: str | Sequence[int] = prompt.get("prompt_token_ids") or prompt["prompt"]
    return found


def _images(prompt: str | Sequence[int] | Mapping[str, Any]) -> Sequence[Any]:
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not media:
        return ()
    if media.keys() != {"image"}:
        raise UsageError(f"multi_modal_data holds {sorted(media)}; it takes image alone.")
    found = media["image"]
    return found if isinstance(found, list | tuple) else (found,)


def _file_bytes(image: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _explain(name: str, value: Any) -> None:
    """Says why an option of vLLM has no effect here, or refuses it, as `onebox serve` does with its flag."""
    from onebox.cli.vllm_flags import FLAGS

    flag = FLAGS.get(name.replace("_", "-"))
    if flag is None:
        raise UsageError(f"LLM has no option {name!r}.")
    if flag.accepted is not None and str(value) not in flag.accepted:
        raise UsageError(f"{name}={value!r} is not supported: {flag.reason}.")
    _log.info("%s=%r: %s.", name, value, flag.reason)
