"""The body and the reply of a cache lookup: a prompt, or a chat by the fields that make up its prompt."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, model_validator

from onebox.engine.api import CacheTier, SamplingParams
from onebox.server.prompt import ChatInput, CompletionInput
from onebox.server.schemas.chat import ChatPromptFields
from onebox.server.schemas.common import Name, Strict
from onebox.server.schemas.completions import OnePrompt

__all__ = ["CacheLookupReply", "ChatLookupRequest", "LookupRequest", "PromptLookupRequest"]


class LookupFields(Strict):
    model: Name | None = None
    """None: the served model."""
    cache_prompt: bool | None = None
    """False, as in the request that will be sent: nothing is found."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, value: Any) -> Any:
        if isinstance(value, dict) and ("prompt" in value) == ("messages" in value):
            raise ValueError("give either prompt or messages")
        return value


class PromptLookupRequest(LookupFields):
    """As for /v1/completions."""

    prompt: OnePrompt
    """A text or token ids."""

    def completion_input(self) -> CompletionInput:
        return CompletionInput([self.prompt], SamplingParams(), cache_prompt=self.cache_prompt is not False)


class ChatLookupRequest(LookupFields, ChatPromptFields):
    """As for /v1/chat/completions: the fields that make up the prompt."""

    def chat_prompt(self) -> ChatInput:
        return replace(super().chat_prompt(), cache_prompt=self.cache_prompt is not False)


def _which(value: Any) -> str:
    has_prompt = "prompt" in value if isinstance(value, dict) else isinstance(value, PromptLookupRequest)
    return "<prompt>" if has_prompt else "<chat>"


LookupRequest = Annotated[
    Annotated[PromptLookupRequest, Tag("<prompt>")] | Annotated[ChatLookupRequest, Tag("<chat>")],
    Discriminator(_which),
]


class CacheLookupReply(BaseModel):
    """What the request would find if it were admitted now."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    num_tokens: int
    """Of the prompt."""
    cached_tokens: int
    """Of its longest cached prefix, as usage will tell them."""
    tier: CacheTier | None
    """Where that prefix is; null where nothing is cached."""
    memory_tokens: int
    """Of the longest prefix in memory."""
    disk_tokens: int
    """Of the longest prefix on disk; 0 where memory has as much, or where computing it is quicker than reading it."""
