"""`onebox inspect`: contents of a checkpoint, bytes read per decode step, and problems."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.problem_lines import problem_lines
from onebox.cli.progress import byte_progress
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.checkpoint.inspect import InspectReport, MtpHeadReport

__all__ = ["inspect"]


def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint directory, or owner/name on the hub, whose headers are read if it is not here."
        ),
    ],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also read every value (finite, not constant, scales positive) and compare the MTP head with the "
            "model's own layers.",
        ),
    ] = False,
    drafter: Annotated[
        Path | None, typer.Option(help="A DFlash drafter's directory, inspected beside the model that it drafts for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what a checkpoint holds and whether it can be served. A DFlash drafter's directory is inspected too.

    Exit code: 0 servable, 1 not servable, 2 unreadable.
    """
    from onebox.checkpoint.drafter import is_drafter
    from onebox.checkpoint.hub import find_source, inspect_remote, resolve_source
    from onebox.checkpoint.inspect import inspect_checkpoint
    from onebox.cli.inspect_drafter import drafter_json, inspected_drafter, print_drafter

    found = resolve_source(directory) if deep else find_source(directory)
    if found is not None and is_drafter(found):
        if drafter is not None:
            raise UsageError(f"{directory} is a drafter itself; name its model first: inspect MODEL --drafter DIR.")
        alone = inspected_drafter(found, None, deep=deep)
        if as_json:
            echo_json(drafter_json(alone), indent=2)
        else:
            print_drafter(alone)
        raise typer.Exit(0 if alone.is_servable else 1)
    if found is None:
        report = inspect_remote(directory, on_wait=lambda sentence: typer.echo(sentence, err=True))
    elif deep:
        total = sum(path.stat().st_size for path in found.glob("*.safetensors"))
        with byte_progress("reading values", total) as on_bytes:
            report = inspect_checkpoint(found, deep=True, on_bytes=on_bytes)
    else:
        report = inspect_checkpoint(found)
    beside = inspected_drafter(drafter, report.spec, deep=deep) if drafter else None
    if as_json:
        whole = to_json(report) | ({"drafter": drafter_json(beside)} if beside else {})
        echo_json(whole, indent=2)
    else:
        _print(report)
        if beside:
            print_drafter(beside)
    is_servable = report.is_servable and (beside is None or beside.is_servable)
    raise typer.Exit(0 if is_servable else 1)


def to_json(report: "InspectReport") -> dict[str, Any]:
    """All table values and all problems, as plain data."""
    from dataclasses import asdict

    from onebox.spec.traffic import class_step_bytes

    step = class_step_bytes(report.spec, report.class_bytes)
    return {
        "directory": str(report.directory),
        "servable": report.is_servable,
        "deep": report.is_deep,
        "quant_method": report.quant_method,
        "shards": report.num_shards,
        "tensors": report.num_tensors,
        "bytes": report.nbytes,
        "classes": [
            {
                "class": row.module_class.value,
                "formats": row.formats,
                "bytes": row.nbytes,
                "step_bytes": step[row.module_class],
            }
            for row in report.rows
        ],
        "step_bytes": sum(size for kind, size in step.items() if not kind.in_mtp),
        "draft_bytes": sum(size for kind, size in step.items() if kind.in_mtp),
        "mtp": {**asdict(report.mtp), "cost": _mtp_cost(report)},
        "problems": [asdict(problem) for problem in report.problems],
    }


def _print(report: "InspectReport") -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    console.print(
        f"[bold]{report.directory}[/bold]: {report.num_tensors:,} tensors in {report.num_shards} files, "
        f"{report.nbytes / 1e9:.2f} GB, quantised by: {report.quant_method}",
        highlight=False,
    )
    console.print(_table(report))
    console.print(f"MTP head: {_mtp_sentence(report.mtp)}", highlight=False)
    cost = _mtp_cost(report)
    for line in [*problem_lines(report.problems), *([f"note: {cost}"] if cost else [])]:
        console.print(line, highlight=False, markup=False)
    verdict = "servable" if report.is_servable else "NOT servable"
    console.print(f"[bold]{verdict}[/bold]{'' if report.is_deep else ' (headers only; --deep also reads the values)'}")


def _table(report: "InspectReport") -> Any:
    from rich.table import Table

    from onebox.spec.traffic import class_step_bytes

    step = class_step_bytes(report.spec, report.class_bytes)
    table = Table("module class", "stored as", "modules", "GB", "MB a step", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in report.rows:
        for number, (way, count) in enumerate(sorted(row.formats.items())):
            first = number == 0
            table.add_row(
                row.module_class.value if first else "",
                way.replace("[", r"\["),
                f"{count:,}",
                f"{row.nbytes / 1e9:.3f}" if first else "",
                f"{step[row.module_class] / 1e6:,.1f}" if first else "",
            )
    plain = sum(size for kind, size in step.items() if not kind.in_mtp)
    draft = sum(size for kind, size in step.items() if kind.in_mtp)
    table.add_section()
    table.add_row("a plain step reads", "weights, one token", "", "", f"{plain / 1e6:,.1f}")
    if draft:
        table.add_row("a draft pass reads", "MTP layer, without the LM head", "", "", f"{draft / 1e6:,.1f}")
    return table


def _mtp_cost(report: "InspectReport") -> str | None:
    """A sentence on what an MTP head in BF16 costs, for one stream on the box that this engine was made for."""
    from onebox.planner.levers import Setting, mtp_head_cost
    from onebox.planner.roofline import Workload
    from onebox.spec.draft_vocab import default_draft_vocab_size
    from onebox.spec.hardware import named_box
    from onebox.spec.kv import KVFormat

    if not report.mtp.is_complete:
        return None
    rows = default_draft_vocab_size(report.spec.vocab_size)
    workload = Workload(drafts=2, context_tokens=2048, acceptance=(0.9, 0.72), draft_vocab_size=rows)
    box, kv = named_box("dgx-spark"), KVFormat.parse("bf16")
    return mtp_head_cost(Setting(report.spec, report.class_bytes, report.class_formats, box, kv, workload))


def _mtp_sentence(mtp: "MtpHeadReport") -> str:
    if not mtp.is_configured:
        return "none in config.json"
    if not mtp.is_present:
        return "missing"
    complete = "complete" if mtp.is_complete else "with tensors that CANNOT BE READ"
    if mtp.num_missing:
        complete = f"INCOMPLETE ({mtp.num_missing} of its modules are missing)"
    indexed = "indexed" if mtp.is_indexed else "not in the index"
    values = {None: "values not read", True: "values finite and not constant", False: "values DAMAGED (see below)"}
    looks = {None: "", True: ", looks trained", False: ", DRAFTS IN VAIN (see below)"}[mtp.looks_trained]
    listed = f", drafts from {mtp.draft_vocab_size:,} listed tokens" if mtp.draft_vocab_size else ""
    compared = f"\n  compared: {mtp.compared}" if mtp.compared else ""
    return f"present, {complete}, {indexed}, {values[mtp.has_sound_values]}{looks}{listed}{compared}"
