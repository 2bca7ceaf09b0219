"""One request's way: made ready, submitted, and its Events turned into text, usage and a finish reason.

Both endpoints, streamed or not, read the same `Answer`, so what a stream joins to is what a whole answer holds.
"""

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from onebox.engine.api import Counts, Engine, Failed, Finished, Request, RequestHandle, SamplingParams, Tokens
from onebox.server.errors import GenerationError, ModelNotFoundError
from onebox.server.schema import ChatRequest, CompletionRequest
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.reasoning import ReasoningSplitter, Split, begins_in_reasoning
from onebox.text.stream import TextStream
from onebox.text.tokenizer import Tokenizer

__all__ = ["Answer", "Prepared", "Service", "prepare_chat", "prepare_completion", "submit"]


@dataclass(frozen=True)
class Service:
    """What is served: the engine and the text side of the same checkpoint."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    model_name: str


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine, with what the way back needs to know."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    in_reasoning: bool


def prepare_chat(service: Service, request: ChatRequest) -> Prepared:
    _refuse_other_model(service, request.model)
    messages: Sequence[dict[str, Any]] = [message.model_dump(exclude_none=True) for message in request.messages]
    text = service.template.render(messages, request.chat_template_kwargs)
    sampling = request.sampling(service.defaults)
    return Prepared(service.tokenizer.encode(text), sampling, request.stops, begins_in_reasoning(text))


def prepare_completion(service: Service, request: CompletionRequest) -> Prepared:
    _refuse_other_model(service, request.model)
    prompt = request.prompt
    token_ids = service.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    return Prepared(token_ids, request.sampling(service.defaults), request.stops, in_reasoning=False)


def _refuse_other_model(service: Service, model: str | None) -> None:
    if model not in (None, service.model_name):
        raise ModelNotFoundError(f"The model {model!r} is not served here; {service.model_name!r} is.")


def submit(service: Service, prepared: Prepared, id_prefix: str) -> "Answer":
    """Hands the request to the engine; a refusal is raised here, before anything has been sent to the client."""
    request = Request(f"{id_prefix}-{uuid.uuid4().hex}", prepared.prompt, prepared.sampling)
    return Answer(service, prepared, service.engine.submit(request))


class Answer:
    """Pieces of reasoning and content as they come; once they are read, `finish_reason` and `counts` are known."""

    def __init__(self, service: Service, prepared: Prepared, handle: RequestHandle) -> None:
        self.request_id = handle.request_id
        self.finish_reason = ""
        self.counts = Counts(len(prepared.prompt), 0)
        self._engine = service.engine
        self._handle = handle
        self._text = TextStream(service.tokenizer, prepared.stops)
        self._splitter = ReasoningSplitter(in_reasoning=prepared.in_reasoning)

    async def pieces(self) -> AsyncIterator[Split]:
        """Non-empty pieces in order. Whoever stops reading early calls `close`."""
        async for event in self._handle:
            if isinstance(event, Failed):
                raise GenerationError(event.message)
            if isinstance(event, Finished):
                self.finish_reason, self.counts = event.reason.value, event.counts
            elif isinstance(event, Tokens):
                piece = self._splitter.push(self._text.push(event.token_ids))
                if any(piece):
                    yield piece
                if self._text.is_stopped:
                    self._stop()
                    break
        for piece in (self._splitter.push(self._text.flush()), self._splitter.flush()):
            if any(piece):
                yield piece

    async def whole(self) -> Split:
        """All of it at once."""
        pieces = [piece async for piece in self.pieces()]
        return Split("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces))

    def close(self) -> None:
        """Gives the engine's slot back; after the end it has no effect."""
        self._engine.abort(self.request_id)

    def _stop(self) -> None:
        """A stop string is complete: tokens that the engine has made beyond it are nobody's business."""
        self.close()
        self.finish_reason = "stop"
        self.counts = Counts(self.counts.prompt_tokens, self._text.num_tokens)
