"""Reads a launch line of `vllm serve`, given to `onebox serve` with the program's name replaced.

Spellings of vLLM become ours: `--max_model_len 32K`, `--speculative-config.method mtp`, `-tp 1`, `--model DIR`. A flag
of vLLM without effect here is explained in one line. What cannot be honoured, and what is no flag at all, is refused,
with one line for each.
"""

import difflib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from onebox.cli.command import OneboxCommand
from onebox.cli.counts import COUNT_OPTIONS, read_count
from onebox.cli.vllm_flags import FLAGS, KV_NAMES, LIST_FLAGS, SHORT_NAMES
from onebox.spec.errors import UsageError
from onebox.spec.log import LogStyle

__all__ = ["LaunchCommand", "LaunchLine", "read_launch_line"]

_KV_FLAG = "--kv-cache-dtype"
_DRAFT_FLAG = "--speculative-config"
_JSON = {
    _DRAFT_FLAG,
    "--hf-overrides",
    "--limit-mm-per-prompt",
    "--default-chat-template-kwargs",
    "--override-generation-config",
}
_DRAFT_MODELS = {"draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "suffix"}
_DRAFT_NOTICES = {
    "attention_backend": "onebox has its own kernels",
    "draft_tensor_parallel_size": "onebox runs on one GPU",
    "prompt_lookup_min": "matches of 2 to 4 tokens are tried",
    "prompt_lookup_max": "matches of 2 to 4 tokens are tried",
}


class LaunchCommand(OneboxCommand):
    """A command that takes vLLM's flags beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {
            name: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            if option.param_type_name == "option"
            for name in (*option.opts, *option.secondary_opts)
        }
        if set(args) & set(ctx.help_option_names):
            return super().parse_args(ctx, args)
        line = read_launch_line(args, options)
        if line.refusals:
            raise UsageError("\n".join(line.refusals))
        rest = super().parse_args(ctx, line.arguments)
        style = LogStyle(ctx.params.get("log_format", "text"), ctx.params.get("log_level", "info"))
        for notice in (*line.notices, *_variable_notices(os.environ)):
            if style.writes("info"):
                typer.echo(style.line("info", notice))
        return rest


@dataclass
class LaunchLine:
    """What a launch line becomes."""

    arguments: list[str] = field(default_factory=list)
    """For the command's own parser."""
    notices: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def read_launch_line(words: Sequence[str], options: Mapping[str, bool]) -> LaunchLine:
    """`options`: the command's own, each with whether it takes a value."""
    reader = _Reader(options)
    reader.read(words)
    return reader.finish()


class _Reader:
    """Sorts the words of a launch line."""

    def __init__(self, options: Mapping[str, bool]) -> None:
        self._options = options
        self._line = LaunchLine()
        self._models: list[str] = []
        self._values: dict[str, str] = {}
        """Of own options that may have to be rewritten: the last value holds."""
        self._parts: dict[str, dict[str, Any]] = {}
        """Given part by part: `--speculative-config.method mtp`."""
        self._enables_turboquant = False

    def read(self, words: Sequence[str]) -> None:
        left = deque(words)
        while left:
            word = left.popleft()
            if word == "--":
                self._models += left
                left.clear()
            elif word.startswith("-") and len(word) > 1:
                self._take_flag(word, left)
            else:
                self._models.append(word)

    def finish(self) -> LaunchLine:
        self._merge_parts()
        self._resolve_turboquant()
        self._read_drafts()
        for name, value in self._values.items():
            self._line.arguments += [name, value]
        self._line.arguments += ["--", *self._models] if self._models else []
        return self._line

    # One flag.

    def _take_flag(self, word: str, left: deque[str]) -> None:
        typed, has_value, value = word.partition("=")
        if typed not in SHORT_NAMES and typed.startswith("-O"):
            typed, has_value, value = "-O", "=", typed[2:] or value
        begin, dot, part = typed.partition(".")
        name = begin.replace("_", "-")
        name, more_dot, own_part = SHORT_NAMES.get(name, name).partition(".")
        dot, part = dot or more_dot, part or own_part
        given = value if has_value else None
        if name == "--model":
            self._models.append(given if given is not None else next(iter(self._values_of(name, left)), ""))
        elif name == "--enable-turboquant":
            self._enables_turboquant = True
        elif name in self._options and (not dot or name in _JSON):
            self._take_own(name, part if dot else None, given, left)
        elif name.lstrip("-") in FLAGS:
            self._take_foreign(name, typed, given, left)
        else:
            self._line.refusals.append(self._unknown(typed))

    def _values_of(self, name: str, left: deque[str]) -> list[str]:
        """The words that belong to a flag: one, or all up to the next flag where it takes a list.

        Only behind the model's own: `--served-model-name qwen DIR` ends with the model, which vLLM would not take.
        """
        found = [left.popleft()] if left else []
        while name.lstrip("-") in LIST_FLAGS and self._models and left and not left[0].startswith("-"):
            found.append(left.popleft())
        return found

    def _take_own(self, name: str, part: str | None, given: str | None, left: deque[str]) -> None:
        if not self._options[name]:
            self._line.arguments.append(name if given is None else f"{name}={given}")
            return
        values = [given] if given is not None else self._values_of(name, left)
        if not values:
            self._line.refusals.append(f"{name} needs a value.")
            return
        value = values[0]
        if part is not None:
            self._parts.setdefault(name, {})[part] = _part_value(value)
        elif name in COUNT_OPTIONS:
            self._take_count(name, value)
        elif name == _KV_FLAG or name in _JSON:
            self._values[name] = value
        else:
            self._line.arguments += [word for one in values for word in (name, one)]

    def _take_count(self, name: str, text: str) -> None:
        if name == "--max-model-len" and text in ("auto", "-1"):
            self._line.notices.append(f"{name} {text}: the model's limit, which is the default here.")
            return
        self._line.arguments += [name, read_count(text)]

    def _take_foreign(self, name: str, typed: str, given: str | None, left: deque[str]) -> None:
        flag = FLAGS[name.lstrip("-")]
        value = None
        if flag.takes_value:
            values = [given] if given is not None else self._values_of(name, left)
            if not values:
                self._line.refusals.append(f"{typed} needs a value.")
                return
            value = values[0]
        shown = typed if value is None or flag.accepted is None else f"{typed} {value}"
        if flag.accepted is None or value in flag.accepted:
            self._line.notices.append(f"{shown}: {flag.reason}.")
        else:
            self._line.refusals.append(f"{shown} is not supported: {flag.reason}.")

    def _unknown(self, typed: str) -> str:
        known = [*self._options, *(f"--{name}" for name in FLAGS)]
        near = difflib.get_close_matches(typed.replace("_", "-"), known, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "--help lists the options."
        return f"{typed} is no option of this command; {hint}"

    # What several flags say together.

    def _merge_parts(self) -> None:
        for name, parts in self._parts.items():
            whole = self._values.get(name, "{}")
            try:
                merged = dict(json.loads(whole))
            except (json.JSONDecodeError, TypeError, ValueError):
                continue  # its own check says what is wrong with it
            for path, value in parts.items():
                _put_part(merged, path.split("."), value)
            self._values[name] = json.dumps(merged)

    def _resolve_turboquant(self) -> None:
        name = self._values.get(_KV_FLAG, "auto")
        if name in KV_NAMES:
            ours, why = KV_NAMES[name]
            self._values[_KV_FLAG] = ours
            self._line.notices.append(f"{_KV_FLAG} {name}: stored as {ours} ({why}).")
        if not self._enables_turboquant:
            return
        if name == "auto":
            self._values[_KV_FLAG] = "turboquant"
            self._line.notices.append(f"--enable-turboquant: means {_KV_FLAG} turboquant.")
        elif name.startswith("turboquant"):
            self._line.notices.append(f"--enable-turboquant: {_KV_FLAG} says it.")
        else:
            self._line.refusals.append(f"--enable-turboquant contradicts {_KV_FLAG} {name}; leave one of them out.")

    def _read_drafts(self) -> None:
        """The MTP head is that of the served checkpoint, also where vLLM would be told so."""
        try:
            drafts = json.loads(self._values[_DRAFT_FLAG])
        except (KeyError, json.JSONDecodeError):
            return
        if not isinstance(drafts, dict):
            return
        if drafts.get("method") in _DRAFT_MODELS:
            self._line.refusals.append(
                f"{_DRAFT_FLAG} asks for drafts by {drafts['method']}, which need a model of their own; onebox drafts "
                "by mtp (the checkpoint's MTP head), by dflash (a block drafter), by ngram (the text itself) or by "
                "auto (all of them)."
            )
        if drafts.get("model") is not None and [drafts["model"]] == self._models:
            del drafts["model"]
        for key in drafts.keys() & _DRAFT_NOTICES.keys():
            del drafts[key]
            self._line.notices.append(f"{_DRAFT_FLAG} {key}: {_DRAFT_NOTICES[key]}.")
        self._values[_DRAFT_FLAG] = json.dumps(drafts)


def _variable_notices(environment: Mapping[str, str]) -> Iterator[str]:
    names = sorted(name for name in environment if name.startswith("VLLM_"))
    if names:
        yield f"{', '.join(names)}: settings of vLLM in the environment, which onebox does not read."


def _put_part(whole: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """`text_config.rope_parameters.factor` is a key of a key of a key."""
    first, *rest = path
    if not rest:
        whole[first] = value
        return
    inner = whole.get(first)
    whole[first] = dict(inner) if isinstance(inner, dict) else {}
    _put_part(whole[first], rest, value)


def _part_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
