"""`onebox scaleout`: the same checkpoint on two or more boxes, through stock vLLM."""

import typer

from onebox.cli.scaleout_check import check
from onebox.cli.scaleout_compare import compare_vllm
from onebox.cli.scaleout_launch import launch
from onebox.cli.scaleout_plan import plan_scaleout

__all__ = ["scaleout_app"]

scaleout_app = typer.Typer(
    help="Serve a checkpoint on two or more boxes with stock vLLM: check it, plan it, launch it, compare it.",
    no_args_is_help=True,
)
scaleout_app.command()(check)
scaleout_app.command("plan")(plan_scaleout)
scaleout_app.command()(launch)
scaleout_app.command("compare")(compare_vllm)
