"""`onebox build`: builds one checkpoint from several, in the formats of a recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.options import grouped, option_group
from onebox.cli.progress import byte_progress

if TYPE_CHECKING:
    from onebox.checkpoint.build import BuildPlan
    from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat

__all__ = ["FormatOptions", "SourceOptions", "build", "print_plan"]

DEFAULT_SHARD_GIB = 2.0
_FORMAT = "keep, bf16, fp8, int8, int4 or nvfp4"
_EXPERT_FORMAT = "keep, bf16, fp8, int8, int4, int3, int2 or nvfp4"


@option_group("Sources")
class SourceOptions:
    """Source checkpoints of the modules."""

    base: Annotated[
        Path,
        typer.Option(help="The base checkpoint, a directory or owner/name on the hub: source of all other modules."),
    ]
    fp8: Annotated[
        Path | None,
        typer.Option(
            help="The official FP8 checkpoint; source of the shared experts unless --shared sets another format."
        ),
    ] = None
    mtp_from: Annotated[Path | None, typer.Option(help="The checkpoint to take the MTP head from.")] = None

    def opened(self, recipe: "Recipe") -> "BuildSources":
        """The opened sources. Those beside the base need no more than what `recipe` takes from them."""
        from onebox.checkpoint.hub import resolve_source
        from onebox.checkpoint.recipe import BuildSource, BuildSources, classes_used, open_source

        def opened(role: str, given: Path) -> BuildSource:
            has = {"has_fp8": self.fp8 is not None, "has_mtp_source": self.mtp_from is not None}
            uses = classes_used(recipe, role, **has)
            return open_source(role, resolve_source(given, None if role == "base" else uses), uses)

        return BuildSources(
            base=opened("base", self.base),
            fp8=opened("fp8", self.fp8) if self.fp8 else None,
            mtp=opened("mtp", self.mtp_from) if self.mtp_from else None,
        )


@option_group("Formats")
class FormatOptions:
    """The format of each module class in the output."""

    lm_head: Annotated[str, typer.Option(help="LM head: keep, bf16 or int8.")] = "keep"
    experts: Annotated[str, typer.Option(help=f"Routed experts: {_EXPERT_FORMAT}.")] = "keep"
    experts_down: Annotated[
        str | None,
        typer.Option(help="Their down projections, if different from --experts: int4, int3 or int2 beside another."),
    ] = None
    expert_layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Routed experts of some layers, if different: 0-3,44-47=int4, or '8 of FILE=int4' for the 8 layers "
            "with the largest numbers of a JSON file (layer: number). Repeatable.",
        ),
    ] = None
    attention: Annotated[str, typer.Option(help=f"Attention and DeltaNet projections: {_FORMAT}.")] = "keep"
    delta: Annotated[str | None, typer.Option(help="DeltaNet projections, if different from --attention.")] = None
    shared: Annotated[
        str | None, typer.Option(help=f"Shared experts: {_FORMAT}; default fp8 with --fp8, else keep.")
    ] = None
    mtp: Annotated[
        str,
        typer.Option(
            help=f"The MTP layer's experts and projections: auto, {_FORMAT}. auto quantises BF16 ones as the model's "
            "own layers are; keep leaves them."
        ),
    ] = "auto"

    def recipe(self, *, has_fp8: bool) -> "Recipe":
        from onebox.checkpoint.layer_targets import parse_layer_target
        from onebox.checkpoint.recipe import Recipe, TargetFormat

        given = {
            "experts": _target("--experts", self.experts),
            "experts_down": _target("--experts-down", self.experts_down) if self.experts_down else None,
            "expert_layers": tuple(parse_layer_target(text) for text in self.expert_layers or ()),
            "attention": _target("--attention", self.attention),
            "delta": _target("--delta", self.delta) if self.delta else None,
            "shared": _target("--shared", self.shared) if self.shared else None,
            "mtp": _target("--mtp", self.mtp, tuple(TargetFormat)),
            "lm_head": _target("--lm-head", self.lm_head, ("keep", "bf16", "int8")),
        }
        return Recipe.completed({name: target for name, target in given.items() if target}, has_fp8=has_fp8)


def _target(flag: str, value: str, allowed: Sequence[str] = ()) -> "TargetFormat":
    from onebox.checkpoint.recipe import FORMATS, TargetFormat

    allowed = allowed or FORMATS
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=flag)
    return TargetFormat(value)


@grouped
def build(
    sources: SourceOptions,
    formats: FormatOptions,
    out: Annotated[Path, typer.Option(help="The output directory.")],
    draft_vocab: Annotated[
        str,
        typer.Option(
            metavar="keep|none|FILE",
            help="Tokens that the MTP head drafts from: keep (the list of the head's source, if it has one), none, or "
            "a file of token ids, one a line, such as `onebox draft-vocab` writes.",
        ),
    ] = "keep",
    drafter: Annotated[
        str | None,
        typer.Option(help="The matrices of a DFlash drafter, where --base is one: keep, bf16, fp8 or int4."),
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="Size of an output file in GiB.")] = DEFAULT_SHARD_GIB,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the planned output with sizes, and exit.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the files of an earlier, interrupted build.")
    ] = False,
) -> None:
    """Build one verified checkpoint from others. Values whose format does not change are copied bit for bit.

    An interrupted build leaves no partial output; running the same command again resumes it.
    """
    from onebox.checkpoint.build import plan_build, run_build
    from onebox.checkpoint.drafter import is_drafter
    from onebox.cli.build_drafter import build_drafter, refuse_model_options
    from onebox.spec.errors import UsageError

    if is_drafter(sources.base):
        refuse_model_options(sources, formats, draft_vocab, shard_gib)
        build_drafter(sources.base, _target("--drafter", drafter or "keep"), out, dry_run=dry_run)
        return
    if drafter is not None:
        raise UsageError(f"--drafter has nothing to act on: {sources.base} is no DFlash drafter; give one as --base.")
    recipe = formats.recipe(has_fp8=sources.fp8 is not None)
    if shard_gib <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--shard-gib")
    opened = sources.opened(recipe)
    listed = _draft_vocab(draft_vocab, opened.base.checkpoint.spec.vocab_size)
    plan = plan_build(recipe, opened, int(shard_gib * 2**30), listed)
    print_plan(plan, out)
    if dry_run:
        return
    with byte_progress("building", plan.nbytes) as on_bytes:
        manifest = run_build(plan, out, restart=restart, on_bytes=on_bytes)
    typer.echo(f"{out}: {len(manifest.tensors):,} tensors, {plan.nbytes / 1e9:.2f} GB, each with its sha256.")


def _draft_vocab(given: str, vocab_size: int) -> list[int] | None:
    """The tokens of a file; None: as in the source, empty: none."""
    from onebox.spec.token_counts import read_token_list

    if given in ("keep", "none"):
        return None if given == "keep" else []
    try:
        return read_token_list(Path(given), vocab_size)
    except FileNotFoundError:
        raise typer.BadParameter(
            f"{given} is neither keep nor none, and there is no such file", param_hint="--draft-vocab"
        ) from None


def print_plan(plan: "BuildPlan", out: Path) -> None:
    from rich.console import Console

    from onebox.checkpoint.match import shares_norms
    from onebox.checkpoint.stock import stock_limits
    from onebox.spec.traffic import class_step_bytes

    sizes = plan.class_bytes
    step = class_step_bytes(plan.sources.base.checkpoint.spec, sizes)
    console = Console(soft_wrap=True)
    console.print(_plan_table(plan, sizes, step))
    before = sum(entry.nbytes for entry in plan.sources.base.checkpoint.tensors.values())
    plain = sum(size for kind, size in step.items() if not kind.in_mtp)
    described = "the base's own quantization_config" if plan.is_native else "a compressed-tensors quantization_config"
    if "quantization_config" not in plan.config:
        described = "no quantization_config"
    console.print(
        f"{out}: {plan.nbytes / 1e9:.2f} GB in {len(plan.shards)} files (base {before / 1e9:.2f} GB), "
        f"{plain / 1e9:.3f} GB of weights read per token in plain decoding; {described}.",
        highlight=False,
    )
    formats = ((choice.module.module_class, choice.target) for choice in plan.choices)
    for limit in stock_limits(plan.config.get("quantization_config"), formats):
        console.print(f"note: {limit} onebox reads it.", highlight=False)
    for source in plan.sources.all():
        if not any(choice.source is source for choice in plan.choices):
            console.print(
                f"The {source.role} checkpoint {source.checkpoint.directory} gives no module of this build.",
                highlight=False,
            )
        if not shares_norms(plan.sources.base, source):
            console.print(
                f"The {source.role} checkpoint {source.checkpoint.directory} shares no norm with the base: only "
                "their configs tell that they are one model.",
                highlight=False,
            )
    if plan.draft_vocab:
        console.print(f"The MTP head drafts from {len(plan.draft_vocab):,} listed tokens.", highlight=False)
    if not any(unit.module_class.in_mtp for unit in plan.units):
        console.print("The output has no MTP head: give a source with --mtp-from.", highlight=False)


def _plan_table(plan: "BuildPlan", sizes: "dict[Any, int]", step: "dict[Any, int]") -> Any:
    from collections import Counter

    from rich.table import Table

    ways: dict[Any, Counter[str]] = {}
    for choice in plan.choices:
        origin = f"from {choice.source.role}"
        before, after = str(choice.bound.stored), str(choice.target)
        way = f"{after} {origin}" if before == after else f"{before} -> {after} {origin}"
        ways.setdefault(choice.module.module_class, Counter())[way] += 1
    actions: dict[Any, set[str]] = {}
    for unit in plan.units:
        actions.setdefault(unit.module_class, set()).add(unit.action.value)
    table = Table("module class", "conversion", "how", "GB", "MB a step", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for kind, counts in ways.items():
        for number, way in enumerate(sorted(counts)):
            first = number == 0
            table.add_row(
                kind.value if first else "",
                way.replace("[", r"\["),
                ", ".join(sorted(actions[kind])) if first else "",
                f"{sizes[kind] / 1e9:.3f}" if first else "",
                f"{step[kind] / 1e6:,.1f}" if first else "",
            )
    return table
