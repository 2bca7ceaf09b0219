"""Fields that several dialects share. Unknown fields are refused by name, and so are values without an effect."""

import json
import math
from collections.abc import Sized
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from onebox.engine.api import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from onebox.server.errors import FieldError, excerpt
from onebox.spec.errors import UsageError
from onebox.text.generation import GenerationDefaults

__all__ = [
    "LISTED",
    "MAX_CHOICES",
    "FunctionName",
    "GenerationFields",
    "HarmlessFields",
    "Json",
    "JsonObject",
    "JsonValues",
    "LongText",
    "MediaText",
    "Name",
    "StreamOptions",
    "Strict",
    "StrictWithNulls",
    "Text",
    "TextOrObject",
    "TokenLimit",
    "ToolChoiceWord",
    "UnstoredFields",
    "by_type",
    "refuse_choice_without_tools",
    "refuse_unless_paired",
    "text_or_list",
    "type_tag",
    "word_or_object",
]

Json = dict[str, Any]

MAX_CHOICES = 128
LISTED: Any = Field(max_length=1 << 16, fail_fast=True)
"""Of lists of messages, parts or blocks. After the first wrong item no other is looked at."""
_MAX_FIELDS = 256
_MAX_TEXT = 16 << 20
_MAX_MEDIA = 64 << 20
_MAX_DEPTH = 100
_MAX_VALUES = 1 << 17
_MAX_INTEGER = 10**300
# Room for the seeds of all choices, which count up from the one given.
_MAX_SEED = 2**63 - MAX_CHOICES


class Strict(BaseModel):
    """No unknown fields, no conversions, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        # Each unknown field would become an error of its own.
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise ValueError(f"an object here has at most {_MAX_FIELDS} fields, and this one has {len(value)}")
        return value


class StrictWithNulls(Strict):
    """The same, where null means absent: clients add nulls to what they send back of an answer."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: held for name, held in value.items() if held is not None} if isinstance(value, dict) else value


# Bounds. Every text, list and object has one, whatever the limit of the body.

Name = Annotated[str, Field(max_length=512)]
"""A name, an id or a word."""
LongText = Annotated[str, Field(max_length=_MAX_TEXT)]
MediaText = Annotated[str, Field(max_length=_MAX_MEDIA)]
"""A URL, or an image or a video as text."""
TokenLimit = Annotated[int, Field(ge=1, lt=2**31)]


def _bounded_json(value: Any) -> Any:
    """Refuses what nests too deep, has too many values, or holds numbers and texts that cannot be written."""
    num_values, depth, level = 0, 0, [value]
    while level:
        depth += 1
        num_values += len(level)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")
        if num_values > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES} values")
        for held in level:
            _refuse_bad_number(held)
            _refuse_bad_text(held)
        level = [inner for held in level for inner in _inner(held)]
    return value


def _inner(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _refuse_bad_number(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it holds {value}, which is not a JSON number")
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError("it holds an integer of more than 300 digits")


def _refuse_bad_text(value: Any) -> None:
    """JSON can spell half of a surrogate pair, as a text or a name. It would be answered as another text."""
    texts = value if isinstance(value, dict) else (value,) if isinstance(value, str) else ()
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode; it holds half of a surrogate pair") from None


JsonObject = Annotated[dict[str, Any], BeforeValidator(_bounded_json)]
"""An object of a form that is not ours, such as a schema."""
JsonValues = Annotated[list[Any], BeforeValidator(_bounded_json)]


# Unions. A discriminator chooses the member to validate against, so that an error is about that member alone.


def text_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def word_or_object(value: Any) -> str:
    return "<word>" if isinstance(value, str) else "<object>"


def type_tag(value: Any) -> str:
    return f"<{value.get('type') if isinstance(value, dict) else getattr(value, 'type', None)}>"


def by_type(*types: str) -> Discriminator:
    """By the field `type`, which must be one of these."""
    message = f"the type must be one of {', '.join(types)}"
    return Discriminator(type_tag, custom_error_type="type_tag", custom_error_message=message)


Text = Annotated[LongText, Tag("<text>")]
TextOrObject = Annotated[
    Annotated[LongText, Tag("<word>")] | Annotated[JsonObject, Tag("<object>")], Discriminator(word_or_object)
]
ToolChoiceWord = Annotated[Literal["none", "auto", "required"], Tag("<word>")]
# What the XML form of a call can carry: it ends at ">" and has no escapes.
FunctionName = Annotated[str, Field(pattern=r"^[^<>\s]{1,128}$")]


def refuse_unless_paired(kind: str, needed: str, name: str, value: object) -> None:
    """The field `name` goes with the type `needed` and with no other."""
    if (kind == needed) != (value is not None):
        raise ValueError(f"{name} is given exactly with the type {needed}")


def refuse_choice_without_tools(choice: object, tools: Sized | None) -> None:
    if choice not in (None, "none", "auto") and not tools:
        raise ValueError("tool_choice asks for a call and there are no tools; give some")


# Bounded, because each new token is compared with all of it.
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Stops = Annotated[
    Annotated[_Stop, Tag("<text>")] | Annotated[list[_Stop], Field(max_length=16, fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list),
]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Choices = Annotated[list[LongText], LISTED]
_MAX_BIASES = 1024


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"it names {len(value)} tokens, and {_MAX_BIASES} are the limit")
    return value


_Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    """A last chunk carries the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far."""


class JsonSchemaFormat(Strict):
    """OpenAI's wrapping of a schema. The answer always follows it, whatever `strict` is."""

    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        refuse_unless_paired(self.type, "json_schema", "json_schema", self.json_schema)
        return self


class StructuredOutputs(Strict):
    """vLLM's constraints of an answer: one of these."""

    json_: Annotated[TextOrObject | None, Field(alias="json")] = None
    regex: LongText | None = None
    choice: _Choices | None = None
    grammar: LongText | None = None
    json_object: bool | None = None


class HarmlessFields(Strict):
    """Fields that clients send and that have no effect on the answer, here or elsewhere."""

    user: Name | None = None
    metadata: JsonObject | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Literal["auto", "default"] | None = None


class UnstoredFields(HarmlessFields):
    """Of an endpoint whose answers are not kept."""

    store: Literal[False] | None = None
    """Nothing is stored."""


class SpelledOutFields(Strict):
    """Options that routers such as vllm-router write into every request. Each may say only what is done anyway."""

    skip_special_tokens: Literal[True] | None = None
    """Control tokens have no text."""
    no_stop_trim: Literal[False] | None = None
    """Stop strings are cut off."""
    return_hidden_states: Literal[False] | None = None


class GrammarFields(Strict):
    """Constraints of the content; at most one of these. With thinking on, it applies to what follows the reasoning."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: TextOrObject | None = None
    guided_regex: LongText | None = None
    guided_choice: _Choices | None = None
    guided_grammar: LongText | None = None
    """In Lark's notation."""

    @property
    def grammar(self) -> Grammar | None:
        """A refusal names the field."""
        asked = [*self._formats(), *self._structured(), *self._guided()]
        if len(asked) > 1:
            names = f"{asked[0][0]} and {asked[1][0]}"
            raise FieldError(f"{names} both say what the answer must be; give one.", asked[1][0])
        for name, kind, value in asked:
            try:
                return _make_grammar(kind, value).named(name)
            except UsageError as error:
                raise FieldError(str(error), name) from None
        return None

    def _formats(self) -> list[tuple[str, str, Any]]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        schema = asked.json_schema.schema_ if asked.json_schema else None
        return [("response_format", "json" if asked.json_schema else "json_object", schema)]

    def _structured(self) -> list[tuple[str, str, Any]]:
        asked = self.structured_outputs
        if asked is None:
            return []
        kinds = {
            "json": asked.json_,
            "regex": asked.regex,
            "choice": asked.choice,
            "grammar": asked.grammar,
            "json_object": asked.json_object or None,
        }
        return [(f"structured_outputs.{kind}", kind, value) for kind, value in kinds.items() if value is not None]

    def _guided(self) -> list[tuple[str, str, Any]]:
        kinds = ("json", "regex", "choice", "grammar")
        given = [(kind, getattr(self, f"guided_{kind}")) for kind in kinds]
        return [(f"guided_{kind}", kind, value) for kind, value in given if value is not None]


def _make_grammar(kind: str, value: Any) -> Grammar:
    match kind:
        case "json":
            return Grammar.json_schema(_schema(value))
        case "json_object":
            return Grammar.json_object()
        case "regex":
            return Grammar.regex(value)
        case "choice":
            return Grammar.choice(value)
        case _:
            return Grammar.cfg(value)


def _schema(value: dict[str, Any] | str) -> Any:
    """A schema; vLLM also takes it as text."""
    if not isinstance(value, str):
        return value
    # Before it is parsed: the bounds of the body's own JSON do not count what is inside a text.
    if len(value) > MAX_GRAMMAR_BYTES:
        raise UsageError(f"The JSON schema has {len(value)} characters; at most {MAX_GRAMMAR_BYTES} are allowed.")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The JSON schema is a text that is not JSON ({error}).") from None


class GenerationFields(UnstoredFields, SpelledOutFields, GrammarFields):
    """The fields that chat and completions share. Null means absent, as in OpenAI's API."""

    model: Name | None = None
    """None: the served model."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: _Biases | None = None
    """Token id, as text, to what is added to its logit."""
    seed: Annotated[int, Field(ge=-(2**63), lt=_MAX_SEED)] | None = None
    stop: _Stops | None = None
    """The answer, reasoning included, ends before the first of these texts."""
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=128, fail_fast=True)] | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Adds the token ids of the answer and of the prompt."""
    cache_prompt: bool | None = None
    """False: the prompt is neither looked up in the prefix cache nor stored there."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Lower numbers are scheduled first."""

    @field_validator("logit_bias")
    @classmethod
    def _token_ids_as_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (len(key) <= 10 and key.isascii() and key.isdigit()):
                raise ValueError(f"{excerpt(key)} is no token id")
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

    @property
    def has_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling(
        self,
        defaults: GenerationDefaults,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        """The engine's parameters; what the request leaves open has the defaults of generation_config.json."""
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature),
            top_p=_first(self.top_p, defaults.top_p),
            top_k=defaults.top_k if self.top_k is None else max(self.top_k, 0),
            min_p=_first(self.min_p, defaults.min_p),
            presence_penalty=_first(self.presence_penalty, defaults.presence_penalty),
            frequency_penalty=_first(self.frequency_penalty, defaults.frequency_penalty),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple((int(key), bias) for key, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
