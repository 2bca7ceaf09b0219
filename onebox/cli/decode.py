"""`onebox bench decode`: decode speed of the complete engine at a model's full shape, random weights, on this GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.shared_options import StateCacheDtype
from onebox.spec.errors import DoesNotFitError, MismatchError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from onebox.lab.decode import DecodeRow, Formats, Measured
    from onebox.model.qwen3_5 import Qwen35
    from onebox.spec.model import ModelSpec
    from onebox.spec.states import StateDtype

__all__ = ["decode"]

_DEFAULT_ROWS = "plain,mtp2,plain-8k,mtp2-8k,plain-x4,mtp2-x4,plain-x32,mtp2-x32,first-32,first-512,first-2048"
_COMPARED = ("step_ms", "tokens_per_second", "whole_tokens_per_second", "first_token_s")


def decode(
    shape: Annotated[str, typer.Option(help="A known model, such as qwen3.5-122b-a10b.")] = "qwen3.5-122b-a10b",
    weights: Annotated[
        str,
        typer.Option(
            help="Formats of the random weights: hybrid, the hybrid with other experts (hybrid-int3; hybrid-int34: "
            "gate and up of 3 bits, down of 4; hybrid-int2; nvfp4), or int4, fp8, bf16 as published; several, "
            "comma-separated, one after the other. What does not fit this GPU is left out."
        ),
    ] = "hybrid",
    rows: Annotated[
        str,
        typer.Option(
            help="Rows, comma-separated, or all: plain, mtp2, either with -8k, -x4, -x8, -x16 or -x32, mtp2-full "
            "(drafts from all tokens), dflash{7,12,15}, dflash12-8k, dflash7-x4 (a random INT4 DFlash drafter), "
            "first-{32,512,2048,8000} for first tokens, {plain,turboquant,fp8}-128k."
        ),
    ] = _DEFAULT_ROWS,
    mamba_ssm_cache_dtype: StateCacheDtype = "auto",
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="First check that answers are the same alone and in company.")
    ] = True,
    compared: Annotated[
        Path | None, typer.Option("--compare", help="The output of an earlier run: each figure beside its own.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also print the GPU time of each kernel, measured last.")
    ] = False,
    as_json: Annotated[  # noqa: ARG001 - read by OneboxCommand: JSON is printed in any case, as the last line
        bool, typer.Option("--json", help="Print one line of JSON and nothing else; rows go to stderr.")
    ] = False,
) -> None:
    """Time decode steps of the complete engine at full size, compared with this GPU's memory bandwidth limit.

    The limit is printed first, the last line is JSON. Forced acceptance: random weights predict nothing, so the first
    draft is accepted in 0.9 and the second in 0.72 of all steps, independent of the model's output; a DFlash drafter's
    in 0.9, 0.78, 0.67 and so on, 6.5 tokens a step with 12 drafts.
    """
    from onebox.spec.shapes import named_spec
    from onebox.spec.states import StateDtype

    state_dtype = StateDtype.parse(mamba_ssm_cache_dtype)
    chosen = [replace(row, state_dtype=state_dtype) for row in _chosen(rows)]
    spec, formats = named_spec(shape), _formats(weights)
    before = _read_rows(compared) if compared else {}
    versions = _gpu()
    from onebox.lab.decode import copy_speed, random_model, start_seconds

    typer.echo(f"{versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}")
    found, figures = list[dict[str, Any]](), dict[str, float]()
    for name in formats:
        try:
            model = random_model(spec, formats[name])
        except DoesNotFitError as error:
            if len(formats) == 1:
                raise
            typer.echo(f"{name} is left out. {error}")
            continue
        if not figures:
            figures["start_to_first_token_s"] = round(start_seconds(model), 2)
            typer.echo(
                f"first token {figures['start_to_first_token_s']:.2f} s after the start of this process; "
                "including kernel compilation not in the cache"
            )
        if gate:
            _check_answers(model, state_dtype)
        if "copy_tb_per_s" not in figures:
            figures["copy_tb_per_s"] = round(copy_speed() / 1e12, 3)
        found += _measure(model, name, formats[name], chosen, 1e12 * figures["copy_tb_per_s"], before)
        if profile:
            _print_kernels(model, chosen)
        del model
        _empty_cache()
    echo_json({"shape": shape, **versions, **figures, "rows": found})


def _measure(
    model: "Qwen35",
    name: str,
    formats: "Formats",
    rows: "list[DecodeRow]",
    ceiling: float,
    before: dict[tuple[str, str], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Times and prints all rows of one model."""
    from onebox.lab.decode import measure, weight_bytes, with_experts

    typer.echo(f"weights: {name}, {weight_bytes(model.spec, formats) / 1e9:.1f} GB")
    _print_ceiling(model.spec, rows, ceiling, formats)
    found = []
    for row in rows:
        measured = with_experts(measure(model, row, ceiling, formats), model, row)
        _print_row(measured)
        _print_compared(measured, before.get((name, measured.row)))
        found.append({"weights": name, **measured.as_dict()})
    return found


def _formats(weights: str) -> "dict[str, Formats]":
    """The chosen formats by name, in order."""
    from onebox.model.dummy import DUMMY_FORMATS

    for name in weights.split(","):
        if name not in DUMMY_FORMATS:
            raise UsageError(
                f"--weights has {name!r}, which is not known: use {', '.join(DUMMY_FORMATS)}; "
                "a checkpoint is measured by onebox bench run."
            )
    return {name: DUMMY_FORMATS[name] for name in weights.split(",")}


def _empty_cache() -> None:
    """Gives a model's memory back, for the next."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _chosen(rows: str) -> "list[DecodeRow]":
    from onebox.lab.decode import ROWS

    known = {row.name: row for row in ROWS}
    if rows == "all":
        return list(ROWS)
    for name in rows.split(","):
        if name not in known:
            raise UsageError(f"--rows has {name!r}, which is not a row: use {', '.join(known)}.")
    return [known[name] for name in rows.split(",")]


def _gpu() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("onebox bench decode needs a CUDA GPU, and torch finds none on this machine.")
    import triton

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _check_answers(model: "Qwen35", state_dtype: "StateDtype") -> None:
    from onebox.lab.gate import find_differences

    differences = find_differences(model, state_dtype=state_dtype)
    if differences:
        raise MismatchError("Answers of this engine are not reproducible on this GPU: " + " ".join(differences[:5]))
    typer.echo("gate: answers are the same alone, in company, with drafts and from cached prefixes")


def _read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of an earlier run's output, whose last line is JSON, by weights and name."""
    try:
        *_, last = path.read_text().splitlines()
        return {(row.get("weights", "hybrid"), row["row"]): row for row in json.loads(last)["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--compare {path} is not the output of onebox bench decode ({error}).") from None


def _print_compared(measured: "Measured", before: dict[str, Any] | None) -> None:
    if before:
        now = measured.as_dict()
        pairs = [(name, before.get(name), now[name]) for name in _COMPARED]
        figures = [f"{name} {old} -> {new} ({new / old - 1:+.1%})" for name, old, new in pairs if old and new]
        typer.echo(f"{'':16} {', '.join(figures)}")


def _print_ceiling(spec: "ModelSpec", rows: "list[DecodeRow]", ceiling: float, formats: "Formats") -> None:
    from onebox.lab.decode import row_bytes

    typer.echo(f"ceiling: a copy moves {ceiling / 1e12:.2f} TB/s; at that speed")
    for row in (row for row in rows if not row.is_prompt):
        num_bytes = row_bytes(spec, row, formats)
        seconds = num_bytes / ceiling
        most = row.streams * (1 + sum(row.acceptance)) / seconds
        typer.echo(f"  {row.name:16} {num_bytes / 1e9:6.2f} GB a step, {most:7.0f} tok/s")


def _print_row(measured: "Measured") -> None:
    first = f"first token {1e3 * measured.first_token_s:.1f} ms"
    if measured.step_ms is None or measured.bytes_per_step is None:
        typer.echo(f"{measured.row:16} {first}")
        return
    typer.echo(
        f"{measured.row:16} {measured.step_ms:8.3f} ms a step  {measured.tokens_per_second:8.1f} tok/s  "
        f"{measured.whole_tokens_per_second:8.1f} with the first  {measured.bytes_per_step / 1e9:6.2f} GB  "
        f"{measured.share_of_copy:6.1%} of the copy  {measured.tokens_per_step:.2f} tokens a step  "
        f"{_experts(measured)}{measured.kernels_per_step} kernels  {first}"
    )


def _experts(measured: "Measured") -> str:
    if measured.experts_per_layer is None:
        return ""
    return f"{measured.experts_per_layer:.1f} experts a layer ({measured.expected_experts:.1f} expected)  "


def _print_kernels(model: "Qwen35", rows: "list[DecodeRow]") -> None:
    """After all timing: a profiled process stays slower."""
    from onebox.lab.decode import kernel_times

    for row in rows:
        typer.echo(f"{row.name}: by GPU time a step, prefill included")
        for kernel, microseconds, calls in list(kernel_times(model, row))[:24]:
            typer.echo(f"  {microseconds:9.1f} us {calls:7.1f} calls  {kernel[:80]}")
