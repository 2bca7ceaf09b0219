"""The step ladder: base checkpoint, FP8 shared experts, INT8 LM head, one to three MTP drafts, a compressed KV cache.

Each rung is one server, measured like any other, and one record in the ladder's directory; a rung that has its record
is not measured again. Rows say what each step brought, with the planner's projection beside the measurement.
Independent of how checkpoints are built and served: the caller does both.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onebox.bench.record import Role, Run, read_run
from onebox.bench.statistics import welch
from onebox.bench.timing import decode_tok_s
from onebox.planner.report import Weights
from onebox.planner.roofline import Workload, project
from onebox.spec.draft_vocab import default_draft_vocab_size
from onebox.spec.errors import MismatchError, UsageError
from onebox.spec.hardware import Box
from onebox.spec.kv import KVFormat

__all__ = ["ASSUMED_ACCEPTANCE", "RUNGS", "LadderRow", "Rung", "chosen_rungs", "ladder_rows", "read_rung", "rung_path"]

ASSUMED_ACCEPTANCE = (0.9, 0.72, 0.55)
"""Acceptance of each draft over all steps for a projection before anything is measured: about what is published."""


@dataclass(frozen=True)
class Rung:
    """One step: which checkpoint is served, and how."""

    key: str
    title: str
    checkpoint: str
    """"base" as it is; "hybrid": FP8 shared experts; "head": an INT8 LM head as well."""
    over: str = ""
    """The rung that it is compared with; empty for the first."""
    drafts: int = 0
    kv_cache_dtype: str = "auto"

    @property
    def kv(self) -> KVFormat:
        return KVFormat.parse("bf16" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)

    @property
    def serve_options(self) -> list[str]:
        """Options of `onebox serve`. The number of drafts is fixed: `auto` would choose its own."""
        method = (
            f'{{"method": "mtp", "num_speculative_tokens": {self.drafts}}}' if self.drafts else '{"method": "none"}'
        )
        return ["--speculative-config", method, "--kv-cache-dtype", self.kv_cache_dtype]


RUNGS = (
    Rung("base", "base", "base"),
    Rung("hybrid", "+ FP8 shared experts", "hybrid", over="base"),
    Rung("int8-head", "+ INT8 LM head", "head", over="hybrid"),
    Rung("mtp-1", "+ MTP-1", "head", over="int8-head", drafts=1),
    Rung("mtp-2", "+ MTP-2", "head", over="mtp-1", drafts=2),
    Rung("mtp-3", "+ MTP-3", "head", over="mtp-2", drafts=3),
    Rung("turboquant", "MTP-2 + TurboQuant KV", "head", over="mtp-2", drafts=2, kv_cache_dtype="turboquant"),
)


def chosen_rungs(names: Sequence[str]) -> tuple[Rung, ...]:
    """Rungs by name, in the ladder's order; all if none is named."""
    known = {rung.key: rung for rung in RUNGS}
    for name in names:
        if name not in known:
            raise UsageError(f"There is no rung {name!r}; there are {', '.join(known)}.")
    return tuple(rung for rung in RUNGS if not names or rung.key in names)


def rung_path(directory: Path, rung: Rung) -> Path:
    return directory / "rungs" / f"{rung.key}.json"


def read_rung(directory: Path, rung: Rung, settings: Mapping[str, object]) -> Run | None:
    """The record of a rung measured before; None if there is none.

    Refuses a record of other settings: rungs measured differently do not make a ladder.
    """
    path = rung_path(directory, rung)
    if not path.exists():
        return None
    run = read_run(path)
    told = run.config.get("ladder") or {}
    for name, value in settings.items():
        if told.get(name) != value:
            raise MismatchError(
                f"{path} was measured with {name} {told.get(name)!r}, not {value!r}. Delete it to measure it again, or "
                "name another --dir."
            )
    return run


@dataclass(frozen=True)
class LadderRow:
    """One rung in figures; a figure that is not known is None."""

    key: str
    title: str
    decode_tok_s: float | None
    """Mean of the workloads' medians."""
    e2e_tok_s: float | None
    e2e_warm_tok_s: float | None
    ttft_s: float | None
    tokens_per_step: float | None
    gain: float | None
    """Decode speed over that of the rung named by `over`, minus 1."""
    gain_interval: tuple[float, float] | None
    """Where the gain lies with 95% confidence, over the runs; None with fewer than two."""
    over: str
    gain_over_base: float | None
    projected_tok_s: float | None
    """By the planner, at the assumed acceptance."""
    projected_as_accepted_tok_s: float | None
    """By the planner, at the measured acceptance."""
    step_bytes: float | None
    """Least bytes that a step reads, by the planner."""
    kv_tokens: int | None
    weights_bytes: int | None
    by_workload: dict[str, float]
    """Decode speed of each workload."""


def ladder_rows(
    runs: Mapping[str, Run], weights: Mapping[str, Weights], box: Box, acceptance: Sequence[float]
) -> Iterator[LadderRow]:
    """Rows of the rungs in `runs` (by key); `weights` are those of the checkpoints (by `Rung.checkpoint`)."""
    speeds = {key: _mean(run, "decode_p50_tok_s") for key, run in runs.items()}
    for rung in RUNGS:
        if rung.key not in runs:
            continue
        run = runs[rung.key]
        measured = _projected(run, rung, weights.get(rung.checkpoint), box, _accepted(run, rung.drafts))
        assumed = _projected(run, rung, weights.get(rung.checkpoint), box, tuple(acceptance[: rung.drafts]))
        stored = weights[rung.checkpoint].stored if rung.checkpoint in weights else None
        yield LadderRow(
            rung.key,
            rung.title,
            speeds[rung.key],
            _mean(run, "e2e_p50_tok_s"),
            _mean(run, "e2e_warm_p50_tok_s"),
            _mean(run, "ttft_cold_p50_s"),
            _tokens_per_step(run),
            _gain(speeds.get(rung.over), speeds[rung.key]),
            _gain_interval(runs.get(rung.over), run),
            rung.over,
            _gain(speeds.get("base"), speeds[rung.key]) if rung.over else None,
            assumed[0],
            measured[0],
            assumed[1],
            run.kv_tokens,
            sum(stored.values()) if stored else None,
            {
                workload.name: workload.figures["decode_p50_tok_s"]
                for workload in run.workloads
                if "decode_p50_tok_s" in workload.figures
            },
        )


def _mean(run: Run, figure: str) -> float | None:
    """Over the workloads; None if one has no such figure, because the others alone would be another mean."""
    found = [workload.figures.get(figure) for workload in run.workloads if not workload.skipped]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def _gain(before: float | None, after: float | None) -> float | None:
    return after / before - 1 if before and after else None


def _gain_interval(before: Run | None, after: Run) -> tuple[float, float] | None:
    """Welch's interval over the runs; a run's value is the mean logarithm of its workloads' decode speeds."""
    if before is None:
        return None
    found = welch(_run_logs(before), _run_logs(after))
    return None if math.isnan(found.low) else (math.expm1(found.low), math.expm1(found.high))


def _run_logs(run: Run) -> list[float]:
    logs: dict[int, list[float]] = {}
    workloads = [workload for workload in run.workloads if not workload.skipped]
    for workload in workloads:
        for request in workload.measured:
            speed = decode_tok_s(request) if request.role is Role.COLD else None
            if speed:
                logs.setdefault(request.run, []).append(math.log(speed))
    return [statistics.fmean(found) for found in logs.values() if len(found) == len(workloads)]


def _tokens_per_step(run: Run) -> float | None:
    """Over all workloads; 1 without drafts."""
    told = [workload.acceptance for workload in run.workloads if workload.acceptance]
    if not told:
        return 1.0
    return statistics.fmean(found.tokens_per_step for found in told)


def _accepted(run: Run, drafts: int) -> tuple[float, ...] | None:
    """Mean share of steps that accepted each draft; None if not every position was reported."""
    told = [workload.acceptance for workload in run.workloads if workload.acceptance]
    if not drafts:
        return ()
    if not told or any(len(found.by_position) < drafts for found in told):
        return None
    shares = [statistics.fmean(found.by_position[place] for found in told) for place in range(drafts)]
    return tuple(min(shares[: place + 1]) for place in range(drafts))


def _projected(
    run: Run, rung: Rung, weights: Weights | None, box: Box, acceptance: tuple[float, ...] | None
) -> tuple[float | None, float | None]:
    """(tokens per second, least bytes of a step); None where the planner has no figure."""
    context = _context_tokens(run)
    if weights is None or context is None or acceptance is None or len(acceptance) != rung.drafts:
        return None, None
    rows = default_draft_vocab_size(weights.spec.vocab_size)
    workload = Workload(1, rung.drafts, context, acceptance or None, draft_vocab_size=rows)
    found = project(weights.spec, weights.stored, box, rung.kv, workload)
    rate = found.engine_rate
    return (rate.tokens_per_second if rate else None), float(found.least.total_bytes)


def _context_tokens(run: Run) -> int | None:
    """The context at the middle of an answer, averaged over the workloads."""
    found = [
        workload.figures["prompt_tokens"] + workload.figures["completion_tokens"] / 2
        for workload in run.workloads
        if {"prompt_tokens", "completion_tokens"} <= workload.figures.keys()
    ]
    return round(statistics.fmean(found)) if found else None
