"""What a measurement leaves behind: every request with its raw times, and all that is needed to judge them.

One `Run` is one JSON file. It holds only what was measured or reported by the server: figures are made from the
requests (`figures.py`) and put beside them, so that each can be traced back. This module knows nothing about HTTP.
"""

import json
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError, WriteError

__all__ = [
    "FORMAT",
    "Acceptance",
    "Failure",
    "Figures",
    "Hardware",
    "Power",
    "Reason",
    "RequestRecord",
    "Role",
    "Run",
    "RunOrigin",
    "Server",
    "WorkloadKind",
    "WorkloadRecord",
    "read_run",
    "write_json",
    "write_run",
]

FORMAT = "onebox-bench/1"
"""Written into every file; a change that an old reader would misread changes it."""


class Reason(StrEnum):
    """Why a request counts as failed. The order is the order of the report."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """A status of 400 to 499."""
    SERVER_ERROR = "server error"
    """A status of 500 or more."""
    ERROR_EVENT = "error in the stream"
    CUT = "cut stream"
    """It ended before its last event, or before a reason for its end."""
    STALL = "stall"
    TIMEOUT = "timeout"
    MALFORMED = "malformed stream"
    EMPTY = "empty answer"
    NO_USAGE = "missing usage"
    """Neither usage nor token ids: there is nothing to count."""
    WRONG_USAGE = "wrong usage"
    DUPLICATE = "duplicate chunks"


@dataclass(frozen=True)
class Failure:
    """What went wrong with a request."""

    reason: Reason
    message: str
    status: int | None = None
    """The HTTP status, if there was one. A stream that breaks has 200."""


class WorkloadKind(StrEnum):
    """How a workload was run."""

    SINGLE = "single"
    """One request at a time."""
    LOAD = "load"
    """Many at once."""
    SWEEP = "sweep"
    """Prompts and answers of given lengths, one cell of a table."""


class Role(StrEnum):
    """What a request was for."""

    WARM_UP = "warm-up"
    """Not in any figure; its failure counts all the same."""
    COLD = "cold"
    """Its prompt began as no other did, so that no cache could help."""
    WARM = "warm"
    """Its prompt had been sent before, word for word."""
    LOAD = "load"


Figures = dict[str, float]
"""Name to value. Times in seconds (`_s`), speeds in tokens a second (`_tok_s`); `figures.py` defines each name."""


@dataclass(frozen=True)
class RequestRecord:
    """One request, measured at the client. Seconds; `start_s` since the workload began, the others since `start_s`."""

    role: Role
    start_s: float
    total_s: float
    arrivals_s: tuple[float, ...] = ()
    """When each chunk with something of the answer came."""
    arrival_tokens: tuple[int, ...] = ()
    """How many tokens it brought, where the server gives token ids; else empty."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    counted_by: str = ""
    """"usage" or "token_ids": who counted the completion's tokens."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_drafts: int | None = None
    rejected_drafts: int | None = None
    finish_reason: str | None = None
    text_sha256: str = ""
    """Of the answer's whole text; equal where greedy answers are."""
    label: str = ""
    """What was asked, where a workload mixes several things."""
    turn: int = 0
    """Which turn of a conversation; 0 where there is one only."""
    run: int = 0
    """Which repetition it belongs to."""
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def first_s(self) -> float | None:
        """To the first chunk with something of the answer."""
        return self.arrivals_s[0] if self.arrivals_s else None


@dataclass(frozen=True)
class Acceptance:
    """Drafts of speculative decoding, over all requests of a workload that are in its figures."""

    accepted: int
    drafted: int
    tokens_per_step: float
    """Tokens of the answers divided by the steps that made them."""
    source: str
    """"usage" or "metrics"; the server's metrics count whatever else it served meanwhile, too."""
    num_drafts: int | None = None
    """Steps with drafts."""
    by_position: tuple[float, ...] = ()
    """Kept drafts at each place, divided by the steps with drafts (as vLLM does)."""

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class WorkloadRecord:
    """One workload, its requests and what follows from them."""

    name: str
    kind: WorkloadKind
    settings: dict[str, Any] = field(default_factory=dict)
    """As it ran: prompt and answer sizes, temperature, concurrency, rate, seed."""
    requests: tuple[RequestRecord, ...] = ()
    duration_s: float = 0.0
    """From the first request's start to the last one's end; warm-up requests are not in it."""
    figures: Figures = field(default_factory=dict)
    acceptance: Acceptance | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know, above all what was scaled down."""
    skipped: str = ""
    """Why it did not run, where it did not."""

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(request for request in self.requests if request.failure)

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """Those that figures are made from: whole answers, without warm-up."""
        return tuple(request for request in self.requests if request.is_ok and request.role is not Role.WARM_UP)


@dataclass(frozen=True)
class Server:
    """Who was measured, as far as it tells."""

    url: str
    model: str
    kind: str = "unknown"
    """onebox, vllm, llamacpp, or what /v1/models calls the owner."""
    version: str = ""
    max_model_len: int | None = None
    modalities: tuple[str, ...] = ("text",)
    tokenizer: str = ""
    """"vllm" or "llamacpp": whose form of /tokenize it has; empty where it has none."""
    gives_token_ids: bool = False
    is_local: bool = False


@dataclass(frozen=True)
class Hardware:
    """The machine that measured; the server's too where `Server.is_local`."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    load_average: float | None = None
    """Of the last minute, when the run began: other work makes figures worse."""


@dataclass(frozen=True)
class Power:
    """What nvidia-smi reported while requests ran, over all GPUs of the machine."""

    mean_w: float
    peak_w: float
    idle_w: float
    """Just before the first request."""
    num_samples: int
    interval_s: float


@dataclass(frozen=True)
class RunOrigin:
    """When, how and where a run was made: what every result file begins with."""

    started: str
    """ISO 8601, UTC."""
    command: tuple[str, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    hardware: Hardware


@dataclass(frozen=True)
class Run(RunOrigin):
    """One measurement from beginning to end."""

    server: Server
    commit: str = ""
    """Of the checkout that measured; with "+" behind it where that had changes."""
    duration_s: float = 0.0
    workloads: tuple[WorkloadRecord, ...] = ()
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    power: Power | None = None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    format: str = FORMAT

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(request for workload in self.workloads for request in workload.failed)

    @property
    def is_success(self) -> bool:
        """Something was measured, all of it was, and nothing failed."""
        has_measured = any(workload.measured for workload in self.workloads)
        return has_measured and not self.failed and not self.interrupted


def write_run(run: Run, path: Path) -> None:
    """The whole file or none of it."""
    write_json(asdict(run), path)


def write_json(value: Any, path: Path) -> None:
    """Writes beside the place and moves there, so that no reader sees half a file."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise WriteError(f"{path} could not be written ({error.strerror}); nothing was changed.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_run(path: Path) -> Run:
    """A file that `write_run` wrote. Anything else is refused with the place that does not fit."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON ({error}); name a file of `onebox bench --output`.") from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise UnreadableError(
            f"{path} is no result of this onebox: its format is {found!r}, not {FORMAT!r}. Measure again with "
            "`onebox bench`."
        )
    try:
        return typing.cast(Run, _made(Run, value, "run"))
    except _MisfitError as misfit:
        raise UnreadableError(f"{path} is damaged: {misfit}.") from None


class _MisfitError(Exception):
    """A value that is not what its place holds."""


def _made(kind: Any, value: Any, place: str) -> Any:
    """The JSON value as the annotated type; the place is named where it does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        rest = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _made(rest[0], value, place)
    if origin is tuple:
        return tuple(_made(arguments[0], part, f"{place}[{i}]") for i, part in enumerate(_checked(list, value, place)))
    if origin is dict:
        parts = _checked(dict, value, place)
        return {key: _made(arguments[1], part, f"{place}.{key}") for key, part in parts.items()}
    if is_dataclass(kind):
        return _made_dataclass(kind, _checked(dict, value, place), place)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in set(kind):
            raise _MisfitError(f"{place} is {value!r}, none of {', '.join(kind)}")
        return kind(value)
    return _checked(kind, value, place)


def _made_dataclass(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {part.name: part for part in fields(kind)}
    for name in value:
        if name not in known:
            raise _MisfitError(f"{place} holds {name!r}, which is not known")
    for name, part in known.items():
        if name not in value and part.default is MISSING and part.default_factory is MISSING:
            raise _MisfitError(f"{place}.{name} is missing")
    return kind(**{name: _made(hints[name], part, f"{place}.{name}") for name, part in value.items()})


def _checked(kind: Any, value: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _MisfitError(f"{place} is {value!r}, not of type {kind.__name__}")
    return value
