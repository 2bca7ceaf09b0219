"""The record of a measurement: every request with its raw times, and the context needed to interpret them.

One `Run` is one JSON file. It holds only values measured or reported by the server; figures are computed from the
requests (`figures.py`) and stored beside them, so that each can be traced. Independent of HTTP.
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
    "Sensed",
    "SensorSpread",
    "Server",
    "WorkloadKind",
    "WorkloadRecord",
    "read_run",
    "read_value",
    "write_json",
    "write_run",
]

FORMAT = "onebox-bench/1"
"""Format version in every file; changes whenever an old reader would misread the file."""


class Reason(StrEnum):
    """Why a request failed, in the order of the report."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """A status of 400 to 499."""
    SERVER_ERROR = "server error"
    """A status of 500 or more."""
    ERROR_EVENT = "error in the stream"
    CUT = "cut stream"
    """It ended before its last event or before a finish_reason."""
    STALL = "stall"
    TIMEOUT = "timeout"
    MALFORMED = "malformed stream"
    EMPTY = "empty answer"
    NO_USAGE = "missing usage"
    """Neither usage nor token ids: tokens cannot be counted."""
    WRONG_USAGE = "wrong usage"
    DUPLICATE = "duplicate chunks"
    UNJUDGED = "no judgement"
    """Another server, asked to judge the answer, gave no judgement (`onebox eval --judge`)."""


@dataclass(frozen=True)
class Failure:
    """The failure of a request."""

    reason: Reason
    message: str
    status: int | None = None
    """The HTTP status, if any. A broken stream has 200."""


class WorkloadKind(StrEnum):
    """How a workload was run."""

    SINGLE = "single"
    """Single stream: one request at a time."""
    LOAD = "load"
    """Concurrent requests."""
    SWEEP = "sweep"
    """Prompts and answers of fixed lengths: one cell of the table."""


class Role(StrEnum):
    """The role of a request."""

    WARM_UP = "warm-up"
    """Excluded from all figures; its failure still counts."""
    COLD = "cold"
    """Its prompt has a unique beginning, so that no prefix is cached."""
    WARM = "warm"
    """An identical prompt was sent before."""
    LOAD = "load"


Figures = dict[str, float]
"""Name to value. Times in seconds (`_s`), speeds in tokens per second (`_tok_s`); `figures.py` defines each name."""


@dataclass(frozen=True)
class RequestRecord:
    """One request, measured at the client. Seconds: `start_s` since the workload began, the others since `start_s`."""

    role: Role
    start_s: float
    total_s: float
    arrivals_s: tuple[float, ...] = ()
    """Arrival time of each chunk with content."""
    arrival_tokens: tuple[int, ...] = ()
    """Tokens in each of these chunks if the server sends token ids; else empty."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    counted_by: str = ""
    """"usage" or "token_ids": the source of the completion token count."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_drafts: int | None = None
    rejected_drafts: int | None = None
    finish_reason: str | None = None
    text_sha256: str = ""
    """Hash of the answer's text; equal for equal greedy answers."""
    label: str = ""
    """The task, in a workload that mixes several."""
    turn: int = 0
    """Turn of a conversation; 0 for single-turn requests."""
    run: int = 0
    """Index of the repetition."""
    arrival_chars: tuple[int, ...] = ()
    """Characters in each chunk with content if the server sends no token ids; else empty."""
    responded_s: float | None = None
    """Arrival time of the first event of the answer, with or without content."""
    late_s: float | None = None
    """Open loop: seconds from the planned arrival to the sending."""
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def first_s(self) -> float | None:
        """Time to the first chunk with content."""
        return self.arrivals_s[0] if self.arrivals_s else None


@dataclass(frozen=True)
class Acceptance:
    """Draft acceptance over all requests of a workload that are in its figures."""

    accepted: int
    drafted: int
    tokens_per_step: float
    """Answer tokens divided by decode steps."""
    source: str
    """"usage" or "metrics"; the server's metrics include other traffic of that time."""
    num_drafts: int | None = None
    """Steps with drafts."""
    by_position: tuple[float, ...] = ()
    """Accepted drafts at each position, divided by the steps with drafts (as in vLLM)."""

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class WorkloadRecord:
    """One workload with its requests and figures."""

    name: str
    kind: WorkloadKind
    settings: dict[str, Any] = field(default_factory=dict)
    """Effective settings: prompt and answer sizes, temperature, concurrency, rate, seed."""
    requests: tuple[RequestRecord, ...] = ()
    duration_s: float = 0.0
    """From the first request's start to the last request's end, without warm-up requests."""
    figures: Figures = field(default_factory=dict)
    acceptance: Acceptance | None = None
    notes: tuple[str, ...] = ()
    """Notes for the reader, in particular on scaled-down lengths."""
    skipped: str = ""
    """Why it did not run, if skipped."""

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(request for request in self.requests if request.failure)

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """Requests included in figures: complete answers, without warm-up."""
        return tuple(request for request in self.requests if request.is_ok and request.role is not Role.WARM_UP)


@dataclass(frozen=True)
class Server:
    """The measured server, as far as it reports."""

    url: str
    model: str
    kind: str = "unknown"
    """onebox, vllm, llamacpp, or the owner in /v1/models."""
    version: str = ""
    max_model_len: int | None = None
    modalities: tuple[str, ...] = ("text",)
    tokenizer: str = ""
    """Format of /tokenize: "vllm" or "llamacpp"; empty without /tokenize."""
    gives_token_ids: bool = False
    is_local: bool = False


@dataclass(frozen=True)
class Hardware:
    """The client's machine; also the server's if `Server.is_local`."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    load_average: float | None = None
    """1-minute load at the start of the run: other processes make figures worse."""


@dataclass(frozen=True)
class Power:
    """Power reported by nvidia-smi while requests ran, summed over all GPUs of the machine."""

    mean_w: float
    peak_w: float
    idle_w: float
    """Before the first request."""
    num_samples: int
    interval_s: float


@dataclass(frozen=True)
class SensorSpread:
    """One sensor while requests ran, and before the first."""

    mean: float
    lowest: float
    highest: float
    idle: float | None = None


@dataclass(frozen=True)
class Sensed:
    """What the sensors of the server's machine told while requests ran. A sensor that does not tell is absent."""

    interval_s: float
    num_samples: int
    power_w: dict[str, SensorSpread] = field(default_factory=dict)
    """By source; "box" is the whole machine."""
    temperature_c: dict[str, SensorSpread] = field(default_factory=dict)
    clock_mhz: dict[str, SensorSpread] = field(default_factory=dict)
    throttled: dict[str, float] = field(default_factory=dict)
    """Reason -> share of the samples."""
    idle_cpu_cores: float | None = None
    cpu_cores: float | None = None
    """CPU time of the server's processes per second, before the first request and while requests ran."""


@dataclass(frozen=True)
class RunOrigin:
    """When, how and where a run was made: the header of every result file."""

    started: str
    """ISO 8601, UTC."""
    command: tuple[str, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    hardware: Hardware


@dataclass(frozen=True)
class Run(RunOrigin):
    """One complete measurement."""

    server: Server
    commit: str = ""
    """Commit of the client's checkout, with "+" if it had changes."""
    duration_s: float = 0.0
    workloads: tuple[WorkloadRecord, ...] = ()
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    kv_tokens: int | None = None
    """Tokens that the server's KV cache holds, if reported."""
    power: Power | None = None
    sensed: Sensed | None = None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    format: str = FORMAT

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(request for workload in self.workloads for request in workload.failed)

    @property
    def is_success(self) -> bool:
        """At least one workload was measured, the run was not interrupted, and no request failed."""
        has_measured = any(workload.measured for workload in self.workloads)
        return has_measured and not self.failed and not self.interrupted


def write_run(run: Run, path: Path) -> None:
    """Writes the file atomically."""
    write_json(asdict(run), path)


def write_json(value: Any, path: Path) -> None:
    """Writes a temporary file and renames it, so that no reader sees a partial file."""
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
    """Reads a file from `write_run`. Any other file is refused with the first invalid location."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UnreadableError(
            f"{path} is not JSON ({error}); give a file written by `onebox bench --output`."
        ) from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise UnreadableError(
            f"{path} is not a result of this onebox: its format is {found!r}, not {FORMAT!r}. Measure again with "
            "`onebox bench`."
        )
    return typing.cast(Run, read_value(Run, value, path, "run"))


def read_value(kind: Any, value: Any, path: Path, place: str) -> Any:
    """A JSON value of a result file as a dataclass, or another annotated type; a misfit is named with its place."""
    try:
        return _made(kind, value, place)
    except _MisfitError as misfit:
        raise UnreadableError(f"{path} is damaged: {misfit}.") from None


class _MisfitError(Exception):
    """A value of the wrong type at its location."""


def _made(kind: Any, value: Any, place: str) -> Any:
    """The JSON value as the annotated type; an error names the location."""
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
            raise _MisfitError(f"{place} is {value!r}, not one of {', '.join(kind)}")
        return kind(value)
    return _checked(kind, value, place)


def _made_dataclass(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {part.name: part for part in fields(kind)}
    for name in value:
        if name not in known:
            raise _MisfitError(f"{place} holds {name!r}, which is unknown")
    for name, part in known.items():
        if name not in value and part.default is MISSING and part.default_factory is MISSING:
            raise _MisfitError(f"{place}.{name} is missing")
    return kind(**{name: _made(hints[name], part, f"{place}.{name}") for name, part in value.items()})


def _checked(kind: Any, value: Any, place: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _MisfitError(f"{place} is {value!r}, not of type {kind.__name__}")
    return value
