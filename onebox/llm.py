"""Offline use: a model, prompts in, answers out.

    from onebox import LLM, SamplingParams
    answers = LLM("path/to/checkpoint").generate(["Once upon a time"], SamplingParams(max_tokens=64))

Runs the same engine as the server, with all its batching, caching and speculation. Names are those of vLLM's offline
API: its snippets run with the import replaced.
"""

import io
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
    TokenInfo,
    TokenLogprob,
    Tokens,
    Vision,
    plan_engine,
    start_engine,
)
from onebox.engine.api import SamplingParams as EngineSampling
from onebox.offline import AnswerReader
from onebox.offline import OfflineSamplingParams as SamplingParams
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
Sampling = SamplingParams | EngineSampling


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
    """Its place among the answers to its prompt."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    finished: bool = True
    others: tuple["Completion", ...] = field(default=(), repr=False)
    """Further answers to the same prompt, where `n` asks for several."""

    @property
    def outputs(self) -> tuple["Completion", ...]:
        """All answers to its prompt, as vLLM has them."""
        return (self, *self.others)

    @property
    def cumulative_logprob(self) -> float | None:
        return sum(each.logprob for each in self.logprobs) if self.logprobs else None


class LLM:
    """A loaded model. Options are those of `onebox serve`, by the names of `EngineOptions`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        known = EngineOptions.__dataclass_fields__.keys()
        generation = options.pop("generation_config", "auto"), options.pop("override_generation_config", None) or {}
        options |= _drafts(options.pop("speculative_config", None))
        for name in options.keys() - known:
            _explain(name, options.pop(name))
        directory = self._directory = resolve_source(model)
        self.tokenizer = Tokenizer.load(directory)
        defaults = self._defaults = GenerationDefaults.load(directory, generation[0]).overridden(generation[1])
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
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Answers to one conversation, or to each of several, by the checkpoint's chat template or the given one.

        Without parameters those of the checkpoint are used. The text begins with the reasoning, where there is one.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        template = ChatTemplate(chat_template) if chat_template else ChatTemplate.load(self._directory)
        prompts = []
        for conversation in conversations:
            text = template.render(conversation, chat_template_kwargs, tools or (), shield=self.tokenizer.shield)
            prompts.append(self.tokenizer.encode_rendered(text))
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int] | Mapping[str, Any]],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
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
        params: Any = SamplingParams() if sampling_params is None else sampling_params
        is_one = isinstance(params, SamplingParams | EngineSampling)
        each = [SamplingParams.of(one) for one in ([params] * len(plain) if is_one else params)]
        if len(each) != len(plain):
            raise UsageError(f"There are {len(plain)} prompts and {len(each)} sets of sampling parameters.")
        asked = []
        for text, prompt, sampling in zip(plain, given, each, strict=True):
            token_ids, vision = self._encode(text, _images(prompt))
            if vision is None:
                token_ids = sampling.shortened(token_ids, self.engine.config.max_model_len)
            shown = text if isinstance(text, str) else None
            asked += [_Asked(token_ids, vision, sampling, copy, shown) for copy in range(sampling.n)]
        return list(_joined(self._answers(asked)))

    def _answers(self, asked: "Sequence[_Asked]") -> list[Completion]:
        """Each read by a thread of its own, so that a stop string ends its request at once."""
        places = min(self.engine.config.max_num_seqs + self.engine.config.max_num_waiting, len(asked) or 1)
        free = threading.Semaphore(places)
        opened: list[str] = []
        with ThreadPoolExecutor(places, thread_name_prefix="onebox-answer") as readers:
            try:
                reading = []
                for one in asked:
                    free.acquire()
                    self._num_asked += 1
                    request = Request(
                        f"generate-{self._num_asked}", one.prompt, one.params.for_engine(one.copy), vision=one.vision
                    )
                    handle = self.engine.submit(request)
                    opened.append(request.request_id)
                    future = readers.submit(self._read, handle, one)
                    future.add_done_callback(lambda _: free.release())
                    reading.append(future)
                return [future.result() for future in reading]
            except BaseException:
                for request_id in opened:
                    self.engine.abort(request_id)
                raise

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

    def _read(self, handle: RequestHandle, asked: "_Asked") -> Completion:
        answer = Completion(asked.prompt, request_id=handle.request_id, index=asked.copy, prompt=asked.text)
        reader = AnswerReader(self.tokenizer, asked.params)
        for event in handle:
            match event:
                case Tokens() if not handle.is_complete:
                    num_taken = reader.push(event.token_ids)
                    answer.token_ids += event.token_ids[:num_taken]
                    answer.logprobs += event.logprobs[:num_taken]
                    if reader.stopped_by is not None:
                        handle.is_complete = True
                        self.engine.abort(handle.request_id)
                case PromptLogprobs():
                    answer.prompt_logprobs += event.logprobs
                case Finished():
                    answer.finish_reason, answer.counts = event.reason, event.counts
                case Failed():
                    raise OneboxError(event.message)
        answer.text, answer.stop_reason = reader.finish(), reader.stopped_by
        if reader.stopped_by is not None:
            answer.finish_reason = FinishReason.STOP
        return answer


class _Asked(NamedTuple):
    """One answer that is asked for."""

    prompt: tuple[int, ...]
    vision: Vision | None
    params: SamplingParams
    copy: int
    text: str | None


def _joined(answers: Iterable[Completion]) -> Iterator[Completion]:
    """The first answer to each prompt, which has the others."""
    found: list[list[Completion]] = []
    for answer in answers:
        if answer.index == 0:
            found.append([])
        found[-1].append(answer)
    for first, *others in found:
        first.others = tuple(others)
        yield first


def _drafts(speculative_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Engine options of vLLM's `speculative_config`, as `onebox serve` reads it."""
    if not speculative_config:
        return {}
    from onebox.cli.serve_options import ModelOptions

    method, num_drafts, drafter = ModelOptions(speculative_config=json.dumps(speculative_config)).speculation()
    return {
        "speculation": method,
        "num_speculative_tokens": num_drafts,
        "draft_model": resolve_source(drafter) if drafter else None,
    }


def _plain_prompt(prompt: str | Sequence[int] | Mapping[str, Any]) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "multi_modal_data"}
    if unknown or not prompt.keys() & {"prompt", "prompt_token_ids"}:
        held = ", ".join(map(str, sorted(prompt))) or "nothing"
        raise UsageError(f"A prompt holds {held}; it takes prompt or prompt_token_ids, and multi_modal_data.")
    found: str | Sequence[int] = prompt.get("prompt_token_ids") or prompt["prompt"]
    return found


def _images(prompt: str | Sequence[int] | Mapping[str, Any]) -> Sequence[Any]:
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not media:
        return ()
    if media.keys() != {"image"}:
        raise UsageError(f"multi_modal_data holds {', '.join(sorted(media))}; it takes image alone.")
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
