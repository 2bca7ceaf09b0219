"""Log-probabilities in the shapes of the APIs."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from onebox.engine.api import TokenLogprob
from onebox.server.pieces import JsonRows
from onebox.server.schemas.common import Json
from onebox.text.tokenizer import Tokenizer

__all__ = ["LegacyLogprobs", "LegacyRow", "chat_logprobs", "prompt_logprobs", "shown_text", "token_text"]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token's text. Bytes that are no UTF-8 are spelled out, so that no two tokens look alike."""
    shown = tokenizer.shown_bytes(token_id)
    try:
        return shown.decode() or f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown)


def shown_text(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """The text of ids, control tokens by their names; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(tokenizer.shown_bytes, token_ids)).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> Json:
    """OpenAI's shape for chats. Every token of the answer has an entry, reasoning included."""

    def entry(token_id: int, logprob: float) -> Json:
        shown = tokenizer.shown_bytes(token_id)
        return {"token": token_text(tokenizer, token_id), "logprob": _sendable(logprob), "bytes": list(shown)}

    content = ({**entry(o.token_id, o.logprob), "top_logprobs": [entry(*top) for top in o.top]} for o in logprobs)
    return {"content": JsonRows(content), "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> JsonRows:
    """VLLM's shape: for each prompt token its candidates by id; the first token has none."""
    return JsonRows(chain([None], (_candidates(tokenizer, one) for one in logprobs)))


def _candidates(tokenizer: Tokenizer, one: TokenLogprob) -> Json:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(one.top, 1)]
    if all(token_id != one.token_id for token_id, *_ in ranked):
        ranked.append((one.token_id, one.logprob, one.rank))
    return {
        str(token_id): {"logprob": _sendable(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        for token_id, logprob, rank in ranked
    }


def _sendable(logprob: float) -> float:
    """JSON has no infinity; a token that cannot follow gets OpenAI's smallest number."""
    return max(logprob, -9999.0)


class LegacyRow(NamedTuple):
    """One token of a completion's table."""

    token_id: int
    logprob: TokenLogprob | None
    """The first token of a prompt has none."""
    written: bytes
    """What it adds to the text."""


class LegacyLogprobs:
    """OpenAI's shape for completions, chunk by chunk: text offsets continue from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of_prompt(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprob]) -> Iterator[LegacyRow]:
        """Of an echoed prompt; control tokens are counted by their names, as echoed."""
        for token_id, logprob in zip(token_ids, chain([None], logprobs), strict=True):
            yield LegacyRow(token_id, logprob, self._tokenizer.shown_bytes(token_id))

    def of_answer(self, logprobs: Iterable[TokenLogprob]) -> Iterator[LegacyRow]:
        for one in logprobs:
            yield LegacyRow(one.token_id, one, self._tokenizer.token_bytes(one.token_id))

    def table(self, rows: Callable[[], Iterable[LegacyRow]]) -> Json:
        """By columns, each made while it is written; `rows` is called for each of them."""
        return {
            "tokens": JsonRows(token_text(self._tokenizer, row.token_id) for row in rows()),
            "token_logprobs": JsonRows(row.logprob and _sendable(row.logprob.logprob) for row in rows()),
            "top_logprobs": JsonRows(row.logprob and self._tops(row.logprob) for row in rows()),
            "text_offset": JsonRows(self._next_offset(row.written) for row in rows()),
        }

    def _next_offset(self, written: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(written))
        return offset

    def _tops(self, one: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the sampled one, by their text."""
        named = {token_text(self._tokenizer, token_id): _sendable(logprob) for token_id, logprob in one.top}
        return {**named, token_text(self._tokenizer, one.token_id): _sendable(one.logprob)}
