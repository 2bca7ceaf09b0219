"""The body of a completion: prompts as text or token ids."""

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from onebox.server.prompt import CompletionInput
from onebox.server.schemas.common import LISTED, GenerationFields, Text, text_or_list
from onebox.text.generation import GenerationDefaults

__all__ = ["CompletionRequest", "OnePrompt"]

_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


def _which_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<list>" if any(isinstance(item, str | list) for item in value) else "<ids>"


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Ids = Annotated[list[_TokenId], Field(max_length=1 << 20, fail_fast=True)]
OnePrompt = Annotated[Text | Annotated[_Ids, Tag("<list>")], Discriminator(text_or_list)]
_Prompts = Annotated[
    Text | Annotated[_Ids, Tag("<ids>")] | Annotated[list[OnePrompt], LISTED, Tag("<list>")],
    Discriminator(_which_prompt),
]


class CompletionRequest(GenerationFields):
    prompt: _Prompts
    """A text, token ids, or a list of both; each element of a list is answered separately."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Default 16. 0 generates nothing: with echo and logprobs, it scores the prompt."""
    echo: bool | None = None
    """The text begins with the prompt, and logprobs with the prompt's."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Of the prompt's tokens, in vLLM's shape; not streamed."""

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; use echo with logprobs, or no stream")
        return self

    @property
    def token_limit(self) -> int:
        return max(_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, 1)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if isinstance(item, str | list)]
        return texts or [[item for item in self.prompt if isinstance(item, int)]]

    def completion_input(self, defaults: GenerationDefaults) -> CompletionInput:
        """Checks a grammar's bounds, which may be slow: to be called beside the event loop."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return CompletionInput(
            self.prompts,
            self.sampling(
                defaults, logprobs=self.logprobs, prompt_logprobs=max(asked, default=None), grammar=self.grammar
            ),
            self.stops,
            is_only_read=self.max_tokens == 0,
            priority=self.priority or 0,
            cache_prompt=self.cache_prompt is not False,
        )
