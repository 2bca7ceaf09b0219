"""From a checkpoint to a running engine: plan the memory, load the weights, allocate what was planned, start.

The plan comes first and needs only headers, so that what does not fit is refused before anything is read.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from onebox.engine.api import Engine
from onebox.engine.config import PAGE_TOKENS, EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.options import EngineOptions, Vocabulary
from onebox.engine.runner import ModelRunner
from onebox.model.footprint import Footprint, footprint
from onebox.model.load import LoadFormat, load_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.vision import load_tower
from onebox.planner.memory import MemoryPlan, MemoryRequest, plan_memory
from onebox.spec.errors import UnsupportedError, UsageError
from onebox.spec.hardware import GIB, Box, detect_box
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec

__all__ = [
    "EngineOptions",
    "EnginePlan",
    "Vocabulary",
    "allocate_memory",
    "load_runner",
    "plan_engine",
    "start_engine",
]

DEFAULT_DRAFTS = 4
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
DEFAULT_CPU_CACHE_BYTES = 1 * GIB
"""Small models run on a CPU, beside everything else on the machine: their cache does not take all of its memory."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class EnginePlan:
    """Everything that is decided before loading."""

    directory: Path
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    load_format: LoadFormat
    memory: MemoryPlan
    config: EngineConfig

    @property
    def memory_shape(self) -> MemoryShape:
        """Page 0 is scratch, beside those that sequences and prefixes own."""
        return MemoryShape(
            kv=self.memory.request.kv,
            num_pages=self.config.num_pages + 1,
            num_slots=self.config.max_num_seqs,
            num_checkpoints=self.config.num_checkpoints,
            max_pending=self.config.rows_per_sequence,
            with_mtp=self.config.speculation.with_mtp,
        )


def plan_engine(directory: Path, options: EngineOptions, vocabulary: Vocabulary, box: Box | None = None) -> EnginePlan:
    """What the engine will be like on this machine, or on `box`; refuses with a table what does not fit."""
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    load_format = LoadFormat.parse(options.load_format)
    found = footprint(directory, device, dtype, load_format)
    speculation = _speculation(options, found)
    batched = options.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    cache_bytes = options.kv_cache_memory_bytes
    if cache_bytes is None and device.type == "cpu":
        cache_bytes = DEFAULT_CPU_CACHE_BYTES
    request = MemoryRequest(
        max_context_tokens=options.max_model_len or found.spec.max_position_embeddings,
        slots=options.max_num_seqs,
        kv=KVFormat.parse(options.kv_cache_dtype),
        drafts=speculation.max_drafts,
        drafts_with_mtp=speculation.with_mtp,
        gpu_memory_utilization=options.gpu_memory_utilization,
        page_tokens=PAGE_TOKENS,
        max_batched_tokens=batched,
        with_vision=found.has_tower and not options.language_model_only,
        activation_bytes=dtype.itemsize,
        cache_bytes=cache_bytes,
        with_prefix_cache=options.enable_prefix_caching,
    )
    memory = plan_memory(found.spec, found.weight_bytes, box or detect_box(), request)
    config = EngineConfig(
        max_model_len=request.max_context_tokens,
        num_pages=memory.num_pages,
        num_checkpoints=memory.num_checkpoints,
        max_num_seqs=options.max_num_seqs,
        max_num_waiting=options.max_num_waiting,
        max_num_batched_tokens=batched,
        eos_token_ids=vocabulary.eos_token_ids,
        boundary_token_ids=vocabulary.boundary_token_ids,
        speculation=speculation,
    )
    return EnginePlan(directory, found.spec, device, dtype, load_format, memory, config)


def start_engine(plan: EnginePlan, vocabulary: Vocabulary) -> Engine:
    """Loads and allocates what was planned, and starts."""
    return Engine(load_runner(plan), plan.config, vocabulary.table)


def load_runner(plan: EnginePlan) -> ModelRunner:
    """The weights read and the memory allocated, as planned."""
    with_mtp = plan.config.speculation.with_mtp
    model = load_model(plan.directory, plan.device, plan.dtype, plan.load_format, with_mtp=with_mtp)
    tower = load_tower(plan.directory, plan.dtype, plan.device) if plan.memory.request.with_vision else None
    return ModelRunner(model, allocate_memory(plan), plan.config, tower)


def allocate_memory(plan: EnginePlan) -> Memory:
    """The slots, checkpoints and pages that the plan names."""
    with torch.inference_mode():
        return Memory.allocate(plan.spec, plan.memory_shape, plan.dtype, plan.device)


def _device(asked: str) -> torch.device:
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r} is not known; give auto, cuda or cpu.")
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise UnsupportedError("--device cuda was asked for, but torch finds no CUDA device here; give cpu or auto.")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")


def _dtype(asked: str, device: torch.device) -> torch.dtype:
    """Activations: bfloat16 where products of bfloat16 are the faster ones, float32 on other CPUs."""
    if asked == "auto":
        is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if is_fast else torch.float32
    if asked not in _DTYPES:
        raise UsageError(f"--dtype {asked!r} is not known; give auto, {' or '.join(_DTYPES)}.")
    return _DTYPES[asked]


def _speculation(options: EngineOptions, found: Footprint) -> SpeculationConfig:
    """As asked; else `auto` where the model has a head to draft with, and plain decoding where it has none."""
    default = SpeculationMethod.AUTO if found.has_mtp else SpeculationMethod.NONE
    try:
        method = default if options.speculation is None else SpeculationMethod(options.speculation)
    except ValueError:
        known = ", ".join(SpeculationMethod)
        raise UsageError(f"Speculation by {options.speculation!r} is not known; give one of {known}.") from None
    if method is SpeculationMethod.MTP and not found.has_mtp:
        raise UsageError("Speculation by mtp was asked for, but the checkpoint has no MTP head; give ngram or none.")
    drafts = 0 if method is SpeculationMethod.NONE else options.num_speculative_tokens or DEFAULT_DRAFTS
    return SpeculationConfig(method, drafts, found.has_mtp, options.synthetic_acceptance)
