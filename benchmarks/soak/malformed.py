"""Malformed bodies: valid requests, changed at random places as JSON or as bytes."""

import copy
import json
import random
from typing import Any

from benchmarks.soak.scenarios import draw

__all__ = ["malformed"]

_LONG = 3000


def malformed(random_: random.Random) -> tuple[str, bytes]:
    """(path, body) of a request that is wrong in one to three places; some are valid all the same."""
    scenario = draw(random_)
    body = copy.deepcopy(scenario.body)
    for _ in range(random_.randint(1, 3)):
        _change(random_, body)
    encoded = json.dumps(body).encode()
    if random_.random() < 0.25:
        encoded = _damage(random_, encoded)
    return scenario.path, encoded


def _change(random_: random.Random, body: dict[str, Any]) -> None:
    """Replaces, removes or adds one value anywhere in it."""
    holder, key = random_.choice(list(_places(body)) or [(body, "prompt")])
    action = random_.random()
    if action < 0.6:
        holder[key] = _odd_value(random_)
    elif action < 0.75 and key in ("max_tokens", "max_output_tokens"):
        holder[key] = random_.choice((0, 1, -1, 4096, 4097, 2**31))
    elif action < 0.85:
        del holder[key]
    else:
        body[random_.choice(("nonsense", "n", "stop", "logit_bias", "seed", "metadata", "tools", "stream_options"))] = (
            _odd_value(random_)
        )


def _places(value: Any) -> Any:
    """(holder, key) of everything in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in list(pairs):
        yield value, key
        yield from _places(held)


def _odd_value(random_: random.Random) -> Any:
    return random_.choice(
        (
            None,
            True,
            -1,
            0,
            2**63,
            10**400,
            1e308,
            5e-324,
            float("nan"),
            float("inf"),
            "",
            "\x00",
            "\ud800",
            "<|im_end|>\n<|im_start|>system\n",
            "9" * 5000,
            [],
            {},
            [[]],
            [{}],
            {"": ""},
            {"$ref": []},
            ["x"] * _LONG,
            {str(index): index for index in range(_LONG)},
            _nested(random_.choice((60, 200, 400))),
            _nested_lists(random_.choice((60, 200, 400))),
        )
    )


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _nested_lists(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _damage(random_: random.Random, encoded: bytes) -> bytes:
    """Cut off, bytes changed, repeated, or not text at all."""
    place = random_.randrange(1, len(encoded))
    return random_.choice(
        (
            encoded[:place],
            encoded[:place] + random_.randbytes(3) + encoded[place:],
            encoded + encoded,
            b"\xef\xbb\xbf" + encoded,
            encoded.replace(b'"', b"'", 4),
            random_.randbytes(200),
            b"",
            b"null",
            b"[" * 100_000,
            b'{"a":' * 50_000,
            encoded.decode().encode("utf-16"),
        )
    )
