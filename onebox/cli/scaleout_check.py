"""`onebox scaleout check`: whether stock vLLM loads a checkpoint on N ranks, and how."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from onebox.scaleout.check import CheckedLayer, CheckRequest, VllmCheck

__all__ = ["check", "open_check"]

GIB = 1024**3
WIDTH = 120
REFUSED = 1


def check(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size: ranks that divide every layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size: ranks that divide the layers.")] = 1,
    vllm: Annotated[str | None, typer.Option(metavar="VERSION", help="The version of vLLM that will load it.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Method of vLLM's --speculative-config, such as mtp or dflash; default: none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every layer, as one JSON object.")] = False,
) -> None:
    """Say whether stock vLLM loads this checkpoint on that many ranks, and with which kernels.

    Reads config.json and the headers; nothing is copied or loaded. Exit code: 0 it loads, 1 vLLM refuses it or reads it
    wrongly, 2 wrong arguments.
    """
    from onebox.scaleout.check import CheckRequest
    from onebox.scaleout.versions import VllmVersion

    version = VllmVersion.parse(vllm) if vllm else None
    found = open_check(checkpoint, CheckRequest(tp, pp, version, drafter))
    if as_json:
        echo_json(_plain(found), indent=2)
    else:
        _show(found, checkpoint)
    if not found.loads:
        raise typer.Exit(REFUSED)


def open_check(directory: Path, request: "CheckRequest") -> "VllmCheck":
    """Opens and checks the checkpoint in `directory`."""
    from onebox.checkpoint.bind import bind
    from onebox.checkpoint.source import open_checkpoint
    from onebox.scaleout.check import check_checkpoint

    opened = open_checkpoint(directory)
    return check_checkpoint(opened, bind(opened), request)


def _show(found: "VllmCheck", directory: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console() if Console().is_terminal else Console(width=WIDTH)
    request = found.request
    ranks = f"tensor parallel {request.tp}" + (f", pipeline parallel {request.pp}" if request.pp > 1 else "")
    console.print(Text.assemble((str(directory), "bold"), f" on stock vLLM, {ranks}"))
    if found.layers:
        console.print(_table(found))
    total = sum(found.rank_bytes.values())
    where = "a rank" if request.tp * request.pp > 1 else "the box"
    token_kib, state_mib = found.token_bytes / 1024, found.state_bytes / 1024**2
    console.print(
        f"Memory on {where}: weights {total / GIB:.2f} GiB; a token of context {token_kib:.1f} KiB (BF16), a "
        f"sequence's states {state_mib:.1f} MiB; vLLM's workspace comes on top."
    )
    console.print(f"Lowest vLLM: {found.lowest_version} ({_reason(found)}).")
    for finding in found.findings:
        style = "bold red" if finding.is_fatal else "yellow"
        console.print(Text(f"{'refused' if finding.is_fatal else 'note'}: {finding.text}", style=style))
    console.print(_verdict(found))


def _verdict(found: "VllmCheck") -> "Text":
    from rich.text import Text

    if not found.loads:
        return Text("vLLM does not load it.", style="bold red")
    if not found.is_followed:
        return Text("Nothing speaks against it; its layers were not looked up.", style="bold yellow")
    return Text("vLLM loads it.", style="bold green")


def _reason(found: "VllmCheck") -> str:
    newest = max(found.features, key=lambda feature: feature.since)
    return f"{newest.name}, {newest.source}"


def _table(found: "VllmCheck") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("layers", "", "scheme", "vLLM's class", "kernel on a GB10", "a rank holds"):
        table.add_column(name, justify="left" if name else "right", no_wrap=True)
    for key, members in _groups(found).items():
        first, scheme = members[0], members[0].resolution.scheme
        table.add_row(
            key[0],
            f"x{len(members)}",
            str(scheme) if scheme else "BF16",
            first.kernel.class_name.removeprefix("CompressedTensors"),
            first.kernel.name,
            _held(first, found.request.tp),
            style="red" if any(member.problems for member in members) else "",
        )
    return table


def _groups(found: "VllmCheck") -> "dict[tuple[str, str], list[CheckedLayer]]":
    """The layers by kind and scheme, in the model's order."""
    groups: dict[tuple[str, str], list[CheckedLayer]] = {}
    for checked in found.layers:
        last = checked.layer.name.rpartition(".")[2]
        head = "mtp " if checked.layer.module_class.in_mtp else ""
        shared = "shared " if ".shared_expert." in checked.layer.name else ""
        tower = "visual " if checked.layer.name.startswith("visual.") else ""
        key = (f"{head}{tower}{shared}{last}", str(checked.resolution.scheme))
        groups.setdefault(key, []).append(checked)
    return groups


def _held(checked: "CheckedLayer", tp: int) -> str:
    """The parts of a layer that lie on a rank: [rows of one + rows of the next, columns]."""
    from onebox.scaleout.ranks import rank_parts

    rows_of: dict[int, list[str]] = {}
    for part in rank_parts(checked.layer, tp):
        rows_of.setdefault(part.columns, []).append(str(part.rows))
    return ", ".join(f"[{'+'.join(rows)}, {columns}]" for columns, rows in rows_of.items())


def _plain(found: "VllmCheck") -> dict[str, Any]:
    from onebox.scaleout.ranks import rank_parts

    return {
        "loads": found.loads,
        "is_followed": found.is_followed,
        "tp": found.request.tp,
        "pp": found.request.pp,
        "lowest_vllm": str(found.lowest_version),
        "features": {feature.name: str(feature.since) for feature in found.features},
        "token_bytes": found.token_bytes,
        "state_bytes": found.state_bytes,
        "rank_bytes": {kind.value: size for kind, size in found.rank_bytes.items()},
        "findings": [{"text": finding.text, "is_fatal": finding.is_fatal} for finding in found.findings],
        "layers": [
            {
                "name": checked.layer.name,
                "modules": [module.name for module in checked.layer.modules],
                "scheme": str(checked.resolution.scheme) if checked.resolution.scheme else None,
                "target": checked.resolution.target,
                "is_ignored": checked.resolution.is_ignored,
                "class": checked.kernel.class_name,
                "kernel": checked.kernel.name,
                "rank_shapes": [list(part[:3]) for part in rank_parts(checked.layer, found.request.tp)],
                "problems": list(checked.problems),
            }
            for checked in found.layers
        ],
    }
