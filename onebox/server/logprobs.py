"""Log-probabilities in the shapes of the APIs."""

import codecs
from collections.abc import Iterable, Sequence

from onebox.engine.api import TokenLogprob
from onebox.server.schemas.common import Json
from onebox.text.tokenizer import Tokenizer

__all__ = ["LegacyLogprobs", "chat_logprobs", "prompt_logprobs", "shown_text", "token_text"]


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


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> Json:
    """OpenAI's shape for chats. Every token of the answer has an entry, reasoning included."""

    def entry(token_id: int, logprob: float) -> Json:
        shown = tokenizer.shown_bytes(token_id)
        return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(shown)}

    content = [{**entry(o.token_id, o.logprob), "top_logprobs": [entry(*top) for top in o.top]} for o in logprobs]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[Json | None]:
    """VLLM's shape: for each prompt token its candidates by id; the first token has none."""
    return [None, *(_candidates(tokenizer, one) for one in logprobs)]


def _candidates(tokenizer: Tokenizer, one: TokenLogprob) -> Json:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(one.top, 1)]
    if all(token_id != one.token_id for token_id, *_ in ranked):
        ranked.append((one.token_id, one.logprob, one.rank))
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        for token_id, logprob, rank in ranked
    }


class LegacyLogprobs:
    """OpenAI's shape for completions, chunk by chunk: text offsets continue from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
        """Of an echoed prompt, whose first token has none; control tokens are counted by their names, as echoed."""
        return self._table(token_ids, [None, *logprobs], [self._tokenizer.shown_bytes(i) for i in token_ids])

    def of_answer(self, logprobs: Sequence[TokenLogprob]) -> Json:
        token_ids = [one.token_id for one in logprobs]
        return self._table(token_ids, logprobs, [self._tokenizer.token_bytes(i) for i in token_ids])

    def _table(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], written: Sequence[bytes]
    ) -> Json:
        offsets = []
        for text in written:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(text))
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [one and one.logprob for one in logprobs],
            "top_logprobs": [one and self._tops(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _tops(self, one: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the sampled one, by their text."""
        named = {token_text(self._tokenizer, token_id): logprob for token_id, logprob in one.top}
        return {**named, token_text(self._tokenizer, one.token_id): one.logprob}
