"""`onebox scaleout plan`: what two or more boxes bring beside one, projected."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.options import grouped
from onebox.cli.plan import DEFAULT_CONTEXT_TOKENS, CapacityOptions, planned_weights
from onebox.cli.shared_options import chosen_utilization
from onebox.cli.vllm_flags import own_kv_name
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from onebox.scaleout.plan import BoxesPlan

__all__ = ["plan_scaleout"]

GIB = 1024**3
WIDTH = 110
_LENGTHS = (8192, 32768, 131072)


@grouped
def plan_scaleout(
    memory: CapacityOptions,
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, a repository on the hub, or a known model by name.")
    ],
    boxes: Annotated[int, typer.Option(help="Number of boxes, one rank each.")] = 2,
    box: Annotated[str, typer.Option(help="dgx-spark, h200, or auto for this machine.")] = "dgx-spark",
    weights: Annotated[
        str | None, typer.Option(help="Formats to assume for a model by name, as for onebox plan.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Acceptance rate of each MTP draft over all steps, such as 0.9,0.72; none: no drafts."),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Context in tokens for which speed is projected.")] = None,
    streams: Annotated[int, typer.Option(help="Sequences decoded at once for which speed is projected.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what two or more boxes bring beside one with stock vLLM: memory, users, bytes, all-reduces, tok/s.

    Computed from bytes and published latencies; nothing is loaded or measured.
    """
    from onebox.planner.memory import MemoryRequest
    from onebox.planner.roofline import Workload, parse_acceptance
    from onebox.scaleout.plan import plan_boxes
    from onebox.spec.hardware import named_box
    from onebox.spec.kv import KVFormat
    from onebox.spec.states import StateDtype

    planned = planned_weights(model, weights)
    accepted = None if acceptance is None else parse_acceptance(acceptance)
    drafts = len(accepted) if accepted else 0
    longest = planned.spec.max_context_tokens if memory.max_model_len is None else memory.max_model_len
    chosen_box = named_box(box)
    request = MemoryRequest(
        max_context_tokens=longest,
        slots=memory.max_num_seqs,
        kv=KVFormat.parse(own_kv_name(memory.kv_cache_dtype)),
        drafts=drafts,
        max_batched_tokens=memory.batched_tokens(chosen_box),
        gpu_memory_utilization=chosen_utilization(memory.gpu_memory_utilization),
        reserve_bytes=memory.reserve_bytes(),
        with_vision=not memory.language_model_only,
        state_dtype=StateDtype.parse(memory.mamba_ssm_cache_dtype),
    )
    workload = Workload(
        streams=streams,
        drafts=drafts,
        context_tokens=min(DEFAULT_CONTEXT_TOKENS, longest) if context is None else context,
        acceptance=accepted,
        state_dtype=request.state_dtype,
    )
    if context is not None and context > longest:
        raise UsageError(f"--context {context:,} is more than the longest sequence, {longest:,} tokens.")
    found = plan_boxes(planned, chosen_box, boxes, request, workload)
    if as_json:
        echo_json(_plain(found), indent=2)
    else:
        _show(found)


def _show(found: "BoxesPlan") -> None:
    from rich.console import Console
    from rich.text import Text

    from onebox.scaleout.plan import VLLM_SHARE
    from onebox.scaleout.published import MEASURED_BOX

    console = Console() if Console().is_terminal else Console(width=WIDTH)
    work = found.workload
    title = f" on {found.num_boxes} x {found.box.name}, vLLM with tensor parallel {found.num_boxes}"
    console.print(Text.assemble((found.weights.model, "bold"), title))
    console.print(Text(f"weights: {found.weights.source}", style="dim"))
    console.print(Text("\nMemory of a rank, GiB", style="bold cyan"))
    console.print(_memory_table(found))
    many = f"{work.streams} stream{'s' if work.streams > 1 else ''}"
    drafts = f"{work.drafts} MTP drafts" if work.drafts else "no drafts"
    heading = f"\nA step, projected: {many}, {drafts}, {work.context_tokens:,} tokens of context"
    console.print(Text(heading, style="bold cyan"))
    console.print(_step_table(found))
    misfit = found.memory[1] if isinstance(found.memory[1], str) else None
    console.print(
        f"{found.num_boxes} boxes are {found.speedup:.2f} times one{', if one had the memory' if misfit else ''}."
    )
    if misfit:
        console.print(Text(f"One box: {misfit}", style="red"))
    if found.published:
        console.print(Text("\nPublished, tok/s of one stream; not measured by us", style="bold cyan"))
        console.print(_published_table(found))
    assumed = (
        f"assumes {VLLM_SHARE:.0%} of the usable bandwidth for vLLM, as published for one Spark, and NCCL's "
        "all-reduces as published for two Sparks over RoCE; no two boxes were measured by us"
    )
    console.print(Text(assumed, style="dim"))
    if found.box.name != MEASURED_BOX:
        slow = f"{found.box.name}: joined by NVLink, or within one machine, all-reduces take a fraction of that."
        console.print(Text(slow, style="yellow"))


def _new_table(*names: str, num_texts: int = 1) -> "Table":
    """The first columns hold text, the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < num_texts else "right", no_wrap=True)
    return table


def _boxes(count: int) -> str:
    return f"{count} box{'es' if count > 1 else ''}"


def _memory_table(found: "BoxesPlan") -> "Table":
    from onebox.planner.memory import MemoryPlan

    lengths = [length for length in _LENGTHS if length <= found.request.max_context_tokens]
    users = [f"users at {length // 1024}K" for length in lengths]
    table = _new_table("", "weights", "workspace", "KV, states", "tokens in vLLM", *users)
    for count, plan in found.memory.items():
        if not isinstance(plan, MemoryPlan):
            table.add_row(_boxes(count), "does not fit", style="red")
            continue
        left = plan.states_bytes + plan.kv_bytes + plan.prefix_bytes + plan.unused_bytes
        sizes = [f"{size / GIB:.2f}" for size in (plan.weights_bytes, plan.workspace_bytes, left)]
        held = [f"{plan.users_at(length):,}" for length in lengths]
        table.add_row(_boxes(count), *sizes, f"{found.vllm_tokens[count]:,}", *held)
    return table


def _step_table(found: "BoxesPlan") -> "Table":
    table = _new_table("", "GB on a rank", "reading", "all-reduces", "of each", "together", "step", "tok/s")
    for count, step in found.steps.items():
        many = step.num_all_reduces
        table.add_row(
            _boxes(count),
            f"{step.rank_bytes / 1e9:.3f}",
            f"{step.read_seconds * 1e3:.2f} ms",
            f"{many} of {step.all_reduce_bytes / 1024:.0f} KiB" if many else "-",
            f"{step.all_reduce_seconds / many * 1e6:.0f} us" if many else "-",
            f"{step.all_reduce_seconds * 1e3:.2f} ms" if many else "-",
            f"{step.step_seconds * 1e3:.2f} ms",
            f"{step.tokens_per_second:.1f}",
        )
    return table


def _published_table(found: "BoxesPlan") -> "Table":
    table = _new_table("model", "how", "one box", "two boxes", "source", num_texts=2)
    for pair in found.published:
        table.add_row(pair.model, pair.how, pair.one_box or "-", pair.two_boxes or "-", pair.source)
    return table


def _plain(found: "BoxesPlan") -> dict[str, Any]:
    from onebox.planner.memory import MemoryPlan

    return {
        "model": found.weights.model,
        "box": found.box.name,
        "boxes": found.num_boxes,
        "speedup": found.speedup,
        "memory": {
            str(count): {part.name: part.bytes for part in plan.parts} if isinstance(plan, MemoryPlan) else plan
            for count, plan in found.memory.items()
        },
        "vllm_kv_tokens": {str(count): tokens for count, tokens in found.vllm_tokens.items()},
        "steps": {
            str(count): {
                "rank_bytes": step.rank_bytes,
                "read_seconds": step.read_seconds,
                "num_all_reduces": step.num_all_reduces,
                "all_reduce_bytes": step.all_reduce_bytes,
                "all_reduce_seconds": step.all_reduce_seconds,
                "tokens_per_second": step.tokens_per_second,
            }
            for count, step in found.steps.items()
        },
        "published": [pair._asdict() for pair in found.published],
    }
