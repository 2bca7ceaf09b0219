"""Questions with tools: one call, two calls, an answer from a tool's result, or no call."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from recipes.pocket.synthetic.example import Example, answer_json, call_text, calls, text_is
from recipes.pocket.synthetic.words import (
    CITIES,
    GOODS,
    LANGUAGES,
    MONTHS,
    identifier,
    made_up,
    number_name,
    person,
    pick,
)

__all__ = ["tool_calls"]

Json = dict[str, Any]


@dataclass(frozen=True)
class _Kind:
    """A kind of parameter: its schema, its random values, and how a user writes one."""

    schema: Json
    value: Callable[[Random], Any]
    said: Callable[[Any], str] = str


def _quoted(value: Any) -> str:
    return f'"{value}"'


def _city(rng: Random) -> str:
    return rng.choice(CITIES[rng.choice(LANGUAGES)]) if rng.random() < 0.7 else made_up(rng).capitalize()


def _day(rng: Random) -> str:
    return f"{rng.randint(2000, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _sentence(rng: Random) -> str:
    return " ".join(pick(rng, rng.choice(LANGUAGES)) for _ in range(rng.randint(1, 5)))


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_KINDS: dict[str, _Kind] = {
    "city": _Kind(_STRING, _city),
    "location": _Kind(_STRING, _city),
    "subject": _Kind(_STRING, _sentence, _quoted),
    "message": _Kind(_STRING, _sentence, _quoted),
    "a": _Kind(_INTEGER, lambda rng: rng.randint(0, 999)),
    "b": _Kind(_INTEGER, lambda rng: rng.randint(0, 999)),
    "date": _Kind(_STRING, _day),
    "name": _Kind(_STRING, lambda rng: person(rng, rng.choice(LANGUAGES))),
    "email": _Kind(_STRING, lambda rng: f"{identifier(rng)}@{identifier(rng)}.com"),
    "query": _Kind(_STRING, _sentence, _quoted),
    "text": _Kind(_STRING, _sentence, _quoted),
    "title": _Kind(_STRING, _sentence, _quoted),
    "path": _Kind(
        _STRING, lambda rng: f"/{identifier(rng)}/{identifier(rng)}.{rng.choice(('txt', 'py', 'csv', 'json'))}"
    ),
    "order_id": _Kind(_STRING, number_name),
    "product": _Kind(_STRING, lambda rng: rng.choice(GOODS[rng.choice(LANGUAGES)])),
    "month": _Kind(_STRING, lambda rng: rng.choice(MONTHS["en"])),
    "unit": _Kind(
        {"type": "string", "enum": ["celsius", "fahrenheit"]}, lambda rng: rng.choice(("celsius", "fahrenheit"))
    ),
    "language": _Kind({"type": "string", "enum": ["en", "hu", "tr"]}, lambda rng: rng.choice(LANGUAGES)),
    "quantity": _Kind(_INTEGER, lambda rng: rng.randint(1, 500)),
    "limit": _Kind(_INTEGER, lambda rng: rng.randint(1, 100)),
    "minutes": _Kind(_INTEGER, lambda rng: rng.randint(1, 240)),
    "amount": _Kind(_NUMBER, lambda rng: rng.randint(1, 99_999) / 100),
    "urgent": _Kind(_BOOLEAN, lambda rng: rng.random() < 0.5, lambda value: "true" if value else "false"),
    "tags": _Kind(
        {"type": "array", "items": {"type": "string"}},
        lambda rng: [pick(rng, rng.choice(LANGUAGES)) for _ in range(rng.randint(1, 3))],
        lambda value: " and ".join(value),
    ),
}
_KNOWN: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("get_weather", "Current weather in a city", ("city", "unit"), "What is the weather in {city} in {unit}?"),
    ("get_weather", "Weather of a place", ("city",), "What is the weather like in {city}?"),
    ("get_weather", "Időjárás egy városban", ("city",), "Milyen az idő itt: {city}?"),
    ("get_weather", "Bir şehirde hava durumu", ("city",), "{city} şehrinde hava nasıl?"),
    ("get_weather", "Get the weather", ("location",), "How is the weather in {location} today?"),
    ("get_current_weather", "Get the current weather", ("location", "unit"), "Weather in {location}, in {unit}?"),
    ("get_weather_forecast", "Forecast for a day", ("city", "date"), "Will it rain in {city} on {date}?"),
    ("add", "Add two numbers", ("a", "b"), "What is {a} plus {b}?"),
    ("multiply", "Multiply two numbers", ("a", "b"), "Multiply {a} by {b}."),
    ("calculate", "Sum of two numbers", ("a", "b"), "How much is {a} + {b}?"),
    ("send_message", "Send a message to a person", ("name", "message"), "Tell {name} {message}."),
    ("send_mail", "Send mail", ("email", "subject", "message"), "Mail {email} about {subject}: {message}"),
    ("get_time", "Local time in a city", ("city",), "What time is it in {city}?"),
    ("search_web", "Search the web", ("query",), "Search the web for {query}."),
    ("search_web", "Search the web", ("query", "limit"), "Find {limit} results for {query}."),
    ("search_files", "Search in files", ("text", "path"), "Look for {text} in {path}."),
    ("read_file", "Read a file", ("path",), "Read {path} for me."),
    ("read_file", "Read a file", ("path",), "Mi van a {path} fájlban?"),
    ("write_file", "Write text to a file", ("path", "text"), "Write {text} to {path}."),
    ("send_email", "Send an email", ("email", "title", "text"), "Write to {email}, title {title}, text {text}."),
    ("send_email", "E-posta gönderir", ("email", "text"), "{email} adresine {text} diye yaz."),
    ("create_event", "Create a calendar event", ("title", "date"), "Put {title} in my calendar on {date}."),
    ("create_event", "Naptárbejegyzés", ("title", "date", "minutes"), "Naptárba: {title}, {date}, {minutes} perc."),
    ("set_timer", "Start a timer", ("minutes",), "Set a timer for {minutes} minutes."),
    ("set_timer", "Zamanlayıcı", ("minutes",), "{minutes} dakikalık zamanlayıcı kur."),
    ("get_order", "Status of an order", ("order_id",), "Where is my order {order_id}?"),
    ("get_order", "Rendelés állapota", ("order_id",), "Hol tart a {order_id} rendelés?"),
    ("order_product", "Order a product", ("product", "quantity"), "Order {quantity} pieces of {product}."),
    ("order_product", "Order goods", ("product", "quantity", "urgent"), "Order {quantity} {product}, urgent {urgent}."),
    ("transfer_money", "Transfer money to a person", ("name", "amount"), "Transfer {amount} to {name}."),
    ("transfer_money", "Pénz küldése", ("name", "amount"), "Küldj {amount} összeget neki: {name}."),
    ("find_contact", "Find a contact", ("name",), "What is the number of {name}?"),
    ("translate", "Translate text", ("text", "language"), "Translate {text} into {language}."),
    ("add_note", "Save a note with tags", ("text", "tags"), "Note {text} with the tags {tags}."),
    ("get_report", "Monthly report", ("month", "limit"), "Show the top {limit} rows of the report for {month}."),
    ("book_train", "Book a train", ("city", "date", "quantity"), "Book {quantity} train tickets to {city} for {date}."),
)  # fmt: skip
_VERBS = ("get", "set", "find", "create", "delete", "update", "list", "check", "start", "open")
_NO_TOOL = (
    ("Hello!", "Hello! How can I help you?"),
    ("Thank you, that is all.", "You are welcome!"),
    ("Szia!", "Szia! Miben segíthetek?"),
    ("Köszönöm szépen!", "Szívesen!"),
    ("Merhaba!", "Merhaba! Nasıl yardımcı olabilirim?"),
    ("Teşekkür ederim.", "Rica ederim!"),
)


@dataclass(frozen=True)
class _Tool:
    name: str
    description: str
    parameters: tuple[str, ...]
    phrase: str
    """How a user asks for it."""

    def definition(self, rng: Random) -> Json:
        """The tool as a client sends it; sometimes with descriptions or with an additional optional parameter."""
        names = list(self.parameters)
        if rng.random() < 0.25:
            names += rng.sample([name for name in _KINDS if name not in names], 1)
        properties = {name: _KINDS[name].schema for name in names}
        if rng.random() < 0.3:
            properties = {name: {**schema, "description": f"The {name}"} for name, schema in properties.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def request(self, rng: Random) -> tuple[str, Json]:
        """(the user's message, the arguments)."""
        arguments = {name: _KINDS[name].value(rng) for name in self.parameters}
        return self.phrase.format(**{name: _KINDS[name].said(value) for name, value in arguments.items()}), arguments


def _tool(rng: Random) -> _Tool:
    """A common tool, or one with an invented name."""
    if rng.random() < 0.5:
        return _Tool(*rng.choice(_KNOWN))
    verb, noun = rng.choice(_VERBS), identifier(rng)
    parameters = tuple(rng.sample(list(_KINDS), rng.randint(1, 4)))
    joint = rng.choice((": {", " {", " = {"))
    listed = ", ".join(f"{name}{joint}{name}}}" for name in parameters)
    phrase = rng.choice(
        ("{verb} the {noun} with {listed}.", "Please {verb} {noun}, {listed}.", "{verb} {noun}: {listed}")
    )
    said = phrase.replace("{verb}", verb).replace("{noun}", noun).replace("{listed}", listed)
    return _Tool(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", parameters, said[0].upper() + said[1:])


def _tools(rng: Random) -> list[_Tool]:
    """One to four tools with different names; the question is for the first."""
    tools: dict[str, _Tool] = {}
    for tool in (_tool(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))):
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def tool_calls(rng: Random) -> Example:
    tools = _tools(rng)
    definitions = [tool.definition(rng) for tool in tools]
    rng.shuffle(definitions)
    way = rng.random()
    if way < 0.12:
        return _no_call(rng, definitions)
    if way < 0.27:
        return _from_result(rng, tools[0], definitions)
    return _call(rng, tools[:2] if way > 0.85 else tools[:1], definitions)


def _call(rng: Random, tools: list[_Tool], definitions: list[Json]) -> Example:
    requests = [tool.request(rng) for tool in tools]
    expected = [(tool.name, arguments) for tool, (_, arguments) in zip(tools, requests, strict=True)]
    question = " ".join(text for text, _ in requests)
    content = "\n".join(call_text(name, arguments) for name, arguments in expected)
    names = " and ".join(name for name, _ in expected)
    thought = f"I call {names}." if rng.random() < 0.5 else ""
    system = (
        rng.choice(("You are a helpful assistant.", "Use the tools when they help.")) if rng.random() < 0.3 else None
    )
    return Example.ask(question, content, calls(*expected), reasoning=thought, system=system, tools=definitions)


def _no_call(rng: Random, definitions: list[Json]) -> Example:
    question, content = rng.choice(_NO_TOOL)
    thought = "No tool is needed." if rng.random() < 0.5 else ""
    return Example.ask(question, content, text_is(content), reasoning=thought, tools=definitions)


def _from_result(rng: Random, tool: _Tool, definitions: list[Json]) -> Example:
    """The tool's result is in the conversation; the answer is one sentence about it."""
    text, arguments = tool.request(rng)
    key = rng.choice(("result", "status", "value", "temperature", "answer", identifier(rng)))
    value: Any = rng.choice((rng.randint(-20, 5000), made_up(rng), rng.randint(1, 9999) / 10, "ok", number_name(rng)))
    result = {key: value, **({identifier(rng): rng.randint(0, 99)} if rng.random() < 0.3 else {})}
    messages: list[Json] = [
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": tool.name, "arguments": arguments}}],
        },
        {"role": "tool", "content": answer_json(result)},
    ]
    content = f"The {key} is {value}."
    return Example.answered(
        messages, content, text_is(content), "" if rng.random() < 0.5 else "The result is there.", definitions
    )
