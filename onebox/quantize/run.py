"""`onebox quantize`: plans a calibrated build, calibrates block by block, and builds with what was found."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.checkpoint.build import BuildPlan, finished_build, plan_build, run_build
from onebox.checkpoint.calibrated import Calibration
from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.manifest import Manifest
from onebox.checkpoint.output import build_lock, output_directory
from onebox.checkpoint.recipe import BuildSources, ModuleChoice, Recipe
from onebox.checkpoint.rounding import SharedScale, shared_scales
from onebox.checkpoint.tensors import load
from onebox.model.reference import WeightScope, mtp_input, zero_centred_norm
from onebox.quantize.block_tuning import BlockTuning, Streams
from onebox.quantize.blocks import Block, BlockWeights, blocks_of, built_weight, weights_of
from onebox.quantize.documents import CalibrationText, CalibrationTokens
from onebox.quantize.memory import CalibrationMemory, calibration_memory
from onebox.quantize.row_errors import PredictionErrors, RelativeSquares, RowErrors
from onebox.quantize.settings import CalibrationSettings
from onebox.quantize.sign_round import library_version
from onebox.quantize.work import CalibrationWork
from onebox.spec.errors import UnreadableError, UsageError
from onebox.spec.hardware import available_memory_bytes
from onebox.spec.model import ModelSpec
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

__all__ = ["QuantizePlan", "build_calibrated", "calibrate", "plan_quantize"]

_REVISION = "2"
"""Of what calibration does: blocks of two revisions do not go together. Grows when other bytes would come out."""


@dataclass(frozen=True)
class QuantizePlan:
    """Everything that is known before the first block is calibrated."""

    build: BuildPlan
    """As it would be if every matrix were rounded to nearest: the same tensors and sizes."""
    tokens: CalibrationTokens
    settings: CalibrationSettings
    device: torch.device
    shard_bytes: int

    @property
    def spec(self) -> ModelSpec:
        return self.build.sources.base.checkpoint.spec

    @cached_property
    def blocks(self) -> list[Block]:
        return blocks_of(self.spec, self.build.choices)

    @property
    def num_sequences(self) -> int:
        return len(self.tokens.token_ids)

    @property
    def memory(self) -> CalibrationMemory:
        return calibration_memory(self.spec, self.blocks, self.num_sequences, self.settings)

    def num_steps(self, blocks: list[Block]) -> int:
        """Tuning steps of these blocks."""
        at_once = self.settings.experts_at_once
        groups = (bool(block.mixer_tuned) + -(-len(block.branches_tuned) // at_once) for block in blocks)
        return self.settings.num_steps * sum(groups)


def plan_quantize(
    recipe: Recipe,
    sources: BuildSources,
    text: CalibrationText,
    settings: CalibrationSettings,
    device: torch.device,
    shard_bytes: int,
) -> QuantizePlan:
    """Plans the build and reads the text. Refuses a recipe that has nothing to calibrate."""
    inputs = {
        "calibration": json.dumps(asdict(settings)),
        "calibration revision": _REVISION,
        "calibration text": hashlib.sha256(json.dumps(text.digests, sort_keys=True).encode()).hexdigest(),
        "auto-round": library_version(),
        "torch": torch.__version__,
        "device": device.type,
    }
    build = plan_build(recipe, sources, shard_bytes, calibration=Calibration(inputs))
    base = sources.base.checkpoint.directory
    template = None
    with suppress(UnreadableError):
        template = ChatTemplate.load(base)
    plan = QuantizePlan(build, text.tokens(Tokenizer.load(base), template, settings), settings, device, shard_bytes)
    if not plan.num_steps(plan.blocks):
        raise UsageError(
            "The recipe rounds no matrix of the blocks to FP8 or to integers in groups, so there is nothing to "
            "calibrate: give --experts int4 or another such format, or use `onebox build`."
        )
    return plan


def calibrate(
    plan: QuantizePlan, out: Path, *, restart: bool = False, on_step: Callable[[int], None] = lambda _: None
) -> BuildPlan:
    """Calibrates all blocks for a build to `out` and returns the plan of that build.

    Goes on where an earlier run was stopped; `restart` discards what that left. `on_step` is called with numbers of
    tuning steps. Nothing is calibrated if `out` is complete.
    """
    real = output_directory(out)
    if finished_build(plan.build, real) is not None:
        on_step(plan.num_steps(plan.blocks))
        return plan.build
    work = CalibrationWork(real)
    with build_lock(work.path):
        work.open(plan.build.inputs, restart=restart)
        _calibrate(plan, work, on_step)
    inputs = plan.build.calibration.inputs if plan.build.calibration else {}
    found = Calibration(inputs, work.tensors(), [_rounded_figures(report) for report in work.reports()])
    return plan_build(plan.build.recipe, plan.build.sources, plan.shard_bytes, calibration=found)


def build_calibrated(
    build: BuildPlan, out: Path, *, restart: bool = False, on_bytes: Callable[[int], None] = lambda _: None
) -> Manifest:
    """Runs the build that `calibrate` planned and removes the calibration's files."""
    manifest = run_build(build, out, restart=restart, on_bytes=on_bytes)
    CalibrationWork(output_directory(out)).remove()
    return manifest


def _rounded_figures(report: dict[str, Any]) -> dict[str, object]:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in report.items()}


def _calibrate(plan: QuantizePlan, work: CalibrationWork, on_step: Callable[[int], None]) -> None:
    """Calibrates the blocks that are not finished."""
    done = work.num_done
    on_step(plan.num_steps(plan.blocks[:done]))
    if done == len(plan.blocks):
        return
    _require_room(plan, work)
    scales = shared_scales(plan.build.choices)
    streams = _first_streams(plan) if done == 0 else work.load_streams(done, _stream_shape(plan))
    for number, block in enumerate(plan.blocks[done:], start=done):
        if block.in_mtp:
            streams = _mtp_streams(plan, streams)
        # Of its own for each block: a run that goes on draws what one that was not stopped draws.
        generator = torch.Generator().manual_seed(plan.settings.seed * 100_003 + number)
        weights = BlockWeights(block, scales, plan.device)
        tuning = BlockTuning(
            plan.spec,
            weights,
            streams,
            plan.tokens.num_tuned_on,
            plan.settings,
            generator,
            _errors_behind(plan, number, scales),
            lambda: on_step(1),
        )
        report = tuning.run()
        is_last = number + 1 == len(plan.blocks)
        work.finish_block(number, tuning.tensors, report, None if is_last else streams)
        on_step(plan.num_steps([block]) - tuning.num_steps)


def _errors_behind(plan: QuantizePlan, number: int, scales: dict[str, SharedScale]) -> RowErrors:
    """How errors behind block `number` count: by the predictions if the head is what reads the stream there."""
    block, following = plan.blocks[number], plan.blocks[number + 1 : number + 2]
    if any(other.in_mtp == block.in_mtp for other in following):
        return RelativeSquares()
    head_name = f"{plan.spec.text_prefix}embed_tokens" if plan.spec.tie_word_embeddings else "lm_head"
    norm = _choices(plan, "mtp.norm" if block.in_mtp else f"{plan.spec.text_prefix}norm")
    (head,) = _choices(plan, head_name)
    own_norm, source_head = weights_of([*norm, head], plan.device).values()
    built_head = built_weight(head, scales.get(head_name), plan.device)
    return PredictionErrors(own_norm, plan.spec.rms_norm_eps, source_head, built_head)


def _require_room(plan: QuantizePlan, work: CalibrationWork) -> None:
    free = torch.cuda.mem_get_info(plan.device)[0] if plan.device.type == "cuda" else None
    plan.memory.require(available_memory_bytes(), free)
    require_disk("The calibration", work.path, plan.memory.disk_bytes)


def _stream_shape(plan: QuantizePlan) -> tuple[int, int, int]:
    return (*plan.tokens.token_ids.shape, plan.spec.hidden_size)


def _first_streams(plan: QuantizePlan) -> Streams:
    rows = _embedded(plan, plan.tokens.token_ids)
    return Streams(rows, rows.clone())


def _embedded(plan: QuantizePlan, token_ids: Tensor) -> Tensor:
    """Embeddings float32 [sequences, tokens, hidden]."""
    (choice,) = _choices(plan, f"{plan.spec.text_prefix}embed_tokens")
    return load(choice.bound.tensors["weight"])[token_ids].to(torch.float32)


def _choices(plan: QuantizePlan, *names: str) -> list[ModuleChoice]:
    return [choice for choice in plan.build.choices if choice.module.name in names]


def _mtp_streams(plan: QuantizePlan, behind: Streams) -> Streams:
    """The streams before the MTP head's layer: the hidden states behind the last layer with the tokens after them."""
    (norm,) = weights_of(_choices(plan, f"{plan.spec.text_prefix}norm"), plan.device).values()
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
    w = WeightScope(weights_of(_choices(plan, *names), plan.device), "mtp")
    embedded = _embedded(plan, plan.tokens.token_ids[:, 1:])

    def before(stream: Tensor) -> Tensor:
        out = torch.empty_like(embedded)
        for sequence, x, tokens in zip(out, stream, embedded, strict=True):
            hidden = zero_centred_norm(x[:-1].to(plan.device), norm, plan.spec.rms_norm_eps)
            sequence.copy_(mtp_input(plan.spec, w, tokens.to(plan.device), hidden))
        return out

    with torch.no_grad():
        return Streams(before(behind.source), before(behind.built))
