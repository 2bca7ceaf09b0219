"""`onebox inspect` of a DFlash drafter: its shape, its formats, what a step reads of it, and problems."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebox.cli.problem_lines import problem_lines
from onebox.cli.progress import byte_progress

if TYPE_CHECKING:
    from onebox.checkpoint.drafter_inspect import DrafterReport
    from onebox.spec.model import ModelSpec

__all__ = ["drafter_json", "inspected_drafter", "print_drafter"]


def inspected_drafter(directory: Path, target: "ModelSpec | None", *, deep: bool) -> "DrafterReport":
    """The report on a drafter, alone or beside its model."""
    from onebox.checkpoint.drafter_inspect import inspect_drafter

    if not deep:
        return inspect_drafter(directory, target)
    total = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    with byte_progress("reading the drafter's values", total) as on_bytes:
        return inspect_drafter(directory, target, deep=True, on_bytes=on_bytes)


def drafter_json(report: "DrafterReport") -> dict[str, Any]:
    """All values as plain data."""
    from dataclasses import asdict

    return {
        "directory": str(report.directory),
        "servable": report.is_servable,
        "deep": report.is_deep,
        "config": asdict(report.spec),
        "layers": [
            {"causal": report.spec.causal(layer), "window": report.spec.window(layer)}
            for layer in range(report.spec.num_hidden_layers)
        ],
        "formats": report.formats,
        "tensors": report.num_tensors,
        "bytes": report.loaded.weight_bytes,
        "step_bytes": report.loaded.loaded_bytes,
        "problems": [asdict(problem) for problem in report.problems],
    }


def print_drafter(report: "DrafterReport") -> None:
    from rich.console import Console

    spec, console = report.spec, Console(soft_wrap=True)
    console.print(
        f"[bold]{report.directory}[/bold]: a DFlash drafter, {report.num_tensors:,} tensors, "
        f"{report.loaded.weight_bytes / 1e9:.3f} GB",
        highlight=False,
    )
    taps = ", ".join(map(str, spec.target_layer_ids))
    for line in (
        f"  block {spec.block_size} (up to {spec.max_drafts} drafts a step), mask token {spec.mask_token_id}, "
        f"rope theta {spec.rope_theta:g}",
        f"  taps behind layers {taps}, of a model with hidden size {spec.hidden_size:,} and "
        f"{spec.vocab_size:,} tokens{f', {spec.num_target_layers} layers' if spec.num_target_layers else ''}",
        *_layer_lines(report),
        f"  stored as {', '.join(f'{count} x {way}' for way, count in sorted(report.formats.items()))}",
        f"  a step reads {report.loaded.loaded_bytes / 1e6:,.1f} MB of it, whatever the depth: K and V matrices twice",
    ):
        console.print(line, highlight=False, markup=False)
    for line in problem_lines(report.problems):
        console.print(line, highlight=False, markup=False)
    verdict = "servable" if report.is_servable else "NOT servable"
    console.print(f"[bold]{verdict}[/bold]{'' if report.is_deep else ' (headers only; --deep also reads the values)'}")


def _layer_lines(report: "DrafterReport") -> list[str]:
    """One line for each run of layers with the same mask."""
    spec = report.spec
    runs: list[tuple[int, int, str]] = []
    for layer in range(spec.num_hidden_layers):
        window = spec.window(layer)
        seen = f"window {window:,}" if window else "all positions"
        mask = f"{'causal' if spec.causal(layer) else 'bidirectional'}, {seen}"
        if runs and runs[-1][2] == mask:
            runs[-1] = (runs[-1][0], layer, mask)
        else:
            runs.append((layer, layer, mask))
    return [
        f"  layer{'s' if last > first else ''} {first}{f' to {last}' if last > first else ''}: {mask}"
        for first, last, mask in runs
    ]
