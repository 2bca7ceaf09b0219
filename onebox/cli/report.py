"""`onebox report`: results of `onebox bench` and `onebox eval` as one HTML page and as Markdown."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.shared_options import KVCacheDtype
from onebox.cli.vllm_flags import own_kv_name
from onebox.spec.errors import UsageError, WriteError

if TYPE_CHECKING:
    from onebox.report.ceiling import Ceiling

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="JSON written by `onebox bench` or `eval`.")],
    output: Annotated[
        Path, typer.Option(help="The HTML page; Markdown is written beside it with the suffix .md.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page; default: the files' names.")] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="What was served, for the roofline: a checkpoint directory or a model name of `onebox plan`."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Formats to assume for a model by name: hybrid, nvfp4, ...")
    ] = None,
    box: Annotated[str, typer.Option(help="Where it was served: dgx-spark, h200, or auto for this machine.")] = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    bandwidth: Annotated[
        float | None, typer.Option(help="Peak memory bandwidth of the box in GB/s, if onebox does not know it.")
    ] = None,
) -> None:
    """Create an HTML page with plots, and Markdown, from one or more results. Failures come first."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output} must end in .html; the Markdown takes its name with .md.")
    if model is None and (weights is not None or bandwidth is not None):
        raise UsageError("--weights and --bandwidth are for the roofline, which needs --model.")
    from onebox.report import load, make_report

    # Links are relative to the report, independent of the working directory.
    sources = [load(path, os.path.relpath(path, output.parent)) for path in runs]
    ceiling = None if model is None else _ceiling(model, weights, box, kv_cache_dtype, bandwidth)
    made = make_report(sources, title, ceiling)
    beside = output.with_suffix(".md")
    for path, content in ((output, made.html), (beside, made.markdown)):
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise WriteError(f"{path} could not be written ({error.strerror}).") from None
    typer.echo(f"Written: {output} and {beside}.")


def _ceiling(model: str, weights: str | None, box: str, kv_cache_dtype: str, bandwidth: float | None) -> "Ceiling":
    from onebox.cli.plan import planned_weights
    from onebox.report.ceiling import Ceiling
    from onebox.spec.hardware import Bandwidth, named_box
    from onebox.spec.kv import KVFormat

    chosen = named_box(box)
    if bandwidth is not None:
        if not 0 < bandwidth < float("inf"):
            raise UsageError(f"--bandwidth is {bandwidth}; give GB/s above 0.")
        chosen = replace(chosen, peak=Bandwidth(bandwidth * 1e9, "given by --bandwidth"), usable=None)
    return Ceiling(planned_weights(model, weights), chosen, KVFormat.parse(own_kv_name(kv_cache_dtype)))
