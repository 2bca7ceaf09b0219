"""Messages to the prompt's text, through the checkpoint's own chat template in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.model import read_json

__all__ = ["ChatTemplate"]

# What the caller of a template gives it, and so no one else may.
_OURS = {"messages", "tools", "add_generation_prompt"}


class ChatTemplate:
    """One checkpoint's template. `options` are the names that requests may set through chat_template_kwargs."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = _outside_names(environment.parse(source))
        except jinja2.TemplateError as error:
            raise UnreadableError(f"The chat template is not valid Jinja ({error}): download it again.") from None
        self.options = frozenset(names - _OURS - set(environment.globals))

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """The template in chat_template.jinja, or where older tools kept it, in tokenizer_config.json."""
        path = directory / "chat_template.jinja"
        if path.exists():
            return cls(path.read_text(encoding="utf-8"))
        source = read_json(directory / "tokenizer_config.json").get("chat_template")
        if not isinstance(source, str):
            raise UnreadableError(
                f"{directory} has no chat template, neither {path.name} nor in tokenizer_config.json."
            )
        return cls(source)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The prompt up to where the assistant's answer begins. A refusal by the template is a UsageError."""
        for name in options or {}:
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise UsageError(
                    f"chat_template_kwargs.{name} is not read by this model's template; it reads: {known}."
                )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **(options or {}))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"The chat template refused the messages: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    # Whitespace rules, loop controls and helpers are those that model makers write their templates against.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _outside_names(tree: nodes.Template) -> set[str]:
    """The names that a template expects from outside.

    Jinja counts a name that some branch sets as one that may be missing. It is an option only if the template asks
    whether it is there, as in `enable_thinking is defined` or `enable_thinking | default(true)`.
    """
    set_inside = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    asked = [t.node for t in tree.find_all(nodes.Test) if t.name in ("defined", "undefined")]
    asked += [f.node for f in tree.find_all(nodes.Filter) if f.name in ("default", "d") and f.node]
    asked_for = {node.name for node in asked if isinstance(node, nodes.Name)}
    undeclared = meta.find_undeclared_variables(tree)
    return undeclared - set_inside | undeclared & asked_for


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
