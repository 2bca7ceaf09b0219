"""One side of an evaluation: how it is reached, what it is asked, and what it answered so far."""

from dataclasses import dataclass, field

from onebox.bench.record import Server
from onebox.eval.asking import Manner
from onebox.eval.likelihood import Likelihoods
from onebox.eval.question import QuestionResult

__all__ = ["FORMAT", "EvalSettings", "EvalTarget", "Side"]

FORMAT = "onebox-eval/1"
"""Format version in every file; changes whenever an old reader would misread the file."""


@dataclass(frozen=True)
class EvalTarget:
    """One side as given: a URL, a directory with arguments for `onebox serve`, or the file of a saved result."""

    name: str
    place: str
    serve_arguments: str = ""
    api_key: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class EvalSettings:
    """The checks and their settings."""

    checks: tuple[str, ...]
    count: int = 24
    """Number of questions of each generated check: invoices, schema, tools, ocr, scans."""
    lengths: tuple[int, ...] = (1024, 4096)
    repeats: int = 3
    """Hidden keys for each length and depth."""
    seed: int = 1
    concurrency: int = 4
    thinking: bool = False
    num_top: int = 20
    texts: tuple[str, ...] = ()
    """User files that replace the built-in passages."""
    questions: str = ""
    """A file of own questions (`own.py`)."""
    pictures: str = ""
    """A directory of own pictures (`pictures.py`)."""
    stall_s: float = 120.0

    @property
    def manner(self) -> Manner:
        return Manner(self.concurrency, self.thinking)


@dataclass
class Side:
    """The answers of one server so far."""

    target: EvalTarget
    server: Server | None = None
    replies: list[QuestionResult] = field(default_factory=list)
    likelihoods: list[Likelihoods] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Check -> why it did not run here."""
    seconds: float = 0.0
