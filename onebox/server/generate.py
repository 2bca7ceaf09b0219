"""A chat, whatever endpoint it came through, to its answers.

An endpoint checks its own fields and makes a `ChatCall`; `with_pictures` loads the images and videos that it names;
`start_chat` renders the prompt, settles grammar and thinking, and hands it to the engine. What comes
back are `Answers` (`complete.py`) of `Answer`s (`answer.py`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from onebox.engine.api import Grammar, SamplingParams
from onebox.server.answer import Prompt, Thinking
from onebox.server.complete import Answers, Service, start
from onebox.server.constrain import after_reasoning, either, tool_calls
from onebox.server.errors import FieldError
from onebox.server.media import Shown, media_parts
from onebox.spec.errors import UsageError
from onebox.text.answer import AnswerParser, Tool
from onebox.text.reasoning import begins_in_reasoning

__all__ = [
    "EFFORT_BUDGETS",
    "ChatCall",
    "Effort",
    "NamedTool",
    "ToolChoice",
    "prompt_of",
    "start_chat",
    "with_pictures",
]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORT_BUDGETS: dict[str, int | None] = {
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": 32768,
    "xhigh": None,
    "max": None,
}
"""Thinking budgets, in tokens, of reasoning_effort; None is no limit. `none` turns thinking off."""


@dataclass(frozen=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatCall:
    """A chat whose fields have been checked one by one."""

    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's shape: role, content, reasoning_content, tool_calls, tool_call_id."""
    sampling: SamplingParams
    """Without a grammar: it follows from `grammar`, `tools` and whether the model thinks."""
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's shape: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: ToolChoice = "auto"
    """`none` keeps the tools from the model; `required` and a name hold the answer to calls by a grammar."""
    has_parallel_calls: bool = True
    """Otherwise the answer ends before a second call."""
    grammar: Grammar | None = None
    """What the content must be. Tools on offer may be called instead."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    effort: Effort | None = None
    thinking_budget: int | None = None
    """Tokens of reasoning; 0 turns thinking off. Goes before the effort's."""
    stops: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    cache_prompt: bool = True
    shown: Shown | None = None
    """The images and videos that the messages name, once `with_pictures` has loaded them."""


async def with_pictures(service: Service, make_call: Callable[[], ChatCall]) -> ChatCall:
    """The call, made beside the event loop, with the images and videos that its messages name."""
    call = await asyncio.to_thread(make_call)
    shown = await service.media.load(media_parts(call.messages), service.engine.config.max_model_len)
    return replace(call, shown=shown)


def start_chat(service: Service, call: ChatCall, id_prefix: str) -> Answers:
    """Submits the call. Rendering, encoding and grammars take a while: run it beside the event loop."""
    return start(service, [prompt_of(service, call)], id_prefix, call.n)


def _render(service: Service, call: ChatCall) -> str:
    """The prompt's text."""
    options = {**service.template_options, **_thinking_option(service, call), **call.template_options}
    tools = [] if call.tool_choice == "none" else list(call.tools)
    return service.template.render(call.messages, options, tools=tools)


def prompt_of(service: Service, call: ChatCall) -> Prompt:
    """The call as the engine takes it, with its way back."""
    text = _render(service, call)
    in_reasoning = begins_in_reasoning(text)
    tools = [] if call.tool_choice == "none" else [_tool(tool) for tool in call.tools]
    grammar = _grammar(call, tools)
    held = after_reasoning(grammar) if grammar and in_reasoning else grammar
    budget = call.thinking_budget or EFFORT_BUDGETS.get(call.effort or "")
    return Prompt(
        call.shown.encode(text, service.tokenizer) if call.shown else service.tokenizer.encode(text),
        replace(call.sampling, grammar=held),
        call.stops,
        parser=partial(AnswerParser, in_reasoning=in_reasoning, tools=tools),
        thinking=Thinking(budget, grammar) if budget and in_reasoning else None,
        is_one_call=not call.has_parallel_calls,
        priority=call.priority,
        cache_prompt=call.cache_prompt,
        vision=call.shown.vision if call.shown else None,
    )


def _thinking_option(service: Service, call: ChatCall) -> dict[str, bool]:
    if call.effort == "none" or call.thinking_budget == 0:
        return {"enable_thinking": False}
    is_asked_for = call.effort is not None or call.thinking_budget is not None
    # A template without the option has nothing to turn on.
    return {"enable_thinking": True} if is_asked_for and "enable_thinking" in service.template.options else {}


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(function["name"], function.get("parameters") or {})


def _grammar(call: ChatCall, tools: Sequence[Tool]) -> Grammar | None:
    """What follows the reasoning is held to."""
    is_one = not call.has_parallel_calls
    match call.tool_choice:
        case "none":
            return call.grammar
        case "auto":
            return either(_calls(tools, is_one=is_one), call.grammar) if call.grammar and tools else call.grammar
        case "required":
            chosen = list(tools)
            if not chosen:
                raise FieldError("tool_choice is required and there are no tools; give some.", "tool_choice")
        case NamedTool(name):
            chosen = [tool for tool in tools if tool.name == name]
            if not chosen:
                raise FieldError(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
    if call.grammar:
        raise FieldError("response_format and a tool_choice that asks for a call exclude each other.", "tool_choice")
    return _calls(chosen, is_one=is_one or isinstance(call.tool_choice, NamedTool))


def _calls(tools: Sequence[Tool], *, is_one: bool) -> Grammar:
    try:
        return tool_calls(tools, is_one=is_one)
    except UsageError as error:
        raise FieldError(str(error), "tools") from None
