"""What requests may hold. A field that is not here is refused by name, and so is a value that would not be honoured."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from onebox.engine.api import SamplingParams
from onebox.text.generation import GenerationDefaults

__all__ = ["UNION_TAGS", "ChatRequest", "CompletionRequest", "Message"]

_INT64 = 2**63

# Which member of a union a value is meant to be, so that an error speaks of that member alone.
UNION_TAGS = frozenset({"text", "list"})


def _text_or_list(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


_Text = Annotated[str, Tag("text")]
_Content = Annotated[_Text | Annotated[list[TextPart], Tag("list")], Discriminator(_text_or_list)]
# Bounded, because each new token is compared with all of it.
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Stops = Annotated[
    Annotated[_Stop, Tag("text")] | Annotated[list[_Stop], Field(max_length=16), Tag("list")],
    Discriminator(_text_or_list),
]
_Prompt = Annotated[_Text | Annotated[list[int], Tag("list")], Discriminator(_text_or_list)]


class Message(_Strict):
    """One turn. `reasoning_content` is what an earlier answer of ours had under that name."""

    role: Literal["system", "user", "assistant"]
    content: _Content | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("only an assistant message has reasoning_content")
        return self


class StreamOptions(_Strict):
    include_usage: bool | None = None


class _Request(_Strict):
    """The fields that both endpoints share. Null means absent, as in OpenAI's API."""

    model: str | None = None
    """None: the one model there is."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 and 0 keep all tokens."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: _Stops | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(f"onebox gives one choice a request, not {value}; send the request that many times")
        return value

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; it says what a stream holds")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The engine's parameters; what the request leaves open is as the model's maker recommends."""
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else max(self.top_k, 0),
            seed=self.seed,
            max_tokens=self.token_limit,
            ignore_eos=bool(self.ignore_eos),
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit and differ; give one")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request):
    """POST /v1/completions. The prompt is text or token ids; 16 tokens unless told, as in OpenAI's API."""

    prompt: _Prompt

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or 16
