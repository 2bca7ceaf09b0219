"""Output items of the Responses API: an answer's sections, whole and as events."""

from collections.abc import Iterator, Sequence

from onebox.server.schemas.common import Json
from onebox.server.schemas.responses import sealed
from onebox.server.schemas.responses_tools import OfferedTool, custom_input
from onebox.server.sections import AnswerSection, SectionEvent

__all__ = ["ResponseItems"]


class ResponseItems:
    """Sections as output items, and as the events that build them."""

    def __init__(self, has_sealed_reasoning: bool, tools: Sequence[OfferedTool]) -> None:
        self._has_sealed_reasoning = has_sealed_reasoning
        self._tools = {tool.shown_name: tool for tool in tools}

    def whole(self, section: AnswerSection, status: str) -> Json:
        match section.kind:
            case "reasoning":
                held: Json = {"summary": [], "content": [_part(section)]}
                if self._has_sealed_reasoning:
                    held["encrypted_content"] = sealed(section.text)
                return {**self._head(section, status), **held}
            case "content":
                return {**self._head(section, status), "role": "assistant", "content": [_part(section)]}
            case "call" if self._is_custom(section):
                return {**self._call_head(section, status), "input": custom_input(section.text)}
            case "call":
                return {**self._call_head(section, status), "arguments": section.text}

    def events(self, event: SectionEvent, status: str) -> Iterator[tuple[str, Json]]:
        """Names and fields of events. `status` is the one of an item that ends."""
        section = event.section
        place: Json = {"item_id": self._head(section, status)["id"], "output_index": section.index}
        if section.kind != "call":
            place["content_index"] = 0
        match event.change:
            case "opened":
                yield from self._opening(section, place)
            case "grown" if self._is_custom(section):
                pass  # its text is inside JSON, which is read at the end
            case "grown":
                yield f"response.{_FLOWS[section.kind]}.delta", {**place, "delta": event.text, **_logprobs(section)}
            case "closed":
                yield from self._ending(section, place, status)

    def _opening(self, section: AnswerSection, place: Json) -> Iterator[tuple[str, Json]]:
        item = self._head(section, "in_progress")
        match section.kind:
            case "reasoning":
                item |= {"summary": [], "content": []}
            case "content":
                item |= {"role": "assistant", "content": []}
            case "call":
                name = "input" if self._is_custom(section) else "arguments"
                item = {**self._call_head(section, "in_progress"), name: ""}
        yield "response.output_item.added", {"output_index": section.index, "item": item}
        if section.kind != "call":
            # The section's own text may be ahead of what was sent.
            yield "response.content_part.added", {**place, "part": {**_part(section), "text": ""}}

    def _ending(self, section: AnswerSection, place: Json, status: str) -> Iterator[tuple[str, Json]]:
        if self._is_custom(section):
            text = custom_input(section.text)
            yield "response.custom_tool_call_input.delta", {**place, "delta": text}
            yield "response.custom_tool_call_input.done", {**place, "input": text}
        elif section.kind == "call":
            done: Json = {"name": section.name, "arguments": section.text}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            yield f"response.{_FLOWS[section.kind]}.done", {**place, "text": section.text, **_logprobs(section)}
            yield "response.content_part.done", {**place, "part": _part(section)}
        yield "response.output_item.done", {"output_index": section.index, "item": self.whole(section, status)}

    def _is_custom(self, section: AnswerSection) -> bool:
        return section.name in self._tools and self._tools[section.name].is_custom

    def _head(self, section: AnswerSection, status: str) -> Json:
        prefix, kind = ("ctc", "custom_tool_call") if self._is_custom(section) else _TYPES[section.kind]
        return {"id": f"{prefix}_{section.key}", "type": kind, "status": status}

    def _call_head(self, section: AnswerSection, status: str) -> Json:
        tool = self._tools.get(section.name)
        named: Json = {"call_id": f"call_{section.key}", "name": tool.name if tool else section.name}
        if tool and tool.namespace:
            named["namespace"] = tool.namespace
        return {**self._head(section, status), **named}


_FLOWS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
"""Of a section's kind, the name in its events."""
_TYPES = {"reasoning": ("rs", "reasoning"), "content": ("msg", "message"), "call": ("fc", "function_call")}
"""Of a section's kind, the prefix of its item's id and the item's type."""


def _part(section: AnswerSection) -> Json:
    if section.kind == "reasoning":
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": []}


def _logprobs(section: AnswerSection) -> Json:
    """The API has the field for content; always empty, since requests cannot ask for them here."""
    return {"logprobs": []} if section.kind == "content" else {}
