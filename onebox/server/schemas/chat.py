"""The body of a chat completion: messages, tools, thinking, and the generation fields."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from onebox.engine.api import SamplingParams
from onebox.server.prompt import ChatInput, Effort, NamedTool, ToolChoice
from onebox.server.schemas.common import (
    LISTED,
    FunctionName,
    GenerationFields,
    JsonObject,
    LongText,
    MediaText,
    Name,
    Strict,
    Text,
    TokenLimit,
    ToolChoiceWord,
    by_type,
    refuse_choice_without_tools,
    text_or_list,
    word_or_object,
)
from onebox.text.generation import GenerationDefaults

__all__ = ["ChatMessage", "ChatPromptFields", "ChatRequest", "ChatTool", "FunctionDefinition"]

_Budget = Annotated[int, Field(ge=0, lt=2**31)]
_BUDGETS = ("thinking_budget", "max_reasoning_tokens", "thinking_token_budget")


class ChatTextPart(Strict):
    type: Literal["text"]
    text: LongText


class ImageUrl(Strict):
    url: MediaText
    """http(s), a data URL, or a file: URL where the operator allows it."""
    detail: Literal["auto", "low", "high"] | None = None
    """low: at most 512 x 512 pixels are used; otherwise the limit of the checkpoint's processor files."""


class ChatImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Strict):
    url: MediaText


class ChatVideoPart(Strict):
    type: Literal["video_url"]
    video_url: VideoUrl


_Part = Annotated[
    Annotated[ChatTextPart, Tag("<text>")]
    | Annotated[ChatImagePart, Tag("<image_url>")]
    | Annotated[ChatVideoPart, Tag("<video_url>")],
    by_type("text", "image_url", "video_url"),
]
_Content = Annotated[Text | Annotated[list[_Part], LISTED, Tag("<list>")], Discriminator(text_or_list)]


class CalledFunction(Strict):
    name: FunctionName
    arguments: LongText
    """The JSON of an object."""


class ChatToolCall(Strict):
    """A call in an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Left in by clients that join streams; without effect."""


class CopiedFields(Strict):
    """Fields of an earlier answer as LiteLLM repeats them beside the message's own."""

    refusal: None = None
    reasoning_content: LongText | None = None
    reasoning: LongText | None = None


class ChatMessage(Strict):
    """One turn. An earlier answer may be sent back unchanged, its nulls included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    reasoning_content: LongText | None = None
    reasoning: LongText | None = None
    """The same under its other name."""
    tool_calls: Annotated[list[ChatToolCall], LISTED] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    """Of a tool; without effect, since tool_call_id identifies the call."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    provider_specific_fields: CopiedFields | None = None
    """Left in by LiteLLM; without effect, since the fields themselves are in the message."""

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        for name in ("reasoning_content", "reasoning", "tool_calls", "provider_specific_fields"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise ValueError(f"only an assistant message has {name}")
        for name in ("tool_call_id", "name"):
            if getattr(self, name) is not None and self.role != "tool":
                raise ValueError(f"{name} is not supported but on a tool message, so remove it")
        return self

    def for_template(self) -> dict[str, Any]:
        """As the template takes it: without nulls, except that the content is always a text or a list."""
        return {"content": "", **self.model_dump(exclude_none=True, exclude={"provider_specific_fields"})}


class FunctionDefinition(Strict):
    name: FunctionName
    description: LongText | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Accepted without effect: arguments are always typed by the schema, and constrained to it where tool_choice asks
    for a call."""


class ChatTool(Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class _ChosenFunction(Strict):
    name: Name


class ChatChosenTool(Strict):
    type: Literal["function"]
    function: _ChosenFunction


_ToolChoice = Annotated[ToolChoiceWord | Annotated[ChatChosenTool, Tag("<object>")], Discriminator(word_or_object)]


class ChatPromptFields(Strict):
    """The fields that make up a chat's prompt."""

    messages: Annotated[list[ChatMessage], LISTED, Field(min_length=1)]
    tools: Annotated[list[ChatTool], Field(max_length=512, fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    reasoning_effort: Effort | None = None
    """A thinking budget by name: minimal 512, low 2048, medium 8192, high 32768 tokens, xhigh and max without limit;
    none turns thinking off."""
    thinking_budget: _Budget | None = None
    """Tokens of reasoning after which it is closed and the answer continues; 0 turns thinking off. Overrides
    reasoning_effort. Also accepted inside chat_template_kwargs."""
    max_reasoning_tokens: _Budget | None = None
    """Another name of thinking_budget."""
    thinking_token_budget: _Budget | None = None
    """vLLM's name of thinking_budget."""
    enable_thinking: bool | None = None
    """Short for chat_template_kwargs.enable_thinking."""
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len(set(self._budgets().values())) > 1:
            raise ValueError(f"{', '.join(_BUDGETS)} are names of one limit and differ; give one")
        return self

    @model_validator(mode="after")
    def _thinks_or_not(self) -> Self:
        """Fields that turn thinking on and fields that turn it off exclude each other."""
        inner = (self.chat_template_kwargs or {}).get("enable_thinking")
        if inner is not None and not isinstance(inner, bool):
            raise ValueError("chat_template_kwargs.enable_thinking must be true or false")
        said = [("enable_thinking", self.enable_thinking), ("chat_template_kwargs.enable_thinking", inner)]
        said += [("reasoning_effort", self.reasoning_effort and self.reasoning_effort != "none")]
        said += [(name, budget > 0) for name, budget in self._budgets().items()]
        turns_on, turns_off = ([name for name, thinks in said if thinks is value] for value in (True, False))
        if turns_on and turns_off:
            raise ValueError(f"thinking is turned on by {turns_on[0]} and off by {turns_off[0]}; give one of them")
        return self

    @model_validator(mode="after")
    def _a_choice_of_something(self) -> Self:
        refuse_choice_without_tools(self.tool_choice, self.tools)
        return self

    def chat_prompt(self) -> ChatInput:
        """The chat, with the sampling of a request that names none."""
        options = dict(self.chat_template_kwargs or {})
        options.pop("thinking_budget", None)
        if options.get("enable_thinking") is None and self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        return ChatInput(
            messages=[message.for_template() for message in self.messages],
            sampling=SamplingParams(),
            tools=[tool.for_template() for tool in self.tools or ()],
            tool_choice=self._chosen(),
            template_options=options,
            effort=self.reasoning_effort,
            thinking_budget=next(iter(self._budgets().values()), None),
        )

    def _chosen(self) -> ToolChoice:
        choice = self.tool_choice
        return NamedTool(choice.function.name) if isinstance(choice, ChatChosenTool) else choice or "auto"

    def _budgets(self) -> dict[str, int]:
        """Those given, by field."""
        inner = (self.chat_template_kwargs or {}).get("thinking_budget")
        if inner is not None and (not isinstance(inner, int) or isinstance(inner, bool) or not 0 <= inner < 2**31):
            raise ValueError("chat_template_kwargs.thinking_budget must be a whole number from 0 up, below 2^31")
        given = {"chat_template_kwargs.thinking_budget": inner, **{name: getattr(self, name) for name in _BUDGETS}}
        return {name: budget for name, budget in given.items() if budget is not None}


class ChatRequest(GenerationFields, ChatPromptFields):
    max_completion_tokens: TokenLimit | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Of every token of the answer, reasoning included."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    # As in SpelledOutFields: reasoning is always told apart and streamed, and the answer is a message of its own.
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit and differ; give one")
        return self

    @model_validator(mode="after")
    def _alternatives_of_something(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def chat_input(self, defaults: GenerationDefaults) -> ChatInput:
        """Checks a grammar's bounds, which may be slow: to be called beside the event loop."""
        return replace(
            self.chat_prompt(),
            sampling=self.sampling(defaults, logprobs=(self.top_logprobs or 0) if self.logprobs else None),
            has_parallel_calls=self.parallel_tool_calls is not False,
            grammar=self.grammar,
            stops=self.stops,
            priority=self.priority or 0,
            cache_prompt=self.cache_prompt is not False,
        )
