"""The bodies of Anthropic's Messages API, and their conversion to a chat."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from onebox.engine.api import Grammar, SamplingParams
from onebox.server.errors import FieldError, excerpt
from onebox.server.prompt import ChatInput, NamedTool, ToolChoice
from onebox.server.schemas.common import (
    LISTED,
    FunctionName,
    GenerationFields,
    JsonObject,
    LongText,
    MediaText,
    Name,
    Strict,
    StrictWithNulls,
    Text,
    TokenLimit,
    by_type,
    refuse_unless_paired,
    text_or_list,
)
from onebox.server.schemas.turns import Turns, image_part, text_part
from onebox.spec.errors import UsageError
from onebox.text.generation import GenerationDefaults

__all__ = ["CountTokensRequest", "MessagesLookupRequest", "MessagesRequest"]

_BILLING = "x-anthropic-billing-header:"
"""Begins a line that agents put before their system prompt. It is for accounting and differs from request to request;
it is removed, since no prompt would ever be found in the prefix cache otherwise."""


class AnthropicBlock(StrictWithNulls):
    cache_control: JsonObject | None = None
    """Accepted without effect: every prompt is cached, as far as there is room."""


class TextBlock(AnthropicBlock):
    type: Literal["text"]
    text: LongText
    citations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        return text_part(self.text)


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: MediaText


class UrlSource(Strict):
    type: Literal["url"]
    url: MediaText


class ImageBlock(AnthropicBlock):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")], by_type("base64", "url")
    ]

    def for_template(self) -> dict[str, Any]:
        source = self.source
        if isinstance(source, UrlSource):
            return image_part(source.url)
        return image_part(f"data:{source.media_type};base64,{source.data}")


class ThinkingBlock(AnthropicBlock):
    type: Literal["thinking"]
    thinking: LongText
    signature: LongText | None = None
    """Not checked: clients may send any thinking."""


class ToolUseBlock(AnthropicBlock):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: JsonObject


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")], by_type("text", "image")
]


class ToolResultBlock(AnthropicBlock):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[
        Text | Annotated[list[_ResultBlock], LISTED, Tag("<list>")],
        Discriminator(text_or_list),
    ] = ""
    is_error: bool | None = None

    def add_to(self, turns: Turns) -> None:
        # The template has no field for a failed call, so it is written into the text.
        prefix = [text_part("Error: ")] if self.is_error else []
        parts = [text_part(self.content)] if isinstance(self.content, str) else [b.for_template() for b in self.content]
        turns.add_result(self.tool_use_id, [*prefix, *parts])


_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type("text", "image", "thinking", "tool_use", "tool_result"),
]
_HOLDS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""The block types of each role."""


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    """A system message among the others keeps its place."""
    content: Annotated[
        Text | Annotated[list[_AnyBlock], LISTED, Tag("<list>")],
        Discriminator(text_or_list),
    ]

    @property
    def blocks(self) -> Sequence[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _holds_what_its_role_may(self) -> Self:
        for block in self.blocks:
            if block.type not in _HOLDS[self.role]:
                raise ValueError(f"a message of the role {self.role} holds no {block.type} block")
        return self

    def add_to(self, turns: Turns) -> None:
        """Text and images between tool results are one message."""
        parts: list[dict[str, Any]] = []
        for block in self.blocks:
            match block:
                case ThinkingBlock():
                    turns.add_reasoning(block.thinking)
                case ToolUseBlock():
                    turns.add_call(block.id, block.name, block.input)
                case TextBlock() if self.role == "assistant":
                    turns.add_content(block.text)
                case ToolResultBlock():
                    self._add_message(parts, turns)
                    parts = []
                    block.add_to(turns)
                case TextBlock() | ImageBlock():
                    parts.append(block.for_template())
        self._add_message(parts, turns)

    def _add_message(self, parts: list[dict[str, Any]], turns: Turns) -> None:
        if parts:
            turns.add_message(self.role, parts)


class AnthropicTool(StrictWithNulls):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: LongText | None = None
    input_schema: JsonObject
    cache_control: JsonObject | None = None
    strict: bool | None = None
    """Accepted without effect: arguments are always typed by the schema, and constrained to it where tool_choice asks
    for a call."""
    eager_input_streaming: bool | None = None
    """Accepted without effect: arguments are always sent as they come."""
    defer_loading: Literal[False] | None = None

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: held for name, held in function.items() if held is not None}}


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_goes_with_its_type(self) -> Self:
        refuse_unless_paired(self.type, "tool", "name", self.name)
        return self

    @property
    def choice(self) -> ToolChoice:
        if self.name is not None:
            return NamedTool(self.name)
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class AnthropicThinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: TokenLimit | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves out the text of the thinking; otherwise all of it is sent, nothing is summarised."""

    @model_validator(mode="after")
    def _budget_goes_with_its_type(self) -> Self:
        refuse_unless_paired(self.type, "enabled", "budget_tokens", self.budget_tokens)
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]

    @property
    def grammar(self) -> Grammar:
        try:
            return Grammar.json_schema(self.schema_).named("output_config.format.schema")
        except UsageError as error:
            raise FieldError(str(error), "output_config.format.schema") from None


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A thinking budget by name; `thinking` takes precedence."""
    format: OutputFormat | None = None


class CountTokensRequest(StrictWithNulls):
    """The fields that make up the prompt."""

    model: Name
    messages: Annotated[list[AnthropicMessage], LISTED, Field(min_length=1)]
    system: Annotated[
        Text | Annotated[list[TextBlock], LISTED, Tag("<list>")],
        Discriminator(text_or_list),
    ] = ""
    tools: Annotated[list[AnthropicTool], Field(max_length=512, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    """Off unless asked for here, by output_config.effort, or by the server's own default."""
    output_config: OutputConfig | None = None
    context_management: JsonObject | None = None
    """No edits are applied, and the reply reports that."""
    cache_control: JsonObject | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _custom_tools_alone(cls, value: Any) -> Any:
        for place, tool in enumerate(value if isinstance(value, list) else ()):
            if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
                raise ValueError(
                    f"tool {place} is of the type {excerpt(tool['type'])}; only custom tools are supported, so "
                    "remove it"
                )
        return value

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat_input(self, defaults: GenerationDefaults) -> ChatInput:
        """Checks a grammar's bounds, which may be slow: to be called beside the event loop."""
        choice, config = self.tool_choice, self.output_config
        return ChatInput(
            messages=self._turns(),
            sampling=self._sampling(defaults),
            tools=[tool.for_template() for tool in self.tools or ()],
            tool_choice=choice.choice if choice else "auto",
            has_parallel_calls=not (choice and choice.disable_parallel_tool_use),
            grammar=config.format.grammar if config and config.format else None,
            effort=config.effort if config else None,
            thinking_budget=self.thinking.budget_tokens if self.thinking else None,
            enable_thinking=self.thinking.type != "disabled" if self.thinking else None,
            thinks_by_default=False,
            stops=self._stops(),
        )

    def _sampling(self, _: GenerationDefaults) -> SamplingParams:
        """Counting tokens samples none."""
        return SamplingParams()

    def _stops(self) -> tuple[str, ...]:
        return ()

    def _turns(self) -> list[dict[str, Any]]:
        turns = Turns()
        for text in [self.system] if isinstance(self.system, str) else [block.text for block in self.system]:
            kept = text.partition("\n")[2] if text.startswith(_BILLING) else text
            if kept:
                turns.add_message("system", [text_part(kept)])
        for message in self.messages:
            message.add_to(turns)
        return turns.messages


class MessagesLookupRequest(CountTokensRequest):
    """A cache lookup: the fields that make up the prompt."""

    cache_prompt: bool | None = None
    """False, as in the request that will be sent: nothing is found."""

    def chat_input(self, defaults: GenerationDefaults) -> ChatInput:
        return replace(super().chat_input(defaults), cache_prompt=self.cache_prompt is not False)


class AnthropicMetadata(Strict):
    user_id: Name | None = None


_StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class MessagesRequest(MessagesLookupRequest):
    cache_prompt: bool | None = None
    """False: the prompt is neither looked up in the prefix cache nor stored there. Not in Anthropic's API."""
    max_tokens: TokenLimit
    """Thinking included. A limit beyond the context is lowered to what fits."""
    stop_sequences: Annotated[list[_StopSequence], Field(max_length=16, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's, which is not continued here; end with a user's")
        return self

    def _sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        fields = GenerationFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens
        )
        return fields.sampling(defaults)

    def _stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())
