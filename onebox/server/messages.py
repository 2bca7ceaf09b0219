"""A conversation and its tools as chat requests hold them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from onebox.server.generate import NamedTool, ToolChoice
from onebox.server.schema import Strict, Text, text_or_list

__all__ = ["Function", "FunctionName", "FunctionTool", "Message", "ToolChoiceField", "tool_choice_of"]

# What the XML form of a call can carry: it ends at ">" and has no escapes.
FunctionName = Annotated[str, Field(pattern=r"^[^<>\s]{1,128}$")]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    """http(s), a data URL, or a file: URL where the operator allows it."""
    detail: Literal["auto", "low", "high"] | None = None
    """low: at most 512 x 512 pixels are looked at; otherwise as many as the model's maker recommends."""


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Strict):
    url: str


class VideoPart(Strict):
    type: Literal["video_url"]
    video_url: VideoUrl


def _part_type(value: Any) -> str:
    return f"<{value.get('type') if isinstance(value, dict) else getattr(value, 'type', None)}>"


_Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[VideoPart, Tag("<video_url>")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="the type must be one of text, image_url, video_url",
    ),
]
_Content = Annotated[Text | Annotated[list[_Part], Tag("<list>")], Discriminator(text_or_list)]


class CalledFunction(Strict):
    name: FunctionName
    arguments: str
    """The JSON of an object."""


class ToolCall(Strict):
    """A call that an earlier answer of ours made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Which clients that put streams together leave in; it means nothing here."""


class Message(Strict):
    """One turn. What an answer of ours holds may come back as it is, its nulls included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under its other name."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    """Of a tool, whose call's id says as much."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        for name in ("reasoning_content", "reasoning", "tool_calls"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise ValueError(f"only an assistant message has {name}")
        for name in ("tool_call_id", "name"):
            if getattr(self, name) is not None and self.role != "tool":
                raise ValueError(f"{name} is not supported but on a tool message, so remove it")
        return self

    def for_template(self) -> dict[str, Any]:
        """As the template takes it: without what is null, but for the content, which it may take the length of."""
        return {"content": "", **self.model_dump(exclude_none=True)}


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted and without effect: arguments are typed by the schema in any case, and held to it where tool_choice
    asks for a call."""


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class _ChosenFunction(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: _ChosenFunction


def _word_or_tool(value: Any) -> str:
    return "<word>" if isinstance(value, str) else "<tool>"


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[ChosenTool, Tag("<tool>")],
    Discriminator(_word_or_tool),
]


def tool_choice_of(value: "ChosenTool | Literal['none', 'auto', 'required'] | None") -> ToolChoice:
    return NamedTool(value.function.name) if isinstance(value, ChosenTool) else value or "auto"
