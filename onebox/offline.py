"""Sampling parameters of offline use, under vLLM's names, and the text of an answer that they ask for.

What the engine does itself is checked by its own `SamplingParams`; here is what concerns text, and several answers to a
prompt. A parameter that cannot be honoured is refused with the reason.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from onebox.engine.api import Grammar, SamplingParams
from onebox.spec.errors import UsageError
from onebox.text.stream import StopStrings
from onebox.text.tokenizer import Tokenizer

__all__ = ["AnswerReader", "OfflineSamplingParams"]

_REFUSED = {
    "logits_processors": "no code runs inside a step; use logit_bias or structured_outputs",
    "allowed_token_ids": "say what an answer may be with structured_outputs",
    "bad_words": "ban single tokens with a logit_bias of -100",
    "extra_args": "nothing reads them",
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_ENGINE_FIELDS = frozenset(SamplingParams.__dataclass_fields__)


@dataclass(kw_only=True)
class OfflineSamplingParams:
    """`onebox.SamplingParams`. May be changed after it was made, as vLLM's; it is checked again when it is used."""

    n: int = 1
    """Answers to each prompt; with a seed, the second has the next one."""
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    """None: as many as the context holds, where vLLM has 16."""
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """False: the answer's text is empty."""
    skip_special_tokens: bool = True
    """False: control tokens are in the text, by their names."""
    spaces_between_special_tokens: bool = True
    """Without effect: this family's tokenizer writes none."""
    truncate_prompt_tokens: int | None = None
    """As many tokens of the prompt's end are used; -1: as many as the context leaves."""
    structured_outputs: Any = None
    """An object, or a mapping, with one of json, regex, choice, grammar and json_object."""
    guided_decoding: Any = None
    """Its older name."""
    grammar: Grammar | None = None
    output_kind: Any = None
    """Without effect: answers are returned when they are whole."""
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    extra_args: Any = None

    def __post_init__(self) -> None:
        self.for_engine()

    @classmethod
    def of(cls, params: "OfflineSamplingParams | SamplingParams") -> "OfflineSamplingParams":
        if isinstance(params, cls):
            return params
        return cls(**{field.name: getattr(params, field.name) for field in fields(params)})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def for_engine(self, copy: int = 0) -> SamplingParams:
        """What the engine is given for one of the n answers; refuses what cannot be honoured."""
        self._refuse_unsupported()
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS}
        bias = self.logit_bias or ()
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        return SamplingParams(
            **given
            | {
                "top_k": 0 if self.top_k == -1 else self.top_k,
                "logit_bias": tuple((int(token_id), value) for token_id, value in pairs),
                "stop_token_ids": tuple(self.stop_token_ids or ()),
                "seed": self.seed if self.seed is None else self.seed + copy,
                "grammar": self._grammar(),
            }
        )

    def shortened(self, prompt: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
        """The end of the prompt that truncate_prompt_tokens leaves."""
        if self.truncate_prompt_tokens is None:
            return prompt
        room = max_model_len - (self.max_tokens or 1)
        return prompt[-(room if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens) :]

    def _refuse_unsupported(self) -> None:
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                raise UsageError(f"{name} is not supported: {reason}.")
        if not isinstance(self.n, int) or self.n < 1:
            raise UsageError(f"n is {self.n}; it must be a whole number of at least 1.")
        if self.best_of not in (None, self.n):
            raise UsageError("best_of is not supported: answers are not ranked; ask for n of them and choose.")
        if any(not isinstance(text, str) or not text for text in self.stops):
            raise UsageError("stop holds something that is no text, or an empty one; give texts.")
        if self.stops and not self.detokenize:
            raise UsageError("stop needs the text in which it is searched; leave detokenize=False out.")
        length = self.truncate_prompt_tokens
        if length is not None and length != -1 and length < 1:
            raise UsageError(f"truncate_prompt_tokens is {length}; it must be at least 1, or -1 for what fits.")

    def _grammar(self) -> Grammar | None:
        found = [asked for asked in (self.structured_outputs, self.guided_decoding) if asked is not None]
        if not found:
            return self.grammar
        if len(found) > 1 or self.grammar is not None:
            raise UsageError("structured_outputs, guided_decoding and grammar say the same; give one of them.")
        asked = found[0]
        named = asked if isinstance(asked, Mapping) else {kind: getattr(asked, kind, None) for kind in _KINDS}
        given = {kind: named[kind] for kind in _KINDS if named.get(kind)}
        if len(given) != 1 or (isinstance(asked, Mapping) and asked.keys() - set(_KINDS)):
            raise UsageError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}.")
        ((kind, value),) = given.items()
        return _make_grammar(kind, value)


def _make_grammar(kind: str, value: Any) -> Grammar:
    match kind:
        case "json":
            schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
            return Grammar.json_schema(_read_json(schema) if isinstance(schema, str) else schema)
        case "json_object":
            return Grammar.json_object()
        case "regex":
            return Grammar.regex(value)
        case "choice":
            return Grammar.choice(value)
    return Grammar.cfg(value)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"The JSON schema is a text that is not JSON ({error}).") from None


class AnswerReader:
    """Tokens of one answer to its text, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, params: OfflineSamplingParams) -> None:
        self.text = ""
        self._params = params
        self._bytes_of = tokenizer.token_bytes if params.skip_special_tokens else tokenizer.shown_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(params.stops)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.stopped_by

    def push(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens are part of the answer: all, unless a stop string is complete before."""
        if not self._params.detokenize:
            return len(token_ids)
        for place, token_id in enumerate(token_ids, 1):
            self.text += self._stops.push(self._decoder.decode(self._bytes_of(token_id)))
            if self.stopped_by is not None:
                return place
        return len(token_ids)

    def finish(self) -> str:
        if self.stopped_by is None:
            self.text += self._stops.push(self._decoder.decode(b"", final=True)) + self._stops.flush()
        elif self._params.include_stop_str_in_output:
            self.text += self.stopped_by
        return self.text
