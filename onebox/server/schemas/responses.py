"""The body of the Responses API, and its conversion to a chat."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator, model_validator

from onebox.engine.api import Grammar
from onebox.server.errors import FieldError
from onebox.server.prompt import ChatInput, Effort, NamedTool, ToolChoice
from onebox.server.schemas.common import (
    LISTED,
    FunctionName,
    GenerationFields,
    HarmlessFields,
    JsonObject,
    JsonValues,
    LongText,
    MediaText,
    Name,
    Strict,
    StrictWithNulls,
    Text,
    TokenLimit,
    ToolChoiceWord,
    refuse_choice_without_tools,
    refuse_unless_paired,
    text_or_list,
    type_tag,
    word_or_object,
)
from onebox.server.schemas.responses_tools import (
    AnyTool,
    OfferedTool,
    custom_arguments,
    left_out_types,
    offered_tools,
    shown_name,
)
from onebox.server.schemas.turns import Turns, image_part, text_part
from onebox.spec.errors import UsageError
from onebox.text.generation import GenerationDefaults

__all__ = ["ResponsesRequest", "read_items", "sealed"]

_Status = Literal["in_progress", "completed", "incomplete"]
_Nothing = Annotated[list[Any], Field(max_length=0)]
_Tools = Annotated[list[AnyTool], Field(max_length=512, fail_fast=True)]


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back even if they drop its text. It is not encrypted."""
    return base64.b64encode(reasoning.encode()).decode()


class ResponsesTextPart(StrictWithNulls):
    type: Literal["input_text", "output_text"]
    text: LongText
    annotations: _Nothing | None = None
    logprobs: _Nothing | None = None

    def for_template(self) -> dict[str, Any]:
        return text_part(self.text)


class ResponsesImagePart(StrictWithNulls):
    type: Literal["input_image"]
    image_url: MediaText
    """A URL, or the image itself as a data URL."""
    detail: Literal["auto", "low", "high"] | None = None
    """low: at most 512 x 512 pixels are used."""

    def for_template(self) -> dict[str, Any]:
        return image_part(self.image_url, self.detail)


def _part_tag(value: Any) -> str:
    return "<image>" if type_tag(value) == "<input_image>" else "<text>"


_Part = Annotated[
    Annotated[ResponsesTextPart, Tag("<text>")] | Annotated[ResponsesImagePart, Tag("<image>")],
    Discriminator(_part_tag),
]
_Parts = Annotated[Text | Annotated[list[_Part], LISTED, Tag("<list>")], Discriminator(text_or_list)]


def _template_parts(content: str | list[ResponsesTextPart | ResponsesImagePart]) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) else [part.for_template() for part in content]


class ResponsesMessage(StrictWithNulls):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    id: Name | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Without effect: the model has no phases."""

    def add_to(self, turns: Turns) -> None:
        parts = _template_parts(self.content)
        if self.role != "assistant":
            turns.add_message(self.role, parts)
            return
        for part in parts:
            if part["type"] != "text":
                raise FieldError("input: an assistant's message holds text alone.", "input")
            turns.add_content(part["text"])


class ReasoningText(StrictWithNulls):
    type: Literal["reasoning_text"]
    text: LongText


class ReasoningItem(StrictWithNulls):
    type: Literal["reasoning"]
    id: Name | None = None
    summary: JsonValues | None = None
    """Not read: ours is always empty."""
    content: Annotated[list[ReasoningText], LISTED] | None = None
    encrypted_content: LongText | None = None
    """As `sealed` made it; read where there is no content."""
    status: _Status | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _was_sealed_here(cls, value: str | None) -> str | None:
        try:
            return value and base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError):
            raise ValueError("it was not made by this server; leave it out") from None

    def add_to(self, turns: Turns) -> None:
        turns.add_reasoning("".join(part.text for part in self.content or ()) or self.encrypted_content or "")


class FunctionCallItem(StrictWithNulls):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: LongText
    namespace: FunctionName | None = None
    id: Name | None = None
    status: _Status | None = None

    def add_to(self, turns: Turns) -> None:
        turns.add_call(self.call_id, shown_name(self.name, self.namespace), self.arguments)


class FunctionOutputItem(StrictWithNulls):
    type: Literal["function_call_output"]
    call_id: Name
    output: _Parts
    id: Name | None = None
    status: _Status | None = None

    def add_to(self, turns: Turns) -> None:
        turns.add_result(self.call_id, _template_parts(self.output))


class CustomCallItem(StrictWithNulls):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: FunctionName
    input: LongText
    namespace: FunctionName | None = None
    id: Name | None = None
    status: _Status | None = None

    def add_to(self, turns: Turns) -> None:
        turns.add_call(self.call_id, shown_name(self.name, self.namespace), custom_arguments(self.input))


class CustomOutputItem(StrictWithNulls):
    type: Literal["custom_tool_call_output"]
    call_id: Name
    output: _Parts
    name: FunctionName | None = None
    id: Name | None = None
    status: _Status | None = None

    def add_to(self, turns: Turns) -> None:
        turns.add_result(self.call_id, _template_parts(self.output))


class AdditionalToolsItem(StrictWithNulls):
    """Tools beside those of the request, as newer agents send them."""

    type: Literal["additional_tools"]
    tools: _Tools
    role: Name | None = None
    id: Name | None = None
    status: _Status | None = None

    def add_to(self, turns: Turns) -> None:
        """Nothing: tools are no turn."""


_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "additional_tools",
)


def _item_type(value: Any) -> str:
    """A message may leave its type out."""
    return "<message>" if isinstance(value, dict) and "type" not in value else type_tag(value)


_Item = Annotated[
    Annotated[ResponsesMessage, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message=f"an item's type must be one of {', '.join(_ITEMS)}",
    ),
]
_Input = Annotated[
    Text | Annotated[list[_Item], LISTED, Field(min_length=1), Tag("<list>")],
    Discriminator(text_or_list),
]


_items = TypeAdapter(list[_Item])


def read_items(values: list[Any]) -> Sequence[Any]:
    """Items of earlier requests and answers, as they were kept."""
    try:
        return _items.validate_python(values)
    except ValidationError:
        # The model may have called a tool by a name that no request may have, for example.
        raise FieldError(
            "The previous response has an item that cannot be sent back; send the earlier items in input instead.",
            "previous_response_id",
        ) from None


class ResponsesChosenTool(Strict):
    type: Literal["function", "custom"]
    name: Name
    namespace: FunctionName | None = None


_ToolChoice = Annotated[ToolChoiceWord | Annotated[ResponsesChosenTool, Tag("<object>")], Discriminator(word_or_object)]


class ReasoningField(Strict):
    effort: Effort | None = None
    """As reasoning_effort of chat completions."""
    summary: Literal["auto"] | None = None
    """Nothing is summarised: the reasoning itself is in the answer."""
    context: Literal["auto", "all_turns"] | None = None
    """Reasoning items that are sent back are given to the chat template, which decides what it shows of them."""


class TextFormat(StrictWithNulls):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """The answer always follows the schema."""

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        refuse_unless_paired(self.type, "json_schema", "schema", self.schema_)
        return self

    @property
    def grammar(self) -> Grammar | None:
        try:
            if self.schema_ is None:
                return self._free_grammar()
            return Grammar.json_schema(self.schema_).named("text.format.schema")
        except UsageError as error:
            raise FieldError(str(error), "text.format.schema") from None

    def _free_grammar(self) -> Grammar | None:
        return Grammar.json_object() if self.type == "json_object" else None


class TextField(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect: the model has no such setting. Agents always send it."""


class ResponsesRequest(HarmlessFields):
    model: Name | None = None
    """None: the served model."""
    input: _Input
    instructions: LongText | None = None
    """A system message before the input."""
    tools: _Tools | None = None
    """What the provider would run, such as web_search, is left out."""
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    text: TextField | None = None
    max_output_tokens: TokenLimit | None = None
    """Reasoning included."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16, fail_fast=True)] | None = None
    """Adds encrypted_content to reasoning items; their text is always sent too."""
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    """The conversation goes on behind this answer, which was stored; its instructions are not repeated."""
    store: bool | None = None
    """The default is true where the server stores responses, as in OpenAI's API."""
    background: bool | None = None
    """The answer is computed without a connection, to be retrieved or cancelled."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the oldest items are left out until the input fits the context; the answer says how many."""
    client_metadata: JsonObject | None = None
    """Sent by some agents; not read."""
    cache_prompt: bool | None = None
    """False: the prompt is neither looked up in the prefix cache nor stored there. Not in OpenAI's API."""

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        refuse_choice_without_tools(self.tool_choice, self.offered)
        if self.background and self.stream:
            raise ValueError("background and stream exclude each other; retrieve the answer by its id instead")
        if self.background and self.store is False:
            raise ValueError("background needs store: its answer is retrieved by its id")
        return self

    @cached_property
    def offered(self) -> list[OfferedTool]:
        """Tools that the model is told of."""
        return offered_tools(self._all_tools)

    @property
    def left_out(self) -> list[str]:
        """The types of those that it is not told of."""
        return left_out_types(self._all_tools)

    @property
    def _all_tools(self) -> tuple[Any, ...]:
        """Its own, and those among the items."""
        items = () if isinstance(self.input, str) else self.input
        added = (tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools)
        return (*(self.tools or ()), *added)

    @property
    def own_items(self) -> list[dict[str, Any]]:
        """The input as it can be kept and read again."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        kept = (item for item in self.input if not isinstance(item, AdditionalToolsItem))
        return [_kept_item(item) for item in kept]

    @property
    def has_sealed_reasoning(self) -> bool:
        return bool(self.include)

    def chat_input(self, defaults: GenerationDefaults, earlier: Sequence[Any] = ()) -> tuple[ChatInput, list[Any]]:
        """With the items that it has. Checks a grammar's bounds, which may be slow: call it beside the event loop.

        `earlier` are the items of the conversation that the request goes on with.
        """
        own = [ResponsesMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        items = [*earlier, *own]
        limits = GenerationFields(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_output_tokens)
        chat = ChatInput(
            messages=self.messages_of(items),
            sampling=limits.sampling(defaults),
            tools=[tool.for_template() for tool in self.offered],
            tool_choice=self._tool_choice(),
            has_parallel_calls=self.parallel_tool_calls is not False,
            grammar=self.text.format.grammar if self.text and self.text.format else None,
            effort=self.reasoning.effort if self.reasoning else None,
            cache_prompt=self.cache_prompt is not False,
        )
        return chat, items

    def messages_of(self, items: Iterable[Any]) -> list[dict[str, Any]]:
        """The instructions and these items."""
        turns = Turns()
        if self.instructions is not None:
            turns.add_message("system", [text_part(self.instructions)])
        for item in items:
            item.add_to(turns)
        return turns.messages

    def _tool_choice(self) -> ToolChoice:
        choice = self.tool_choice
        if isinstance(choice, ResponsesChosenTool):
            return NamedTool(shown_name(choice.name, choice.namespace))
        return choice or "auto"


def _kept_item(item: StrictWithNulls) -> dict[str, Any]:
    kept = item.model_dump(exclude_none=True)
    if isinstance(item, ReasoningItem) and item.encrypted_content is not None:
        kept["encrypted_content"] = sealed(item.encrypted_content)
    return kept
