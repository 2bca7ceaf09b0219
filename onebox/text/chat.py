"""Messages to the prompt's text, through the checkpoint's own chat template in a sandbox.

With a `Shield`, what the client wrote is covered, so that no mark in it reaches the prompt as a control token. The
family's templates look for marks in messages at two places, and then see the following:

- An assistant's content with `<think>...</think>` in it, and no reasoning of its own: the message is split into both
  before it is covered, by the templates' own rule, so that old reasoning is dropped as before.
- A user's message between `<tool_response>` and `</tool_response>`, which they take for a tool's result and not for a
  question: it is a user's text, and so a question. Results are messages of the role `tool`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.model import read_json
from onebox.text.arguments import MAX_ARGUMENT_VALUES, has_more_values, parse_json
from onebox.text.shield import Shield

__all__ = ["ChatTemplate", "TextTooLongError"]

# What the caller of a template gives it, and so no one else may.
_OURS = {"messages", "tools", "add_generation_prompt"}
_GAP = {"type": "text", "text": "\n\n"}
_REASONING, _REASONING_END = "<think>", "</think>"


class TextTooLongError(UsageError):
    """A rendered prompt is longer than its caller can use."""


class ChatTemplate:
    """One checkpoint's template. `options` are the names that requests may set through chat_template_kwargs."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self.source = source
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise UnreadableError(f"The chat template is not valid Jinja ({error}): download it again.") from None
        self.options = frozenset(_outside_names(tree) - _OURS - set(environment.globals))
        self.switches = self.options & _switches(tree)
        """Those that are only asked whether they are true."""
        self._splits_reasoning = _REASONING_END in source and "reasoning_content" in source

    @classmethod
    def load(cls, directory: Path, file: Path | None = None) -> "ChatTemplate":
        """The template in `file`, else in chat_template.jinja, or where older tools kept it, tokenizer_config.json."""
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"))
            except OSError as error:
                raise UnreadableError(
                    f"The chat template {file} cannot be read ({error.strerror}); give a file that is there, or leave "
                    "--chat-template out to use the checkpoint's own."
                ) from None
        path = directory / "chat_template.jinja"
        if path.exists():
            return cls(path.read_text(encoding="utf-8"))
        source = read_json(directory / "tokenizer_config.json").get("chat_template")
        if not isinstance(source, str):
            raise UnreadableError(
                f"{directory} has no chat template, neither {path.name} nor in tokenizer_config.json."
            )
        return cls(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        shield: Shield | None = None,
        max_chars: int | None = None,
    ) -> str:
        """The prompt up to where the assistant's answer begins. A refusal by the template is a UsageError.

        Messages and tools are in OpenAI's shape. Each image and video leaves one pad token in the text. With `shield`,
        the client's part of the text is covered. A text that grows beyond `max_chars` is refused with
        TextTooLongError.
        """
        options = self.check_options(options or {})
        turned = [self._split_reasoning(m) for m in _template_messages(messages)]
        given = {"messages": turned, "tools": list(tools) or None, **options}
        try:
            covered = shield.cover(given) if shield else given
            return _joined(self._template.generate(**covered, add_generation_prompt=True), max_chars)
        except UsageError:
            raise
        except RecursionError:
            raise UsageError("The messages or tools are nested too deeply for the chat template.") from None
        except Exception as error:
            # Of any kind: a template is a program that runs on what the client sent.
            reason = shield.uncover(str(error)) if shield else error
            raise UsageError(f"The chat template refused the messages: {reason}") from None

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that are not null. One that the template cannot use is refused by name."""
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise UsageError(
                    f"chat_template_kwargs.{name[:64]} is not read by this model's template; it reads: {known}."
                )
            if name in self.switches and not isinstance(value, bool | None):
                raise UsageError(f"chat_template_kwargs.{name} is true or false; it cannot be {repr(value)[:64]}.")
        return {name: value for name, value in options.items() if value is not None}

    def _split_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """An assistant's message whose content holds its reasoning between marks, where the template would split it."""
        content = _text(message.get("content"))
        is_split = message.get("role") != "assistant" or isinstance(message.get("reasoning_content"), str)
        if is_split or not self._splits_reasoning or content is None or _REASONING_END not in content:
            return message
        parts = content.strip().split(_REASONING_END)
        reasoning = parts[0].split(_REASONING)[-1]
        return {**message, "reasoning_content": reasoning, "content": parts[-1].lstrip("\n")}


def _joined(pieces: Iterable[str], max_chars: int | None) -> str:
    kept, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        if max_chars is not None and num_chars > max_chars:
            raise TextTooLongError(f"The prompt has more than {max_chars} characters.")
        kept.append(piece)
    return "".join(kept)


def _text(content: Any) -> str | None:
    """Content that is text alone, in one part or several."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    kept = [text for text in texts if isinstance(text, str)]
    return "".join(kept) if len(kept) == len(texts) else None


def _template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as the family's templates read them: one system message, the first; arguments as objects."""
    turned = [_template_message(message, f"messages.{place}") for place, message in enumerate(messages)]
    num_leading = next((place for place, message in enumerate(turned) if message.get("role") != "system"), len(turned))
    # Agents put instructions in the middle, which the templates refuse; as a user's turn they keep their place.
    later = [{**m, "role": "user"} if m.get("role") == "system" else m for m in turned[num_leading:]]
    if num_leading < 2:
        return turned[:num_leading] + later
    parts = [part for message in turned[:num_leading] for part in (*_parts(message.get("content")), _GAP)]
    return [{"role": "system", "content": parts[:-1]}, *later]


def _template_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    turned = dict(message)
    if turned.get("role") == "developer":
        turned["role"] = "system"
    if turned.get("reasoning_content") is None and (reasoning := turned.pop("reasoning", None)) is not None:
        turned["reasoning_content"] = reasoning
    if isinstance(turned.get("content"), list):
        turned["content"] = _parts(turned["content"])
    if turned.get("tool_calls"):
        calls = enumerate(turned["tool_calls"])
        turned["tool_calls"] = [_template_call(call, f"{place}.tool_calls.{number}") for number, call in calls]
    return turned


def _parts(content: Any) -> list[Any]:
    """Content as parts of types that templates know: they name an image or a video by its kind, not by its source."""
    if not isinstance(content, list):
        return [{"type": "text", "text": content}] if content else []
    kinds = {"image_url": "image", "video_url": "video"}
    return [{"type": kinds[p["type"]]} if isinstance(p, dict) and p.get("type") in kinds else p for p in content]


def _template_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call of an earlier turn, whose arguments OpenAI's shape holds as JSON text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if has_more_values(arguments, MAX_ARGUMENT_VALUES):
            raise UsageError(f"{place}.function.arguments has more than {MAX_ARGUMENT_VALUES} values: send fewer.")
        arguments = parse_json(arguments)
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{place}.function.arguments is not the JSON of an object; send it as the call gave it.")
    return {**call, "function": {**function, "arguments": arguments}}


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
    whether it is there, as in `enable_thinking is defined` or `enable_thinking | default(true)`; a macro that asks so
    may mean its own parameter.
    """
    names = list(tree.find_all(nodes.Name))
    set_inside = {name.name for name in names if name.ctx == "store"}
    parameters = {name.name for name in names if name.ctx == "param"}
    asked = [t.node for t in tree.find_all(nodes.Test) if t.name in ("defined", "undefined")]
    asked += [f.node for f in tree.find_all(nodes.Filter) if f.name in ("default", "d") and f.node]
    asked_for = {node.name for node in asked if isinstance(node, nodes.Name)}
    undeclared = meta.find_undeclared_variables(tree)
    return undeclared - set_inside | undeclared & (asked_for - parameters)


def _switches(tree: nodes.Template) -> set[str]:
    """Names of which a template only asks whether they are true, false or given."""
    uses: dict[str, bool] = {}
    waiting: list[tuple[nodes.Node, bool]] = [(tree, False)]
    while waiting:
        node, is_question = waiting.pop()
        if isinstance(node, nodes.Name) and node.ctx == "load":
            uses[node.name] = uses.get(node.name, True) and is_question
        waiting += [(child, _asks(node, child, is_question)) for child in node.iter_child_nodes()]
    return {name for name, is_question in uses.items() if is_question}


def _asks(node: nodes.Node, child: nodes.Node, is_question: bool) -> bool:
    """Whether a node only asks if its child is true or given; `is_question`: so does what is around the node."""
    match node:
        case nodes.If() | nodes.CondExpr():
            return node.test is child
        case nodes.Test():
            return node.name in ("defined", "undefined", "true", "false", "boolean")
        case nodes.Filter(name="default" | "d", args=[nodes.Const(value=bool())]):
            return True
        case nodes.Not():
            return True
        case _:
            return is_question and isinstance(node, nodes.And | nodes.Or)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
