"""`onebox scaleout compare`: the same prompts through vLLM and through onebox, and a verdict."""

from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.json_output import echo_json

if TYPE_CHECKING:
    from rich.table import Table

    from onebox.scaleout.compare import VllmComparison

__all__ = ["compare_vllm"]

WIDTH = 120
DIFFERENT = 3


def compare_vllm(
    url: Annotated[str, typer.Argument(help="The vLLM server, with or without /v1.")],
    checkpoint: Annotated[
        str, typer.Argument(metavar="DIR", help="The checkpoint, for which a server is started; or a server's URL.")
    ],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Mean difference of log-probabilities, in nats, up to which it is one model.")
    ] = 0.06,
    api_key: Annotated[str | None, typer.Option(help="The servers' API key, where they ask for one.")] = None,
    serve_arguments: Annotated[str, typer.Option("--serve", help="Options for `onebox serve DIR`, as one text.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Send the same prompts through vLLM and through onebox: log-probabilities side by side, a verdict.

    Exit code: 0 one model, 1 a server failed, 2 wrong arguments or no answer, 3 not one model.
    """
    from contextlib import closing

    from onebox.eval.target import opened, refuse_wrong_target
    from onebox.scaleout.compare import ServedModel, compare_servers

    refuse_wrong_target(checkpoint, serve_arguments)
    with (
        closing(ServedModel(url, api_key)) as vllm,
        opened(checkpoint, serve_arguments) as ours,
        closing(ServedModel(ours, api_key)) as onebox,
    ):
        found = compare_servers(vllm, onebox, tolerance)
    if as_json:
        echo_json(_plain(found))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console() if Console().is_terminal else Console(width=WIDTH)
        console.print(_table(found))
        console.print(Text(found.verdict, style="bold green" if found.is_same else "bold red"))
    if not found.is_same:
        raise typer.Exit(DIFFERENT)


def _table(found: "VllmComparison") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("prompt", "tokens", "onebox", "vLLM", "mean diff.", "largest", "likeliest", "greedy"):
        table.add_column(name, justify="left" if name == "prompt" else "right", no_wrap=True)
    for one in found.prompts:
        text = one.prompt.replace("\n", " ")
        table.add_row(
            text if len(text) <= 40 else f"{text[:37]}...",
            str(one.num_tokens),
            f"{one.onebox_mean:.4f}",
            f"{one.vllm_mean:.4f}",
            f"{one.mean_difference:.4f}",
            f"{one.largest_difference:.4f}",
            f"{one.num_same / one.num_tokens:.0%}",
            f"{one.num_equal_tokens}/{one.num_continued}",
        )
    return table


def _plain(found: "VllmComparison") -> dict[str, object]:
    return {
        "is_same": found.is_same,
        "mean_difference": found.mean_difference,
        "largest_difference": found.largest_difference,
        "same_likeliest": found.same_share,
        "tolerance": found.tolerance,
        "prompts": [
            {
                "prompt": one.prompt,
                "tokens": one.num_tokens,
                "onebox_mean_logprob": one.onebox_mean,
                "vllm_mean_logprob": one.vllm_mean,
                "differences": [round(value, 6) for value in one.differences],
                "equal_greedy_tokens": one.num_equal_tokens,
                "greedy_tokens": one.num_continued,
            }
            for one in found.prompts
        ],
    }
