"""What is known of the HTTP request that is being handled, for its line in the log and its trace."""

import contextvars
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebox.server.answer import Answers

__all__ = ["HttpRecord", "current_record", "note", "request_id_of"]

MAX_ID_CHARACTERS = 128
_FOREIGN = re.compile(r"[^A-Za-z0-9._:/+=@-]+")
MAX_NOTES = 8


@dataclass
class HttpRecord:
    """Filled while the request is handled."""

    request_id: str
    """The client's `x-request-id`, or one of ours."""
    method: str
    path: str
    began_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    """0 where nothing was sent: the client was gone."""
    key_name: str | None = None
    submitted_at: float | None = None
    """When its prompts were handed to the engine, on the clock of `began`."""
    answers: "Answers | None" = None
    is_stream: bool = False
    error: str | None = None
    """Of a stream that had begun: the code of its error."""
    notes: list[str] = field(default_factory=list)
    """What was done otherwise than the client asked, as sentences."""

    @property
    def shown_status(self) -> int:
        """499 for a client that leaves before its answer, as others write it."""
        return self.status or 499

    @property
    def first_token_at(self) -> float | None:
        """Of its answers the first, on time.monotonic's clock."""
        times = [a.first_token_at for a in (self.answers.answers if self.answers else ()) if a.first_token_at]
        return min(times, default=None)

    @property
    def started_at(self) -> float | None:
        times = [a.started_at for a in (self.answers.answers if self.answers else ()) if a.started_at]
        return min(times, default=None)

    @property
    def finish_reasons(self) -> list[str]:
        """Of each answer; `aborted` where the client left, or an error came first."""
        return [a.finish_reason or "aborted" for a in self.answers.answers] if self.answers else []


current_record: contextvars.ContextVar[HttpRecord | None] = contextvars.ContextVar("current_record", default=None)


def note(sentence: str) -> None:
    """Adds a sentence to the line of the request that is being handled."""
    record = current_record.get()
    if record is not None and len(record.notes) < MAX_NOTES:
        record.notes.append(sentence)


def request_id_of(given: str) -> str:
    """A client's id without what does not belong in a log or a header, and not longer than useful; or a new one."""
    return _FOREIGN.sub("", given[: 2 * MAX_ID_CHARACTERS])[:MAX_ID_CHARACTERS] or uuid.uuid4().hex
