"""Requests of ordinary clients in all dialects. A request's answer is determined by its body: greedy or seeded."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CHAT", "COMPLETIONS", "MESSAGES", "RESPONSES", "Scenario", "draw", "reference_scenarios"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_TEXT = """river stone letter garden winter engine market silver number teacher window forest travel music bread signal
island paper ladder ocean summer clock bridge yellow doctor village pencil mountain story kitchen"""
_WORDS = _TEXT.split()
_QUESTIONS = (
    "What is the capital of France?",
    "Add 17 and 25.",
    "Write a sentence about the sea.",
    "Which is larger, 9 or 12?",
    "Name three colours.",
    "Spell the word house.",
    "Wie heißt du?",
    "Count from 1 to 12.",
)
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}


class Scenario(NamedTuple):
    """One request: its kind in the report, its path and its body without `stream`."""

    kind: str
    path: str
    body: dict[str, Any]

    def encoded(self, *, is_streamed: bool) -> bytes:
        return json.dumps({**self.body, "stream": True} if is_streamed else self.body).encode()


def draw(random_: random.Random) -> Scenario:
    """A new request of a random kind."""
    return random_.choice(_MAKERS)(random_)


def reference_scenarios() -> list[Scenario]:
    """The same requests in every run: two of each kind."""
    return [make(random.Random(f"{make.__name__} {index}")) for make in _MAKERS for index in range(2)]


def _text(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choice(_WORDS) for _ in range(num_words))


def _question(random_: random.Random) -> str:
    return f"{_text(random_, random_.randint(0, 12))} {random_.choice(_QUESTIONS)}".strip()


def _sampling(random_: random.Random) -> dict[str, Any]:
    """Greedy, or sampled with a seed and now and then with penalties."""
    if random_.random() < 0.5:
        return {"temperature": 0}
    given: dict[str, Any] = {"temperature": random_.choice((0.4, 0.8, 1.3)), "seed": random_.randrange(2**31)}
    if random_.random() < 0.3:
        given |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_k": 40}
    return given


def _chat_body(random_: random.Random, text: str, num_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "return_token_ids": True,
        **_sampling(random_),
    }


def _plain_chat(random_: random.Random) -> Scenario:
    body = _chat_body(random_, _question(random_), random_.randint(4, 48))
    return Scenario("chat", CHAT, body | {"enable_thinking": False, "logprobs": True, "top_logprobs": 3})


def _thinking_chat(random_: random.Random) -> Scenario:
    body = _chat_body(random_, _question(random_), random_.randint(40, 120))
    return Scenario("chat, thinking", CHAT, body | {"thinking_budget": random_.choice((4, 16, 64))})


def _tool_chat(random_: random.Random) -> Scenario:
    function = {"name": "weather", "description": "The weather of some days.", "parameters": _PARAMETERS}
    body = _chat_body(random_, f"How is the weather in Rome? {_text(random_, 3)}", 90)
    choice = random_.choice(("auto", "required"))
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "enable_thinking": False}
    return Scenario("chat, tools", CHAT, body | tools)


def _schema_chat(random_: random.Random) -> Scenario:
    body = _chat_body(random_, f"Describe a thing in JSON: {_text(random_, 4)}", 70)
    wrapped = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    return Scenario("chat, JSON schema", CHAT, body | {"response_format": wrapped, "enable_thinking": False})


def _many_chat(random_: random.Random) -> Scenario:
    body = _chat_body(random_, _question(random_), 24) | {"temperature": 0.9, "seed": random_.randrange(2**31)}
    return Scenario("chat, n=3", CHAT, body | {"n": 3, "enable_thinking": False})


def _stop_chat(random_: random.Random) -> Scenario:
    body = _chat_body(random_, "Count from 1 to 30.", 80)
    return Scenario("chat, stop strings", CHAT, body | {"stop": ["7", "\n\n\n", "the"], "enable_thinking": False})


def _long_chat(random_: random.Random) -> Scenario:
    """Two of three share a prefix with others of their kind."""
    shared = random.Random(random_.choice(("one", "two", _text(random_, 2))))
    system = {"role": "system", "content": _text(shared, shared.randint(200, 900))}
    body = _chat_body(random_, _question(random_), 16) | {"enable_thinking": False}
    return Scenario("chat, long prompt", CHAT, body | {"messages": [system, *body["messages"]]})


def _completion(random_: random.Random) -> Scenario:
    given = {"prompt": _text(random_, random_.randint(1, 40)), "max_tokens": random_.randint(1, 64)}
    more = {"logprobs": 2, "return_token_ids": True, "ignore_eos": random_.random() < 0.5}
    return Scenario("completion", COMPLETIONS, given | more | _sampling(random_))


def _choice_completion(random_: random.Random) -> Scenario:
    given = {"prompt": f"{_text(random_, 6)} is", "max_tokens": 24, "guided_choice": [_text(random_, 3), "red", "blue"]}
    return Scenario("completion, choice", COMPLETIONS, given | _sampling(random_))


def _regex_completion(random_: random.Random) -> Scenario:
    given = {"prompt": f"{_text(random_, 6)}: ", "max_tokens": 24, "guided_regex": "[0-9]{2}-[a-f]{3,6}(x|yz)"}
    return Scenario("completion, regex", COMPLETIONS, given | _sampling(random_))


def _response(random_: random.Random) -> Scenario:
    effort = {"effort": random_.choice(("none", "minimal", "low"))}
    body = {"input": _question(random_), "max_output_tokens": 60, "temperature": 0, "reasoning": effort}
    return Scenario("response", RESPONSES, body)


def _tool_response(random_: random.Random) -> Scenario:
    tool = {"type": "function", "name": "weather", "parameters": _PARAMETERS}
    body = {"input": f"Weather in Oslo, {_text(random_, 3)}?", "max_output_tokens": 90, "temperature": 0}
    return Scenario("response, tools", RESPONSES, body | {"tools": [tool], "reasoning": {"effort": "none"}})


def _message(random_: random.Random) -> Scenario:
    body = {"model": "pocket", "messages": [{"role": "user", "content": _question(random_)}], "max_tokens": 50}
    if random_.random() < 0.4:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        body["max_tokens"] = 1100
    return Scenario("message", MESSAGES, body | {"temperature": 0, "stop_sequences": ["zebra"]})


def _tool_message(random_: random.Random) -> Scenario:
    tool = {"name": "weather", "description": "The weather.", "input_schema": _PARAMETERS}
    messages = [{"role": "user", "content": f"How is the weather in Bern? {_text(random_, 2)}"}]
    body = {"model": "pocket", "messages": messages, "max_tokens": 90, "temperature": 0}
    return Scenario("message, tools", MESSAGES, body | {"tools": [tool], "tool_choice": {"type": "any"}})


_MAKERS: tuple[Callable[[random.Random], Scenario], ...] = (
    _plain_chat,
    _thinking_chat,
    _tool_chat,
    _schema_chat,
    _many_chat,
    _stop_chat,
    _long_chat,
    _completion,
    _choice_completion,
    _regex_completion,
    _response,
    _tool_response,
    _message,
    _tool_message,
)
