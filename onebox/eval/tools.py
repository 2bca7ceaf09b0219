"""Questions answered by tool calls: one of several tools with typed arguments, two calls, or none."""

from collections.abc import Callable
from random import Random
from typing import Any

from onebox.eval.question import Check, Json, Question, Truth, TruthKind, one_turn

__all__ = ["tool_questions"]

_MAX_TOKENS = 300


def _tool(name: str, description: str, /, **parameters: Json) -> Json:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
_TOOLS = {
    "get_weather": _tool("get_weather", "Current weather in a city", city=_STRING, unit=_UNIT),
    "get_time": _tool("get_time", "Local time in a city", city=_STRING),
    "get_order": _tool("get_order", "Status of an order", order_id=_STRING),
    "set_timer": _tool("set_timer", "Start a timer", minutes=_INTEGER),
    "transfer_money": _tool("transfer_money", "Transfer money to a person", name=_STRING, amount=_NUMBER),
    "order_product": _tool("order_product", "Order a product", product=_STRING, quantity=_INTEGER, urgent=_BOOLEAN),
    "book_train": _tool("book_train", "Book a train", city=_STRING, date=_STRING, quantity=_INTEGER),
    "read_file": _tool("read_file", "Read a file", path=_STRING),
}
_CITIES = ("Győr", "Pécs", "İzmir", "Eskişehir", "Lisbon", "Oslo", "Székesfehérvár", "Muğla")
_NAMES = ("Kovács Eszter", "Ayşe Çelik", "Henry Baker", "İbrahim Öztürk")
_GOODS = ("paper", "lamp", "cable", "printer")
# User message, tool, and how many of the named values it takes.
_FORMS: tuple[tuple[str, str], ...] = (
    ("What is the weather in {city} in {unit}?", "get_weather"),
    ("What time is it in {city}?", "get_time"),
    ("Where is my order {order_id}?", "get_order"),
    ("Set a timer for {minutes} minutes.", "set_timer"),
    ("Transfer {amount} to {name}.", "transfer_money"),
    ("Order {quantity} {product}, urgent {urgent}.", "order_product"),
    ("Book {quantity} train tickets to {city} for {date}.", "book_train"),
    ("Read {path} for me.", "read_file"),
)
_WITHOUT = ("Hello!", "Thank you, that is all.", "Köszönöm szépen!", "Merhaba!")


def _value(rng: Random, name: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "city": lambda: rng.choice(_CITIES),
        "unit": lambda: rng.choice(("celsius", "fahrenheit")),
        "order_id": lambda: f"{rng.choice('ABKM')}-{rng.randrange(1000, 9999)}",
        "minutes": lambda: rng.randint(2, 90),
        "amount": lambda: rng.randrange(1000, 99_999) / 100,
        "name": lambda: rng.choice(_NAMES),
        "quantity": lambda: rng.randint(2, 40),
        "product": lambda: rng.choice(_GOODS),
        "urgent": lambda: rng.random() < 0.5,
        "date": lambda: f"{rng.randint(2024, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
        "path": lambda: f"/{rng.choice(('notes', 'reports', 'data'))}/{rng.choice(('may', 'june', 'total'))}.csv",
    }
    return made[name]()


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tool_questions(count: int, seed: int) -> list[Question]:
    """`count` questions: of every eight, six ask for one call, one for two, and one for none."""
    return [_question(number, Random(f"tools {seed} {number}")) for number in range(count)]  # noqa: S311


def _question(number: int, rng: Random) -> Question:
    place = number % 8
    num_calls = {6: 2, 7: 0}.get(place, 1)
    forms = rng.sample(_FORMS, num_calls)
    calls, sentences = [], []
    for form, name in forms:
        parameters = _TOOLS[name]["function"]["parameters"]["properties"]
        arguments = {parameter: _value(rng, parameter) for parameter in parameters}
        calls.append({"name": name, "arguments": arguments})
        sentences.append(form.format(**{key: _said(value) for key, value in arguments.items()}))
    others = [name for name in _TOOLS if name not in {name for _, name in forms}]
    offered = [name for _, name in forms] + rng.sample(others, rng.randint(1, 3))
    rng.shuffle(offered)
    text = " ".join(sentences) or rng.choice(_WITHOUT)
    body = one_turn(text, tools=[_TOOLS[name] for name in offered])
    group = ("no call", "one call", "two calls")[num_calls]
    return Question(f"tools/{number:03d}", Check.TOOLS, group, body, Truth(TruthKind.CALLS, calls), _MAX_TOKENS)
