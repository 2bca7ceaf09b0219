"""What is served, and the submission of prompts to its engine."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from onebox.engine.api import ClientShare, EngineClient, PrefixLookup, Request, RequestHandle
from onebox.server.addresses import SLOT_SHARE, current_address
from onebox.server.answer import MAX_LOGPROB_VALUES, Answer, Answers
from onebox.server.errors import FieldError, ModelNotFoundError, excerpt
from onebox.server.keys import current_caller
from onebox.server.lanes import TextLanes
from onebox.server.media import Media
from onebox.server.pool import WorkPool
from onebox.server.prompt import Prompt, PromptBuilder
from onebox.server.record import current_record, note
from onebox.server.running import RunningAnswers
from onebox.server.submission import RESUBMIT_TIMEOUT_S, Submission
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.tokenizer import Tokenizer

__all__ = ["Service"]

_lookup_pool = WorkPool("lookups in the cache", num_threads=2, max_waiting=256)


@dataclass(frozen=True)
class Service:
    """The engine and the text side of the same checkpoint."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    model_name: str
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """The memory plan by part, for /metrics."""
    startup_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start, for /metrics."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template for what a request's chat_template_kwargs leave open."""
    media: Media = field(default_factory=Media.text_only)
    resubmit_timeout_s: float = RESUBMIT_TIMEOUT_S
    """How long an answer whose thinking budget is used up may wait for a place in a full queue."""
    aliases: tuple[str, ...] = ()
    """Further names under which the model is asked for; `claude-*` is every name that begins so. An answer tells
    `model_name`."""

    fingerprint: str = ""
    """Of what decides an answer: the model as it is computed, tokenizer, template and defaults; for /v1/models."""

    running: RunningAnswers = field(default_factory=RunningAnswers)
    lanes: TextLanes = field(default_factory=TextLanes)
    """Threads for text work."""

    @property
    def prompts(self) -> PromptBuilder:
        config = self.engine.config
        places = config.max_num_seqs + config.max_num_waiting
        return PromptBuilder(
            self.tokenizer,
            self.template,
            self.template_options,
            self.media,
            config.max_model_len,
            max_prompts=places,
            lanes=self.lanes,
        )

    def refuse_other_model(self, model: str | None) -> None:
        """An alias is another name of the one model that there is, and the log says that it was used."""
        if model in (None, *self.names):
            return
        if not any(fnmatchcase(model or "", pattern) for pattern in self.aliases):
            raise ModelNotFoundError(f"The model {excerpt(model)} is not served here; {self.model_name!r} is.")
        note(f"{excerpt(model)} is an alias of {self.model_name}")

    @property
    def names(self) -> tuple[str, ...]:
        """The model's own, and the aliases that are whole names."""
        return (self.model_name, *(name for name in self.aliases if not set(name) & set("*?[")))

    @asynccontextmanager
    async def submit(
        self, prompts: Sequence[Prompt], id_prefix: str, n: int = 1, *, is_stream: bool = False
    ) -> AsyncIterator[Answers]:
        """Submits n requests for each prompt, all or none; a refusal is raised before anything is computed.

        The answers are the block's: however it is left, what is still open of them is aborted.
        """
        self._refuse_beyond_places(len(prompts), n)
        _refuse_long_replies(prompts, n, is_stream=is_stream)
        request_id = f"{id_prefix}-{uuid.uuid4().hex}"
        submission = Submission(self.engine, self.resubmit_timeout_s)
        submitted_at = time.monotonic()
        try:
            answers: list[Answer] = []
            for place, prompt in enumerate(prompts):
                request = self._request(f"{request_id}/{place}", prompt)
                handles = await submission.submit_copies(request, n)
                copies = (_copy(request, handle, copy) for copy, handle in enumerate(handles))
                answers += (Answer(submission, self.tokenizer, prompt, *copy) for copy in copies)
            submitted = Answers(request_id, tuple(answers), n)
            if record := current_record.get():
                record.answers, record.is_stream, record.submitted_at = submitted, is_stream, submitted_at
            with self.running.holding(submitted):
                yield submitted
        finally:
            submission.close()

    async def lookup(self, prompt: Prompt) -> PrefixLookup:
        """What the prefix cache holds of a prompt; refuses what could not be submitted for its length."""
        await asyncio.wrap_future(self.engine.awake())
        short = replace(prompt, sampling=replace(prompt.sampling, max_tokens=1, min_tokens=0))
        return await _lookup_pool.run(self.engine.lookup, self._request(f"lookup-{uuid.uuid4().hex}", short))

    def _request(self, request_id: str, prompt: Prompt) -> Request:
        caller, client = current_caller.get(), self._client
        return Request(
            request_id,
            prompt.token_ids,
            prompt.sampling,
            priority=caller.priority_of(prompt.priority) if caller else prompt.priority,
            cache_prompt=prompt.cache_prompt,
            vision=prompt.vision,
            client=client,
        )

    @property
    def _client(self) -> ClientShare | None:
        """Of the HTTP request that is being handled."""
        caller = current_caller.get()
        if caller is None:
            address = current_address.get()
            slots = max(1, int(SLOT_SHARE * self.engine.config.max_num_seqs))
            return ClientShare(address, self._num_places, slots, is_key=False) if address else None
        places, slots = (
            max(1, int(caller.max_share * count)) for count in (self._num_places, self.engine.config.max_num_seqs)
        )
        return ClientShare(caller.name, places, slots)

    @property
    def _num_places(self) -> int:
        return self.engine.config.max_num_seqs + self.engine.config.max_num_waiting

    def _refuse_beyond_places(self, num_prompts: int, n: int) -> None:
        client, count = self._client, num_prompts * n
        places = client.max_places if client else self._num_places
        if count > places:
            name = "n" if num_prompts == 1 else "prompt"
            whose = f"the API key {client.name!r}" if client and places < self._num_places else "this server"
            raise FieldError(f"{count} answers are asked for at once; {whose} has {places} places.", name)


def _refuse_long_replies(prompts: Sequence[Prompt], n: int, *, is_stream: bool) -> None:
    """By the numbers that are asked for. An answer without max_tokens is counted as it comes."""
    for name in ("prompt_logprobs", "logprobs"):
        num_values = n * sum(_num_values(prompt, name, is_stream=is_stream) for prompt in prompts)
        if num_values > MAX_LOGPROB_VALUES:
            raise FieldError(
                f"{num_values} log-probabilities are asked for, alternatives included; one request may ask for "
                f"{MAX_LOGPROB_VALUES}. Ask for fewer alternatives, answers or tokens.",
                name,
            )


def _num_values(prompt: Prompt, name: str, *, is_stream: bool) -> int:
    num_top = getattr(prompt.sampling, name)
    num_tokens = len(prompt.token_ids) if name == "prompt_logprobs" else prompt.sampling.max_tokens or 0
    return 0 if num_top is None or (is_stream and name == "logprobs") else num_tokens * (num_top + 1)


def _copy(request: Request, handle: RequestHandle, copy: int) -> tuple[Request, RequestHandle]:
    """One of the request's copies, whose seeds count up, with its handle."""
    seed = request.sampling.seed
    sampling = replace(request.sampling, seed=None if seed is None else seed + copy)
    return replace(request, request_id=handle.request_id, sampling=sampling), handle
