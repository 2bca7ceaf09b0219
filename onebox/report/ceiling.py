"""The roofline of a run: the planner's speed limit for the bytes of a step, and the measured speed.

Limits are projected from sizes, not measured, and labelled as projected; measured points come from the result file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onebox.planner.report import Weights
from onebox.planner.roofline import Projection, Workload, project, step_flops
from onebox.report import plots
from onebox.report.document import Block, Cell, Plot, ReportSection, Sentence, Table
from onebox.report.source import ResultFile, Value, pointer
from onebox.spec.draft_vocab import default_draft_vocab_size
from onebox.spec.hardware import Box
from onebox.spec.kv import KVFormat

__all__ = ["Ceiling", "roofline_section"]


@dataclass(frozen=True)
class Ceiling:
    """The served model and the box, as given by the user: a result file does not hold the size of the weights."""

    weights: Weights
    box: Box
    kv: KVFormat


def roofline_section(sources: Sequence[ResultFile], ceiling: Ceiling) -> Iterator[ReportSection]:
    """One point for each single-stream workload."""
    rows: list[tuple[Cell, ...]] = []
    points: dict[str, tuple[float, float]] = {}
    for source in sources:
        for number, workload in enumerate(source.body["workloads"]):
            speed = source.value(pointer("workloads", number, "figures", "decode_p50_tok_s"), ",.1f")
            has_length = "prompt_tokens" in workload["figures"]
            if workload["kind"] != "single" or not isinstance(speed, Value) or not has_length:
                continue
            planned = _planned(workload, ceiling.weights.spec.vocab_size)
            projection = project(ceiling.weights.spec, ceiling.weights.stored, ceiling.box, ceiling.kv, planned)
            name = f"{source.name}: {workload['name']}" if len(sources) > 1 else workload["name"]
            rows.append((name, f"{planned.tokens_per_step:.2f}", *_row(projection, speed)))
            flops = step_flops(ceiling.weights.spec, planned)
            points[name] = (flops / projection.least.total_bytes, flops * speed.raw / planned.tokens_per_step)
    if rows:
        yield ReportSection("Roofline", tuple(_blocks(ceiling, rows, points)))


def _planned(workload: dict[str, Any], vocab_size: int) -> Workload:
    """The workload for the planner: the context at the middle of the answer, and the drafts per step.

    Drafts per step are rounded down, and each reads the rows of this engine's draft vocabulary: where another engine
    reads more, the bytes are underestimated and the limit is overestimated.
    """
    figures, accepted = workload["figures"], workload["acceptance"]
    context = int(figures["prompt_tokens"] + figures["completion_tokens"] / 2)
    if not accepted or not accepted["drafted"]:
        return Workload(1, 0, context)
    steps = accepted["num_drafts"] or 0
    drafts = min(int(accepted["drafted"] / steps), len(accepted["by_position"])) if steps else 0
    shares = [min(1.0, share) for share in accepted["by_position"][:drafts]]
    falling = tuple(min(shares[: place + 1]) for place in range(len(shares)))
    rows = default_draft_vocab_size(vocab_size)
    return Workload(1, len(falling), context, falling, draft_vocab_size=rows) if falling else Workload(1, 0, context)


def _row(projection: Projection, speed: Value) -> tuple[Cell, ...]:
    limit, expected = projection.limit, projection.expected_rate
    bytes_read = f"{projection.least.total_bytes / 1e9:.4g}"
    share = "-" if limit is None else f"{speed.raw / limit.tokens_per_second:.1%}"
    projected = ("-" if rate is None else f"{rate.tokens_per_second:,.1f}" for rate in (limit, expected))
    return bytes_read, *projected, speed, share


def _blocks(
    ceiling: Ceiling, rows: Sequence[tuple[Cell, ...]], points: dict[str, tuple[float, float]]
) -> Iterator[Block]:
    box, weights = ceiling.box, ceiling.weights
    roofs = [
        plots.Roof(
            f"{name}: {rate.bytes_per_second / 1e9:,.0f} GB/s ({rate.source})",
            rate.bytes_per_second,
            box.peak_bf16_flops,
        )
        for name, rate in (("peak", box.peak), ("usable", box.usable))
        if rate is not None
    ]
    if roofs:
        svg = plots.roofline(roofs, points, "operations per second")
        yield Plot(svg, "Lines are the projected limits of the box; points are measured decode speeds of one stream.")
    else:
        yield Sentence(f"No bandwidth is known for {box.device}, so there is no limit to draw.", is_note=True)
    columns = ("workload", "tokens a step", "GB a step, least", "limit tok/s, projected", "expected tok/s, projected")
    yield Table((*columns, "measured tok/s", "of the limit"), tuple(rows))
    yield Sentence(
        f"Projected by `onebox plan` from {weights.model} ({weights.source}) on {box.name} ({box.device}) with a "
        f"{ceiling.kv.name} KV cache. The limit is peak bandwidth over the least bytes of a step.",
        is_note=True,
    )
