"""Log-probabilities of given texts under a server's model, and the divergence of two models' predictions.

Servers return them in two formats: `prompt_logprobs` (vLLM, onebox) and `echo` with `logprobs` (OpenAI's older format).
Both give only the top few tokens at each position. The divergence is therefore computed over the tokens that both
servers list, with all others merged into one; merging can only lower a divergence, so it is a lower bound.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from onebox.bench.answer import error_message
from onebox.bench.record import Failure, Reason
from onebox.eval.passages import Passage

__all__ = ["Likelihoods", "NotOfferedError", "PassageAgreement", "Place", "agreement", "divergence", "read_likelihoods"]

Json = dict[str, Any]
_TINY = 1e-12


class NotOfferedError(Exception):
    """The server returns prompt log-probabilities in no known format; the message holds its response."""


@dataclass(frozen=True)
class Place:
    """One token of a text, given the tokens before it. `top` maps the top tokens to their log-probabilities."""

    token: str
    """The id, or with `echo` the text; only compared, never printed."""
    logprob: float
    top: dict[str, float]

    @property
    def likeliest(self) -> str:
        return max(self.top, key=self.top.__getitem__)


@dataclass(frozen=True)
class Likelihoods:
    """One passage on one server; the first token has no prediction and is omitted."""

    passage_id: str
    form: str
    """prompt_logprobs or echo."""
    places: tuple[Place, ...] = ()
    failure: Failure | None = None

    @property
    def loss(self) -> float:
        """Sum of negative log-probabilities, in nats."""
        return -sum(place.logprob for place in self.places)


async def read_likelihoods(
    http: httpx.AsyncClient, model: str, passage: Passage, token_ids: Sequence[int] | None, num_top: int
) -> Likelihoods:
    """Requests one passage in the first format that the server supports; `token_ids` are the text's, if known."""
    refusals = []
    for form, (fields, read) in _FORMS.items():
        asked = {name: num_top if value is None else value for name, value in fields.items()}
        prompt = passage.text if token_ids is None else list(token_ids)
        answered = await _posted(http, {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0} | asked)
        if isinstance(answered, Failure):
            # Only a refusal means that the field is unsupported; any other error is a failure.
            if answered.reason is not Reason.REFUSED:
                return Likelihoods(passage.id, form, failure=answered)
            refusals.append(f"{form}: {answered.message}")
            continue
        try:
            places = read(answered, token_ids)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"The log-probabilities are not in the format of {form} ({type(error).__name__}: {error})."
            return Likelihoods(passage.id, form, failure=Failure(Reason.MALFORMED, text, 200))
        if places is not None:
            return Likelihoods(passage.id, form, places)
        refusals.append(f"{form}: accepted but not returned")
    raise NotOfferedError("; ".join(refusals))


async def _posted(http: httpx.AsyncClient, body: Json) -> Json | Failure:
    """The response, or the failure."""
    try:
        response = await http.post("/v1/completions", json=body)
    except httpx.TimeoutException as error:
        return Failure(Reason.TIMEOUT, f"No answer in time ({type(error).__name__}).")
    except httpx.ConnectError as error:
        return Failure(Reason.UNREACHABLE, f"No connection ({error}).")
    except httpx.HTTPError as error:
        return Failure(Reason.CUT, f"The connection broke ({error or type(error).__name__}).")
    try:
        found = response.json()
    except ValueError:
        found = response.text[:200]
    if response.is_error:
        reason = Reason.REFUSED if response.status_code < 500 else Reason.SERVER_ERROR
        return Failure(reason, error_message(found)[:500], response.status_code)
    if not isinstance(found, dict):
        return Failure(
            Reason.MALFORMED, f"The response is not a JSON object: {str(found)[:80]!r}.", response.status_code
        )
    return found


def _from_prompt_logprobs(body: Json, token_ids: Sequence[int] | None) -> tuple[Place, ...] | None:
    """The format of vLLM: an object per token with its candidates by id; the first is null.

    The text's own token is identified among the candidates by its id, so this format needs token ids.
    """
    listed = body["choices"][0].get("prompt_logprobs")
    if listed is None or token_ids is None:
        return None
    return tuple(_place(str(one), candidates) for one, candidates in zip(token_ids[1:], listed[1:], strict=True))


def _place(token: str, candidates: Mapping[str, Json]) -> Place:
    top = {str(key): _finite(value["logprob"]) for key, value in candidates.items()}
    return Place(token, top[token], top)


def _finite(logprob: Any) -> float:
    value = round(float(logprob), 6)
    if not value <= 1e-4 or math.isinf(value):
        raise ValueError(f"a log-probability is {logprob}")
    return value


def _from_echo(body: Json, _: Sequence[int] | None) -> tuple[Place, ...] | None:
    """OpenAI's older format: three lists over prompt and answer; the first token has null."""
    table = body["choices"][0].get("logprobs")
    if not table or not table.get("token_logprobs") or table["token_logprobs"][0] is not None:
        return None
    end = body["usage"]["prompt_tokens"]
    tokens, logprobs, tops = (table[name][1:end] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return tuple(
        Place(token, _finite(logprob), {key: _finite(value) for key, value in {**top, token: logprob}.items()})
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    )


# Format -> its fields (None: the number of candidates) and its parser.
_FORMS: dict[str, tuple[Json, Callable[[Json, Sequence[int] | None], tuple[Place, ...] | None]]] = {
    "prompt_logprobs": ({"prompt_logprobs": None}, _from_prompt_logprobs),
    "echo": ({"echo": True, "logprobs": None}, _from_echo),
}


def divergence(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """KL(first || second) in nats over the tokens that both list plus one for all others: a lower bound."""
    shared = first.keys() & second.keys()
    total, rest_first, rest_second = 0.0, 1.0, 1.0
    for token in shared:
        p, q = math.exp(first[token]), math.exp(second[token])
        total += p * (first[token] - second[token])
        rest_first, rest_second = rest_first - p, rest_second - q
    if rest_first > _TINY:
        total += rest_first * math.log(rest_first / max(rest_second, _TINY))
    return max(0.0, total)


@dataclass(frozen=True)
class PassageAgreement:
    """Two servers compared on one passage."""

    passage_id: str
    num_tokens: int
    divergence: float
    """Sum over the tokens, in nats."""
    num_same: int
    """Positions at which both have the same top token."""
    first_loss: float
    second_loss: float


def agreement(first: Likelihoods, second: Likelihoods) -> PassageAgreement | None:
    """None if the two tokenize the text differently, so that their predictions are not comparable."""
    if [place.token for place in first.places] != [place.token for place in second.places]:
        return None
    pairs: Sequence[tuple[Place, Place]] = list(zip(first.places, second.places, strict=True))
    return PassageAgreement(
        first.passage_id,
        len(pairs),
        sum(divergence(one.top, other.top) for one, other in pairs),
        sum(one.likeliest == other.likeliest for one, other in pairs),
        first.loss,
        second.loss,
    )
