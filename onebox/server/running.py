"""The answers that are being computed, by id, for requests that change one from outside its own connection."""

from collections.abc import Iterator
from contextlib import contextmanager

from onebox.server.answer import Answers
from onebox.server.keys import current_caller
from onebox.server.record import current_record

__all__ = ["RunningAnswers"]


class RunningAnswers:
    """Of one server; used on its event loop alone. No more than the engine has places."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], Answers] = {}
        """By owner and id: the answer's own, and the request's."""

    @contextmanager
    def holding(self, answers: Answers) -> Iterator[None]:
        """Can be found until the end of the block, by whoever has the same API key."""
        record, owner = current_record.get(), _owner()
        ids = [(owner, answers.request_id), *([(owner, record.request_id)] if record else [])]
        self._by_id.update(dict.fromkeys(ids, answers))
        try:
            yield
        finally:
            for key in ids:
                if self._by_id.get(key) is answers:
                    del self._by_id[key]

    def find(self, given_id: str) -> Answers | None:
        """The caller's own. Some dialects write the first dash of an id as an underscore."""
        owner = _owner()
        return self._by_id.get((owner, given_id)) or self._by_id.get((owner, given_id.replace("_", "-", 1)))


def _owner() -> str:
    caller = current_caller.get()
    return caller.fingerprint if caller else ""
