"""Tools of the Responses API, as agents send them, to functions as the chat template knows them.

A custom tool, which takes free text, is shown to the model as a function with one text; a tool of a namespace under
both names. What a provider would run itself (`web_search` and its like) cannot be offered: it is left out, and the log
and the answer's `tools` tell so.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from onebox.server.schemas.chat import FunctionDefinition
from onebox.server.schemas.common import FunctionName, JsonObject, LongText, Name, StrictWithNulls, type_tag

__all__ = [
    "AnyTool",
    "OfferedTool",
    "custom_arguments",
    "custom_input",
    "left_out_types",
    "offered_tools",
    "shown_name",
]

_PLAIN_NAMESPACE = "functions"
"""Of tools that are called by their own name."""
_MAX_TOOLS = Field(max_length=512, fail_fast=True)


class ResponsesTool(FunctionDefinition):
    type: Literal["function"]
    defer_loading: bool | None = None
    """Without effect: every tool is shown to the model at once."""


class CustomTool(StrictWithNulls):
    """A tool whose input is free text."""

    type: Literal["custom"]
    name: FunctionName
    description: LongText | None = None
    format: JsonObject | None = None
    """Told to the model; its input is not constrained to it."""
    defer_loading: bool | None = None


class HostedTool(BaseModel):
    """A tool that the provider would run. It is left out."""

    model_config = ConfigDict(extra="ignore")

    type: Name


def _kind(value: Any) -> str:
    tag = type_tag(value)
    return tag if tag in ("<function>", "<custom>", "<namespace>") else "<hosted>"


_Inner = Annotated[
    Annotated[ResponsesTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind),
]


class NamespaceTool(StrictWithNulls):
    """Tools under a name of their own."""

    type: Literal["namespace"]
    name: FunctionName
    description: LongText | None = None
    tools: Annotated[list[_Inner], _MAX_TOOLS]


AnyTool = Annotated[
    Annotated[ResponsesTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind),
]


@dataclass(frozen=True)
class OfferedTool:
    """A tool as the model sees it, and as its calls are written."""

    shown_name: str
    name: str
    namespace: str | None
    is_custom: bool
    description: str | None
    parameters: Mapping[str, Any] | None

    def for_template(self) -> dict[str, Any]:
        fields = {"name": self.shown_name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def shown_name(name: str, namespace: str | None) -> str:
    """A tool's name in the prompt."""
    return name if namespace in (None, _PLAIN_NAMESPACE) else f"{namespace}__{name}"


def offered_tools(tools: Iterable[Any]) -> list[OfferedTool]:
    """Those that the model is told of."""
    return [tool for given in tools for tool in _offered(given, None)]


def _offered(tool: Any, namespace: str | None) -> Iterator[OfferedTool]:
    match tool:
        case NamespaceTool():
            for inner in tool.tools:
                yield from _offered(inner, tool.name)
        case ResponsesTool():
            name = shown_name(tool.name, namespace)
            yield OfferedTool(name, tool.name, namespace, False, tool.description, tool.parameters)
        case CustomTool():
            name, text = shown_name(tool.name, namespace), _custom_description(tool)
            yield OfferedTool(name, tool.name, namespace, True, text, _CUSTOM_PARAMETERS)


def left_out_types(tools: Iterable[Any]) -> list[str]:
    """Of tools that the model is not told of, since nothing here could run them."""
    inner = (tool for given in tools for tool in (given.tools if isinstance(given, NamespaceTool) else [given]))
    return sorted({tool.type[:_SHOWN] for tool in inner if isinstance(tool, HostedTool)})


_SHOWN = 40
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
}


def _custom_description(tool: CustomTool) -> str | None:
    definition = (tool.format or {}).get("definition")
    if not isinstance(definition, str):
        return tool.description
    syntax = (tool.format or {}).get("syntax", "")
    return f"{tool.description or ''}\n\nThe input follows this grammar ({syntax}):\n{definition}".strip()


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of the function that stands for it."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The other way round; arguments that were cut off stay as they are."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    return str(given["input"]) if isinstance(given, dict) and "input" in given else arguments
