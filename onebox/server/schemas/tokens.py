"""The bodies of /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from onebox.engine.api import SamplingParams
from onebox.server.prompt import ChatInput
from onebox.server.schemas.chat import ChatMessage, ChatTool
from onebox.server.schemas.common import LISTED, JsonObject, LongText, Name, Strict

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(Strict):
    """Of a text, or of a conversation as the chat template writes it."""

    model: Name | None = None
    prompt: LongText | None = None
    messages: Annotated[list[ChatMessage], LISTED, Field(min_length=1)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=512, fail_fast=True)] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = None
    """Without effect: the family's tokenizers add none."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            raise ValueError("tools and chat_template_kwargs go with messages")
        return self

    def chat_input(self) -> ChatInput:
        return ChatInput(
            [message.for_template() for message in self.messages or ()],
            SamplingParams(),
            tools=[tool.for_template() for tool in self.tools or ()],
            template_options=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20, fail_fast=True)]
