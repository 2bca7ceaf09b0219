"""`onebox plan`: what fits on a box and its projected speed, before downloading or loading a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.options import grouped, json_option, option_group
from onebox.cli.settings import configurable
from onebox.cli.shared_options import (
    DraftVocab,
    HfOverrides,
    KVCacheDtype,
    LanguageModelOnly,
    LMHead,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryUtilization,
    MtpFormat,
    StateCacheDtype,
    chosen_utilization,
)
from onebox.cli.vllm_flags import own_kv_name
from onebox.spec.conversion import AS_STORED, CONVERSION_BYTES, LoadConversion
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.planner.report import Weights
    from onebox.spec.block_drafter import BlockDrafter
    from onebox.spec.hardware import Box
    from onebox.spec.model import ModelSpec

__all__ = ["DEFAULT_CONTEXT_TOKENS", "CapacityOptions", "plan", "planned_weights"]

GIB = 1024**3
WIDTH = 100
DEFAULT_CONTEXT_TOKENS = 8192


@option_group("Memory")
class CapacityOptions:
    """Memory settings."""

    kv_cache_dtype: KVCacheDtype = "auto"
    mamba_ssm_cache_dtype: StateCacheDtype = "auto"
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = 8
    max_num_batched_tokens: MaxNumBatchedTokens = None
    gpu_memory_utilization: MemoryUtilization = None
    reserve_gib: Annotated[
        float | None, typer.Option(help="GiB left to the OS, instead of --gpu-memory-utilization.")
    ] = None
    language_model_only: LanguageModelOnly = False

    def batched_tokens(self, box: "Box") -> int:
        """As serve would choose them on that box."""
        from onebox.planner.memory import DEFAULT_BATCHED_TOKENS, DEFAULT_HOST_BATCHED_TOKENS

        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return DEFAULT_BATCHED_TOKENS if box.compute_capability else DEFAULT_HOST_BATCHED_TOKENS

    def reserve_bytes(self) -> int | None:
        if self.reserve_gib is None:
            return None
        if self.gpu_memory_utilization is not None:
            raise UsageError("--reserve-gib and --gpu-memory-utilization set the same limit; give one of them.")
        if not 0 <= self.reserve_gib < float("inf"):
            raise UsageError(f"--reserve-gib is {self.reserve_gib}; give 0 or more.")
        return round(self.reserve_gib * GIB)


@option_group("Speed")
class SpeedOptions:
    """The workload for which speed is projected."""

    speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens drafted per step; default: as many as --acceptance has, or 12 with --drafter, or 4 where the "
            "weights have an MTP head, as serve does."
        ),
    ] = None
    acceptance: Annotated[
        str | None, typer.Option(help="Acceptance rate of each draft over all steps, such as 0.9,0.72.")
    ] = None
    tokens_per_step: Annotated[
        float | None,
        typer.Option(
            help="Instead of --acceptance: tokens of a step with all drafts, each of them equally likely to be "
            "accepted after those before it."
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A DFlash drafter's directory, or `dflash` for the published one of the 122B; it drafts instead of "
            "the MTP head."
        ),
    ] = None
    drafter_format: Annotated[
        str, typer.Option(help="The drafter as `build --drafter` would write it: keep, bf16, fp8 or int4.")
    ] = "keep"
    context: Annotated[
        int | None, typer.Option(help="Context in tokens for which speed is projected; default: 8192 or the longest.")
    ] = None
    streams: Annotated[int, typer.Option(help="Sequences decoded at once for which speed is projected.")] = 1
    draft_vocab: DraftVocab = "auto"
    disk_gb_per_second: Annotated[
        float, typer.Option(help="The disk's reading speed, for prefixes that `serve --prefix-dir` keeps there.")
    ] = 5.0

    def draft_vocab_size(self, vocab_size: int) -> int | None:
        """None: all tokens."""
        from onebox.spec.draft_vocab import parse_draft_vocab
        from onebox.spec.token_counts import read_token_list

        listed = Path(self.draft_vocab)
        if not self.draft_vocab.isdecimal() and listed.is_file():
            return len(read_token_list(listed, vocab_size))
        return parse_draft_vocab(self.draft_vocab, vocab_size)

    def disk_bytes_per_second(self) -> float:
        if not 0 < self.disk_gb_per_second < float("inf"):
            raise UsageError(f"--disk-gb-per-second is {self.disk_gb_per_second}; give a number above 0.")
        return self.disk_gb_per_second * 1e9

    def accepted(self, drafts: int | None) -> tuple[float, ...] | None:
        """The curve of so many drafts; of as many as --acceptance has for None."""
        from onebox.planner.depths import constant_acceptance
        from onebox.planner.roofline import parse_acceptance

        if self.tokens_per_step is None:
            return None if self.acceptance is None else parse_acceptance(self.acceptance, drafts)
        if self.acceptance is not None:
            raise UsageError("--tokens-per-step and --acceptance say the same; give one of them.")
        if drafts is None or not 1 <= self.tokens_per_step <= 1 + drafts:
            most = "1 plus --speculative-tokens" if drafts is None else f"{1 + drafts}"
            raise UsageError(f"--tokens-per-step is {self.tokens_per_step:g}; give 1 to {most}.")
        return constant_acceptance(self.tokens_per_step, drafts)

    def block_drafter(self, spec: "ModelSpec") -> "BlockDrafter | None":
        """The drafter that --drafter names, in the format that --drafter-format asks for."""
        from onebox.checkpoint.drafter_inspect import inspect_drafter
        from onebox.planner.presets import WRITTEN_PACKINGS
        from onebox.spec.block_drafter import BlockDrafter
        from onebox.spec.dflash import refuse_other_target
        from onebox.spec.dflash_config import drafter_from_config
        from onebox.spec.dflash_shapes import DFLASH_122B
        from onebox.spec.weights import WeightFormat

        if self.drafter_format not in ("keep", "bf16", "fp8", "int4"):
            raise UsageError(f"--drafter-format {self.drafter_format!r} is not known; give keep, bf16, fp8 or int4.")
        if self.drafter is None:
            if self.drafter_format != "keep":
                raise UsageError("--drafter-format has nothing to act on: give --drafter.")
            return None
        if self.drafter == "dflash":
            published = drafter_from_config(DFLASH_122B)
            loaded = BlockDrafter.predicted(published, WeightFormat.BF16, WRITTEN_PACKINGS)
        else:
            loaded = inspect_drafter(Path(self.drafter)).loaded
        refuse_other_target(loaded.spec, spec)
        if self.drafter_format == "keep":
            return loaded
        return BlockDrafter.predicted(loaded.spec, WeightFormat(self.drafter_format), WRITTEN_PACKINGS)

    def drafts(self, weights: "Weights", drafter: "BlockDrafter | None") -> int:
        from onebox.planner.memory import DEFAULT_DRAFTS
        from onebox.spec.block_drafter import DEFAULT_BLOCK_DRAFTS
        from onebox.spec.modules import ModuleClass

        if self.speculative_tokens is not None:
            return self.speculative_tokens
        accepted = self.accepted(None) if self.tokens_per_step is None else None
        if accepted is not None:
            return len(accepted)
        if drafter is not None:
            return min(DEFAULT_BLOCK_DRAFTS, drafter.spec.max_drafts)
        return DEFAULT_DRAFTS if weights.stored.get(ModuleClass.MTP_EXPERTS) else 0


@configurable
@grouped
def plan(
    memory: CapacityOptions,
    speed: SpeedOptions,
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint directory, a repository on the hub, or a known model such as qwen3.5-122b-a10b."
        ),
    ],
    box: Annotated[str, typer.Option(help="dgx-spark, h200, or auto for this machine.")] = "dgx-spark",
    weights: Annotated[
        str | None, typer.Option(help="Formats to assume for a model by name: hybrid, autoround-int4, nvfp4, ...")
    ] = None,
    hf_overrides: HfOverrides = "{}",
    lm_head: LMHead = "keep",
    mtp_format: MtpFormat = "keep",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what fits on a box and its projected speed. Computed from bytes; nothing is loaded or measured."""
    from onebox.planner.memory import MemoryRequest
    from onebox.planner.report import make_report, to_json
    from onebox.planner.roofline import Workload
    from onebox.spec.hardware import named_box
    from onebox.spec.kv import KVFormat
    from onebox.spec.states import StateDtype

    kv, chosen_box = KVFormat.parse(own_kv_name(memory.kv_cache_dtype)), named_box(box)
    conversion = LoadConversion.parse(lm_head, mtp_format)
    planned = planned_weights(model, weights, json_option("--hf-overrides", hf_overrides, dict), conversion)
    longest = planned.spec.max_context_tokens if memory.max_model_len is None else memory.max_model_len
    drafter = speed.block_drafter(planned.spec)
    drafts = speed.drafts(planned, drafter)
    accepted = speed.accepted(drafts)
    request = MemoryRequest(
        max_context_tokens=longest,
        slots=memory.max_num_seqs,
        kv=kv,
        drafts=drafts,
        drafter=drafter.spec if drafter else None,
        drafter_bytes=drafter.loaded_bytes if drafter else 0,
        max_batched_tokens=memory.batched_tokens(chosen_box),
        gpu_memory_utilization=chosen_utilization(memory.gpu_memory_utilization),
        reserve_bytes=memory.reserve_bytes(),
        with_vision=not memory.language_model_only,
        loading_bytes=CONVERSION_BYTES if conversion else 0,
        state_dtype=StateDtype.parse(memory.mamba_ssm_cache_dtype),
        draft_vocab_size=speed.draft_vocab_size(planned.spec.vocab_size),
    )
    workload = Workload(
        streams=speed.streams,
        drafts=drafts,
        context_tokens=min(DEFAULT_CONTEXT_TOKENS, longest) if speed.context is None else speed.context,
        acceptance=accepted,
        state_dtype=request.state_dtype,
        draft_vocab_size=request.draft_vocab_size,
        drafter=drafter,
    )
    report = make_report(planned, chosen_box, request, workload, speed.disk_bytes_per_second())
    if as_json:
        echo_json(to_json(report), indent=2)
        return
    from rich.console import Console

    from onebox.cli.plan_view import render

    console = Console(width=WIDTH) if not Console().is_terminal else Console()
    for renderable in render(report):
        console.print(renderable)


def planned_weights(
    model: str,
    preset: str | None,
    overrides: Mapping[str, Any] | None = None,
    conversion: LoadConversion = AS_STORED,
) -> "Weights":
    from onebox.planner.presets import named_preset
    from onebox.planner.report import Weights
    from onebox.spec.shapes import named_spec

    if Path(model).is_dir() or _is_repository(model, preset):
        if preset is not None:
            raise UsageError(
                f"--weights {preset} is for a model by name; the directory {model} has weights of its own."
            )
        return _inspected(model, overrides, conversion)
    spec = named_spec(model, overrides)
    chosen = named_preset("hybrid" if preset is None else preset)
    source = f"{chosen.name} (predicted): {chosen.summary}{_converted(conversion)}"
    stored = chosen.weight_bytes(spec, conversion)
    return Weights(model, source, spec, stored, label=chosen.name, formats=chosen.format_names(conversion))


def _is_repository(model: str, preset: str | None) -> bool:
    """Whether `model` is meant as a checkpoint on the hub: one that is also known by name is, if it lies here."""
    from onebox.checkpoint.hub import find_source
    from onebox.spec.shapes import is_known

    if "/" not in model or preset is not None:
        return False
    return not is_known(model) or find_source(model) is not None


def _inspected(source: str, overrides: Mapping[str, Any] | None, conversion: LoadConversion) -> "Weights":
    from onebox.checkpoint.hub import find_source, inspect_remote
    from onebox.checkpoint.inspect import inspect_checkpoint
    from onebox.planner.report import Weights
    from onebox.spec.model import read_config

    here = find_source(source)
    if here is None:
        found = inspect_remote(source, overrides, conversion=conversion)
    else:
        found = inspect_checkpoint(here, conversion=conversion)
    spec = found.spec if here is None else read_config(here, overrides)
    problems = tuple(problem.message for problem in found.problems)
    origin = f"{found.directory} (read from its headers{_converted(conversion)})"
    return Weights(Path(source).name, origin, spec, found.class_bytes, problems, formats=found.class_formats)


def _converted(conversion: LoadConversion) -> str:
    flags = list(dict.fromkeys(conversion.flags.values()))
    return f"; converted while loading: {', '.join(flags)}" if flags else ""
