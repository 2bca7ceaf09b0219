"""What is served, and prompts of token ids on their way into the engine and back as answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onebox.engine.api import EngineClient, Request, RequestHandle
from onebox.server.answer import Answer, Piece, Prompt, Usage
from onebox.server.errors import FieldError, ModelNotFoundError
from onebox.server.media import Media
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.tokenizer import Tokenizer

__all__ = ["Answers", "Service", "start"]


@dataclass(frozen=True)
class Service:
    """What is served: the engine and the text side of the same checkpoint."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    model_name: str
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """The memory plan by part, for whoever looks at the metrics."""
    startup_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start, for the same."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template gets where a request's chat_template_kwargs do not say otherwise."""
    media: Media = field(default_factory=Media.blind)

    def refuse_other_model(self, model: str | None) -> None:
        if model not in (None, self.model_name):
            raise ModelNotFoundError(f"The model {model!r} is not served here; {self.model_name!r} is.")


def start(service: Service, prompts: Sequence[Prompt], id_prefix: str, n: int = 1) -> "Answers":
    """Hands the prompts to the engine, n answers of each, all or none; a refusal is raised before anything is sent."""
    config, count = service.engine.config, len(prompts) * n
    places = config.max_num_seqs + config.max_num_waiting
    if count > places:
        field_name = "n" if len(prompts) == 1 else "prompt"
        raise FieldError(f"{count} answers are asked for at once; this server has {places} places.", field_name)
    request_id = f"{id_prefix}-{uuid.uuid4().hex}"
    answers: list[Answer] = []
    try:
        for place, prompt in enumerate(prompts):
            request = _request(f"{request_id}/{place}", prompt)
            handles = service.engine.submit_copies(request, n)
            answers += [_answer(service, prompt, request, handle, copy) for copy, handle in enumerate(handles)]
    except Exception:
        for answer in answers:
            answer.close()
        raise
    return Answers(request_id, tuple(answers), n)


def _request(request_id: str, prompt: Prompt) -> Request:
    return Request(
        request_id,
        prompt.token_ids,
        prompt.sampling,
        priority=prompt.priority,
        cache_prompt=prompt.cache_prompt,
        vision=prompt.vision,
    )


def _answer(service: Service, prompt: Prompt, request: Request, handle: RequestHandle, copy: int) -> Answer:
    """The request is the one that was copied; its copies have seeds that count up."""
    seed = request.sampling.seed
    sampling = replace(request.sampling, seed=None if seed is None else seed + copy)
    submitted = replace(request, request_id=handle.request_id, sampling=sampling)
    return Answer(service.engine, service.tokenizer, prompt, submitted, handle)


@dataclass(frozen=True)
class Answers:
    """The answers to one HTTP request: n of the first prompt, n of the second, and so on."""

    request_id: str
    answers: tuple[Answer, ...]
    n: int

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """Pieces with the place of their answer, as they come; None is the end of that answer."""
        if len(self.answers) == 1:
            # A task for every piece is dear, and needed only where several streams are waited for.
            async for piece in self.answers[0].pieces():
                yield 0, piece
            yield 0, None
            return
        streams = [answer.pieces() for answer in self.answers]
        nexts = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
        try:
            while nexts:
                done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = nexts.pop(task)
                    try:
                        piece = task.result()
                    except StopAsyncIteration:
                        yield place, None
                        continue
                    nexts[asyncio.ensure_future(anext(streams[place]))] = place
                    yield place, piece
        finally:
            for task in nexts:
                task.cancel()

    async def whole(self) -> list[Piece]:
        """Each answer at once, all read side by side."""
        return list(await asyncio.gather(*(answer.whole() for answer in self.answers)))

    @property
    def usage(self) -> Usage:
        """Of all together; a prompt's n answers share it, and the first tells what was cached."""
        each = [answer.usage for answer in self.answers]
        return sum((u.without_prompt if place % self.n else u for place, u in enumerate(each)), Usage())

    def close(self) -> None:
        for answer in self.answers:
            answer.close()
