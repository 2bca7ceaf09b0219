"""Answers in one form for all dialects, streamed or whole, so that they can be compared exactly.

What may differ between two runs (ids, times, usage of caches and drafts) is left out; text, reasoning, calls, reasons,
token ids and log-probabilities are kept to the bit.
"""

import json
from typing import Any

from benchmarks.soak.http import Reply

__all__ = ["ANSWER_PATHS", "Answer", "StreamFailedError", "read_answer"]

Answer = list[dict[str, Any]]
"""One entry per choice."""
_MERGED = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class StreamFailedError(Exception):
    """A stream that began and ended with an error, or without an end."""


def read_answer(path: str, reply: Reply) -> Answer:
    """The answer of a reply with status 200."""
    if not reply.is_stream:
        return _WHOLE[path](reply.json())
    events = reply.events()
    for event in events:
        error = event.get("error") or (event.get("response") or {}).get("error")
        if error:
            raise StreamFailedError(json.dumps(error))
    return _STREAMED[path](events)


def _chat(body: dict[str, Any]) -> Answer:
    return [
        {
            "text": choice["message"].get("content") or "",
            "reasoning": choice["message"].get("reasoning_content") or "",
            "calls": [_call(call["function"]) for call in choice["message"].get("tool_calls") or ()],
            "finish": choice["finish_reason"],
            "ids": choice.get("token_ids") or [],
            "logprobs": (choice.get("logprobs") or {}).get("content") or [],
        }
        for choice in sorted(body["choices"], key=lambda choice: choice["index"])
    ]


def _call(function: dict[str, Any]) -> list[str]:
    return [function["name"], function["arguments"]]


def _chat_stream(events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for event in events for choice in event.get("choices", ())):
        empty: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "finish": None, "ids": [], "logprobs": []}
        joined = choices.setdefault(piece["index"], empty)
        delta = piece.get("delta") or {}
        joined["text"] += delta.get("content") or ""
        joined["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(joined["calls"]):
                joined["calls"].append([call["function"]["name"], ""])
            joined["calls"][call["index"]][1] += call["function"].get("arguments") or ""
        joined["ids"] += piece.get("token_ids") or []
        joined["logprobs"] += (piece.get("logprobs") or {}).get("content") or []
        joined["finish"] = piece.get("finish_reason") or joined["finish"]
    return _ended(choices)


def _completions(body: dict[str, Any]) -> Answer:
    return [
        {
            "text": choice["text"],
            "finish": choice["finish_reason"],
            "ids": choice.get("token_ids") or [],
            "logprobs": {name: (choice.get("logprobs") or {}).get(name) or [] for name in _MERGED},
        }
        for choice in sorted(body["choices"], key=lambda choice: choice["index"])
    ]


def _completions_stream(events: list[dict[str, Any]]) -> Answer:
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for event in events for choice in event.get("choices", ())):
        empty: dict[str, Any] = {"text": "", "finish": None, "ids": [], "logprobs": {name: [] for name in _MERGED}}
        joined = choices.setdefault(piece["index"], empty)
        joined["text"] += piece.get("text") or ""
        joined["ids"] += piece.get("token_ids") or []
        for name in _MERGED:
            joined["logprobs"][name] += (piece.get("logprobs") or {}).get(name) or []
        joined["finish"] = piece.get("finish_reason") or joined["finish"]
    return _ended(choices)


def _ended(choices: dict[int, dict[str, Any]]) -> Answer:
    joined = [choices[index] for index in sorted(choices)]
    if not joined or not all(choice["finish"] for choice in joined):
        raise StreamFailedError("the stream ended without a finish_reason")
    return joined


def _responses(body: dict[str, Any]) -> Answer:
    parts: list[Any] = []
    for item in body["output"]:
        if item["type"] == "function_call":
            parts.append(["call", item["name"], item["arguments"]])
        else:
            parts.append([item["type"], *(part["text"] for part in item.get("content") or ())])
    return [{"parts": parts, "finish": body["status"]}]


def _responses_stream(events: list[dict[str, Any]]) -> Answer:
    last = events[-1] if events else {}
    if last.get("type") not in ("response.completed", "response.incomplete"):
        raise StreamFailedError(f"the stream ended with {last.get('type')!r}")
    answer = _responses(last["response"])
    streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    whole = "".join("".join(part[1:]) for part in answer[0]["parts"] if part[0] == "message")
    if streamed != whole:
        raise StreamFailedError("the deltas are not the text of the last event")
    return answer


def _messages(body: dict[str, Any]) -> Answer:
    parts = [_block(block) for block in body["content"]]
    return [{"parts": parts, "finish": [body["stop_reason"], body.get("stop_sequence")]}]


def _block(block: dict[str, Any]) -> list[Any]:
    if block["type"] == "tool_use":
        return ["call", block["name"], block["input"]]
    return [block["type"], block["thinking" if block["type"] == "thinking" else "text"]]


def _messages_stream(events: list[dict[str, Any]]) -> Answer:
    blocks: dict[int, dict[str, Any]] = {}
    finish: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            _add_delta(blocks[event["index"]], event["delta"])
        elif event["type"] == "message_delta":
            finish = [event["delta"]["stop_reason"], event["delta"].get("stop_sequence")]
    if not finish or events[-1]["type"] != "message_stop":
        raise StreamFailedError("the stream ended without message_stop")
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return [{"parts": [_block(blocks[index]) for index in sorted(blocks)], "finish": finish}]


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    name = names.get(delta["type"])
    if name == "partial_json":
        block["json"] += delta[name]
    elif name:
        block[name] = block.get(name, "") + delta[name]


_WHOLE = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}
_STREAMED = {
    "/v1/chat/completions": _chat_stream,
    "/v1/completions": _completions_stream,
    "/v1/responses": _responses_stream,
    "/v1/messages": _messages_stream,
}
ANSWER_PATHS = frozenset(_WHOLE)
