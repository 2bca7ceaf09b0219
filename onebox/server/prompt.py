"""A checked request to what the engine is given: token ids, sampling with its grammar, thinking budget, images.

The schemas make a `ChatInput` or a `CompletionInput`; `PromptBuilder` makes `Prompt`s of it; `Service.submit` submits
them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from onebox.engine.api import Grammar, SamplingParams, Vision
from onebox.server.errors import FieldError
from onebox.server.grammars import after_reasoning, either, tool_calls
from onebox.server.media import LoadedMedia, Media, media_parts
from onebox.server.thinking import ThinkingBudget
from onebox.spec.errors import UsageError
from onebox.text.chat import ChatTemplate
from onebox.text.parser import AnswerParser, PlainTextParser, TextParser, begins_in_reasoning
from onebox.text.tokenizer import Tokenizer
from onebox.text.toolcalls import ToolDefinition

__all__ = [
    "EFFORT_BUDGETS",
    "ChatInput",
    "CompletionInput",
    "Effort",
    "NamedTool",
    "Prompt",
    "PromptBuilder",
    "ToolChoice",
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
"""Thinking budgets in tokens by reasoning effort; None is no limit. `none` turns thinking off."""


@dataclass(frozen=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatInput:
    """A chat of any dialect, its fields checked one by one."""

    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's shape: role, content, reasoning_content, tool_calls, tool_call_id."""
    sampling: SamplingParams
    """Without a grammar: it follows from `grammar`, `tools` and whether the model thinks."""
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's shape: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: ToolChoice = "auto"
    """`none` hides the tools from the model; `required` and a name constrain the answer to calls by a grammar."""
    has_parallel_calls: bool = True
    """Otherwise the answer ends before a second call."""
    grammar: Grammar | None = None
    """What the content must be. Offered tools may be called instead."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the request itself gives to the chat template; an option that the template lacks is refused."""
    effort: Effort | None = None
    thinking_budget: int | None = None
    """Tokens of reasoning; 0 turns thinking off. Takes precedence over the effort's."""
    enable_thinking: bool | None = None
    """Turns thinking on or off where the template can; None leaves it to effort, budget and defaults."""
    thinks_by_default: bool = True
    """False: thinking is off unless the request or the server's template options turn it on."""
    stops: tuple[str, ...] = ()
    priority: int = 0
    cache_prompt: bool = True


@dataclass(frozen=True)
class CompletionInput:
    """Prompts without a chat template, each answered separately."""

    texts: Sequence[str | list[int]]
    """Texts or token ids."""
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    is_only_read: bool = False
    priority: int = 0
    cache_prompt: bool = True


@dataclass(frozen=True)
class Prompt:
    """What the engine is given, and what reading the answer needs to know."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    parser: Callable[[], TextParser] = PlainTextParser
    thinking: ThinkingBudget | None = None
    is_one_call: bool = False
    """The answer ends before a second tool call."""
    is_only_read: bool = False
    """Only the prompt's own log-probabilities are asked for: no token of the answer is used."""
    priority: int = 0
    cache_prompt: bool = True
    vision: Vision | None = None


@dataclass(frozen=True)
class PromptBuilder:
    """Renders, encodes and constrains. Slow work runs in a thread: the event loop has other clients."""

    tokenizer: Tokenizer
    template: ChatTemplate
    template_options: Mapping[str, Any]
    """The server's own, for what a request leaves open."""
    media: Media
    max_model_len: int

    async def of_chat(self, chat: ChatInput) -> Prompt:
        media = await self.media.load(media_parts(chat.messages), self.max_model_len)
        return await asyncio.to_thread(self._chat_prompt, chat, media)

    async def of_completion(self, completion: CompletionInput) -> list[Prompt]:
        return await asyncio.to_thread(self._completion_prompts, completion)

    def _chat_prompt(self, chat: ChatInput, media: LoadedMedia | None) -> Prompt:
        is_offering = chat.tool_choice != "none"
        offered = list(chat.tools) if is_offering else []
        text = self.template.render(chat.messages, self._template_options(chat), tools=offered)
        in_reasoning = begins_in_reasoning(text)
        tools = [_definition(tool) for tool in offered]
        grammar = _grammar(chat, tools)
        budget = chat.thinking_budget or EFFORT_BUDGETS.get(chat.effort or "")
        return Prompt(
            media.encode(text, self.tokenizer) if media else self.tokenizer.encode(text),
            replace(chat.sampling, grammar=after_reasoning(grammar) if grammar and in_reasoning else grammar),
            chat.stops,
            parser=partial(AnswerParser, in_reasoning=in_reasoning, tools=tools),
            thinking=ThinkingBudget(budget, grammar) if budget and in_reasoning else None,
            is_one_call=not chat.has_parallel_calls,
            priority=chat.priority,
            cache_prompt=chat.cache_prompt,
            vision=media.vision if media else None,
        )

    def _completion_prompts(self, completion: CompletionInput) -> list[Prompt]:
        return [
            Prompt(
                self.tokenizer.encode(text) if isinstance(text, str) else tuple(text),
                completion.sampling,
                completion.stops,
                is_only_read=completion.is_only_read,
                priority=completion.priority,
                cache_prompt=completion.cache_prompt,
            )
            for text in completion.texts
        ]

    def _template_options(self, chat: ChatInput) -> dict[str, Any]:
        """Later ones win: the dialect's default, the server's, effort and budget, the request's own."""
        return {
            **self._thinking_option(None if chat.thinks_by_default else False),
            **self.template_options,
            **self._budget_option(chat),
            **self._thinking_option(chat.enable_thinking),
            **chat.template_options,
        }

    def _budget_option(self, chat: ChatInput) -> dict[str, bool]:
        if chat.effort == "none" or chat.thinking_budget == 0:
            return {"enable_thinking": False}
        is_asked_for = chat.effort is not None or chat.thinking_budget is not None
        return self._thinking_option(True if is_asked_for else None)

    def _thinking_option(self, value: bool | None) -> dict[str, bool]:
        """Empty where the template cannot turn thinking on and off."""
        has_option = "enable_thinking" in self.template.options
        return {"enable_thinking": value} if value is not None and has_option else {}


def _definition(tool: Mapping[str, Any]) -> ToolDefinition:
    function = tool["function"]
    return ToolDefinition(function["name"], function.get("parameters") or {})


def _grammar(chat: ChatInput, tools: Sequence[ToolDefinition]) -> Grammar | None:
    """The grammar of what follows the reasoning."""
    is_one = not chat.has_parallel_calls
    match chat.tool_choice:
        case "none":
            return chat.grammar
        case "auto":
            return either(_calls(tools, is_one=is_one), chat.grammar) if chat.grammar and tools else chat.grammar
        case "required":
            chosen = list(tools)
            if not chosen:
                raise FieldError("tool_choice is required and there are no tools; give some.", "tool_choice")
        case NamedTool(name):
            chosen = [tool for tool in tools if tool.name == name]
            if not chosen:
                raise FieldError(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
    if chat.grammar:
        raise FieldError("response_format and a tool_choice that asks for a call exclude each other.", "tool_choice")
    return _calls(chosen, is_one=is_one or isinstance(chat.tool_choice, NamedTool))


def _calls(tools: Sequence[ToolDefinition], *, is_one: bool) -> Grammar:
    try:
        return tool_calls(tools, is_one=is_one)
    except UsageError as error:
        raise FieldError(str(error), "tools") from None
