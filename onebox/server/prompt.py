"""A checked request to what the engine is given: token ids, sampling with its grammar, thinking budget, images.

The schemas make a `ChatInput` or a `CompletionInput`; `PromptBuilder` makes `Prompt`s of it; `Service.submit` submits
them.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from onebox.engine.api import ContextTooLongError, Grammar, SamplingParams, Vision
from onebox.server.errors import FieldError, excerpt
from onebox.server.grammars import after_reasoning, either, tool_calls
from onebox.server.lanes import TextLanes, is_small
from onebox.server.media import Media, MediaFiles, OpenedMedia, media_parts
from onebox.server.thinking import ThinkingBudget
from onebox.spec.errors import UsageError
from onebox.text.chat import ChatTemplate, TextTooLongError
from onebox.text.marks import MAX_NAME_CHARS, is_name
from onebox.text.parser import AnswerParser, PlainTextParser, TextParser, begins_in_reasoning
from onebox.text.tokenizer import Tokenizer, TooManyTokensError
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
    """Where the answer begins with reasoning."""
    is_one_call: bool = False
    """The answer ends before a second tool call."""
    is_only_read: bool = False
    """Only the prompt's own log-probabilities are asked for: no token of the answer is used."""
    priority: int = 0
    cache_prompt: bool = True
    media: OpenedMedia | None = None
    """Pictures that are not decoded yet."""
    vision: Vision | None = None


class _ChatText(NamedTuple):
    """A rendered chat."""

    token_ids: tuple[int, ...]
    in_reasoning: bool
    """The answer begins inside the reasoning."""
    tools: list[ToolDefinition]
    """Those offered."""


_SPARE_TOKENS = 1 << 16


@dataclass(frozen=True)
class PromptBuilder:
    """Renders, encodes and constrains. Slow work runs on threads: the event loop has other clients."""

    tokenizer: Tokenizer
    template: ChatTemplate
    template_options: Mapping[str, Any]
    """The server's own, for what a request leaves open."""
    media: Media
    max_model_len: int
    max_prompts: int | None = None
    """Of one request."""
    lanes: TextLanes = field(default_factory=TextLanes)

    @property
    def max_counted_tokens(self) -> int:
        """A text is not tokenised further. Well above the context, so that a refusal mostly says how long it is."""
        return 2 * self.max_model_len + _SPARE_TOKENS

    async def of_chat(self, chat: ChatInput) -> Prompt:
        with self.media.files() as files:
            return await self.decode_pictures(await self.count_chat(chat, files))

    async def decode_pictures(self, prompt: Prompt) -> Prompt:
        """The prompt of `count_chat`, complete. One that is too long is refused before anything is decoded."""
        if prompt.media is None:
            return prompt
        if len(prompt.token_ids) >= self.max_model_len:
            raise ContextTooLongError(
                f"The prompt has {len(prompt.token_ids)} tokens and the context holds {self.max_model_len}, answer "
                "included; shorten it."
            )
        return replace(prompt, vision=await prompt.media.read(), media=None)

    async def count_chat(self, chat: ChatInput, files: MediaFiles) -> Prompt:
        """The prompt with all of its tokens, pictures not decoded; `files` are those of this request."""
        if len(chat.messages) > self.max_model_len:
            # Each has a token at least.
            raise ContextTooLongError(
                f"There are {len(chat.messages)} messages and the context holds {self.max_model_len} tokens; send "
                "fewer."
            )
        media = await self.media.open_parts(media_parts(chat.messages), self.max_model_len, files)
        is_quick = is_small((chat.messages, chat.tools, chat.template_options))
        text = await self.lanes.run(partial(self._chat_text, chat, media), is_small=is_quick)
        # Grammars are compiled on the way, so on another thread.
        return await asyncio.to_thread(self._chat_prompt, chat, text, media)

    async def of_completion(self, completion: CompletionInput) -> list[Prompt]:
        if self.max_prompts is not None and len(completion.texts) > self.max_prompts:
            raise FieldError(
                f"{len(completion.texts)} answers are asked for at once; this server has {self.max_prompts} places.",
                "prompt",
            )
        is_quick = is_small(completion.texts)
        return await self.lanes.run(partial(self._completion_prompts, completion), is_small=is_quick)

    async def ids_of_text(self, text: str) -> tuple[int, ...]:
        """Token ids of the caller's own prompt, in which control tokens may be spelled."""
        return await self.lanes.run(partial(self._encode, text), is_small=is_small(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        with self._within_context():
            return self.tokenizer.encode(text, self.max_counted_tokens)

    def _chat_text(self, chat: ChatInput, media: OpenedMedia | None) -> _ChatText:
        _refuse_same_names(chat.tools)
        offered = list(chat.tools) if chat.tool_choice != "none" else []
        tools = [_definition(tool) for tool in offered]
        max_tokens = self.max_counted_tokens
        with self._within_context():
            text = self.template.render(
                chat.messages,
                self._template_options(chat),
                tools=offered,
                shield=self.tokenizer.shield,
                max_chars=self.tokenizer.max_chars(max_tokens),
            )
            encode = partial(self.tokenizer.encode_rendered, max_tokens=max_tokens)
            token_ids = media.encode(text, encode) if media else encode(text)
        return _ChatText(token_ids, begins_in_reasoning(text), tools)

    @contextmanager
    def _within_context(self) -> Iterator[None]:
        try:
            yield
        except (TooManyTokensError, TextTooLongError):
            raise ContextTooLongError(
                f"The prompt is too long: more than {self.max_counted_tokens} tokens > {self.max_model_len} maximum."
            ) from None

    def _chat_prompt(self, chat: ChatInput, text: _ChatText, media: OpenedMedia | None) -> Prompt:
        grammar = _grammar(chat, text.tools)
        budget = chat.thinking_budget or EFFORT_BUDGETS.get(chat.effort or "")
        return Prompt(
            text.token_ids,
            replace(chat.sampling, grammar=after_reasoning(grammar) if grammar and text.in_reasoning else grammar),
            chat.stops,
            parser=partial(
                AnswerParser,
                in_reasoning=text.in_reasoning,
                tools=text.tools,
                spelled=self.tokenizer.spelled_marks,
                is_constrained=grammar is not None,
            ),
            thinking=ThinkingBudget(budget, grammar) if text.in_reasoning else None,
            is_one_call=not chat.has_parallel_calls,
            priority=chat.priority,
            cache_prompt=chat.cache_prompt,
            media=media,
        )

    def _completion_prompts(self, completion: CompletionInput) -> list[Prompt]:
        return [
            Prompt(
                self._encode(text) if isinstance(text, str) else tuple(text),
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


def _refuse_same_names(tools: Sequence[Mapping[str, Any]]) -> None:
    """A call names its tool, so that no two may have one name."""
    seen = set()
    for place, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise FieldError(
                f"tools.{place} is named {name!r} like one before it; give each tool its own name.", "tools"
            )
        seen.add(name)


def _definition(tool: Mapping[str, Any]) -> ToolDefinition:
    function = tool["function"]
    definition = ToolDefinition(function["name"], function.get("parameters") or {})
    for name in definition.types:
        if not is_name(name):
            raise FieldError(
                f"The tool {definition.name!r} has a property named {name[:64]!r}, which the model cannot write in a "
                f"call: a name there has 1 to {MAX_NAME_CHARS} characters, no <, > or line break, and no white space "
                "at its ends. Rename it.",
                "tools",
            )
    return definition


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
                raise FieldError(f"tool_choice names {excerpt(name)}, which is not among the tools.", "tool_choice")
    if chat.grammar:
        raise FieldError("response_format and a tool_choice that asks for a call exclude each other.", "tool_choice")
    return _calls(chosen, is_one=is_one or isinstance(chat.tool_choice, NamedTool))


def _calls(tools: Sequence[ToolDefinition], *, is_one: bool) -> Grammar:
    try:
        return tool_calls(tools, is_one=is_one)
    except UsageError as error:
        raise FieldError(str(error), "tools") from None
