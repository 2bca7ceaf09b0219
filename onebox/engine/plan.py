"""What an engine will be: its options, the model it finds, and the memory plan, all before anything is loaded.

The plan reads only headers, so that what does not fit is refused first. Options cross a process boundary. Torch is
imported where a plan is made: a process that only asks another one for an engine never loads it.
"""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebox.engine.config import MAX_DRAFTS, EngineConfig, PrefixDiskConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.draft.drafter_start import DrafterPlan, check_block_drafts, default_drafts, plan_drafter
from onebox.engine.draft.vocabulary_start import (
    DraftVocabPlan,
    foreseen_draft_vocab_size,
    plan_draft_vocab,
)
from onebox.planner.memory import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_HOST_BATCHED_TOKENS,
    DEFAULT_SEQUENCES,
    DEFAULT_UTILIZATION,
    MemoryPlan,
    MemoryRequest,
    kept_row_bytes,
    plan_memory,
)
from onebox.spec.conversion import CONVERSION_BYTES, LoadConversion
from onebox.spec.dflash_memory import ring_tokens
from onebox.spec.errors import UnsupportedError, UsageError
from onebox.spec.hardware import GIB, MIB, Box, detect_box, detect_host, nvidia_driver
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.prefix_place import prefix_directory
from onebox.spec.states import StateDtype
from onebox.spec.torch_build import TorchBuild, refuse_unusable_torch
from onebox.spec.vocabulary import TokenTable

if TYPE_CHECKING:
    import torch

    from onebox.model.footprint import Footprint
    from onebox.model.load import LoadFormat
    from onebox.model.memory import MemoryShape

__all__ = [
    "EngineOptions",
    "EnginePlan",
    "TokenInfo",
    "check_torch",
    "foresee_memory",
    "plan_engine",
    "prefix_disk",
]

_log = logging.getLogger(__name__)

_BATCHED_TOKENS = {"cpu": DEFAULT_HOST_BATCHED_TOKENS, "cuda": DEFAULT_BATCHED_TOKENS}
_MOST_KEPT_ROWS, _KEPT_BYTES = 64 * (1 + MAX_DRAFTS), 16 * MIB
"""Of a slot, on a CPU: sixty-four of the largest steps, more than most answers take. What is not written when an answer
ends is never written."""
_ANSWER_WAIT_S = 0.05
"""A reader does not notice; less would cost throughput, since each step reads the weights once."""
DEFAULT_CPU_CACHE_BYTES = 1 * GIB
"""Small models run on a CPU beside everything else on the machine, so their cache does not take all of its memory."""
DEFAULT_PREFIX_DISK_BYTES = 200 * 10**9
_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class EngineOptions:
    """What a user may ask for, named as on the command line; None and auto leave the choice to onebox."""

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    lm_head: str = "keep"
    """keep or int8: a BF16 LM head is converted while it is loaded."""
    mtp_format: str = "keep"
    """keep, int4 or fp8: a BF16 MTP layer is converted while it is loaded."""
    kv_cache_dtype: str = "bf16"
    mamba_ssm_cache_dtype: str = "auto"
    """How DeltaNet states are stored: float32, bfloat16, float16, or auto."""
    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_SEQUENCES
    max_num_waiting: int = 64
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    prefix_dir: str | Path | None = None
    """Where prefixes are kept on disk: a path, or `auto`; None and `none`: in memory only."""
    prefix_disk_bytes: int | None = None
    """Of the prefix directory, at most; None: 200 GB."""
    language_model_only: bool = False
    """Leaves the vision tower out, where the checkpoint has one."""
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    draft_model: str | Path | None = None
    """The directory of a DFlash drafter, for speculation by dflash or auto."""
    synthetic_acceptance: tuple[float, ...] = ()
    draft_vocab: str = "auto"
    """Tokens that the MTP head's drafts are chosen from: auto, full, a number of tokens, or a file of token ids."""
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values in place of config.json's, in vLLM's form: text_config.rope_parameters and max_position_embeddings."""


@dataclass(frozen=True)
class TokenInfo:
    """What the engine knows about tokens: which end an answer, which open a message, and the bytes of each."""

    eos_token_ids: tuple[int, ...] = ()
    boundary_token_ids: tuple[int, ...] = ()
    table: TokenTable | None = None
    added_token_ids: tuple[int, ...] = ()
    """Tokens beside those of the byte-pair vocabulary, such as <think>: the model says some of them often."""
    thinking_token_ids: tuple[int, int] | None = None
    """Those that open and close the reasoning of an answer."""


# Plan.


@dataclass(frozen=True)
class EnginePlan:
    """Everything that is decided before loading."""

    directory: Path
    spec: ModelSpec
    device: "torch.device"
    dtype: "torch.dtype"
    load_format: "LoadFormat"
    memory: MemoryPlan
    config: EngineConfig
    hf_overrides: Mapping[str, Any]
    conversion: LoadConversion
    draft_vocab: DraftVocabPlan | None = None
    drafter: DrafterPlan | None = None

    @property
    def memory_shape(self) -> "MemoryShape":
        """Page 0 is scratch, beside those that sequences and prefixes own."""
        from onebox.model.memory import MemoryShape

        return MemoryShape(
            kv=self.memory.request.kv,
            num_pages=self.config.num_pages + 1,
            num_slots=self.config.max_num_seqs,
            num_checkpoints=self.config.num_checkpoints,
            max_pending=self.config.rows_per_sequence,
            with_mtp=self.config.speculation.with_mtp,
            state_dtype=self.memory.request.state_dtype,
            drafter=self.drafter.spec if self.drafter else None,
            ring_tokens=ring_tokens(self.drafter.spec, self.config.max_num_batched_tokens) if self.drafter else 0,
            kept_rows=self.memory.request.kept_rows,
        )


def plan_engine(directory: Path, options: EngineOptions, tokens: TokenInfo, box: Box | None = None) -> EnginePlan:
    """Decides sizes and formats for this machine, or for `box`; refuses what does not fit, with a table."""
    from onebox.model.footprint import footprint

    box = box or (detect_host() if options.device == "cpu" else detect_box())
    device = _device(options.device, box)
    dtype = _dtype(options.dtype, device)
    load_format = _load_format(options.load_format)
    conversion = LoadConversion.parse(options.lm_head, options.mtp_format)
    found = footprint(directory, device, dtype, load_format, options.hf_overrides, conversion)
    drafter = plan_drafter(options, found.spec, device, dtype, load_format)
    speculation = _speculation(options, found, drafter)
    draft_vocab = plan_draft_vocab(options.draft_vocab, found, speculation, load_format)
    if draft_vocab:
        speculation = replace(speculation, draft_vocab_size=draft_vocab.size)
    if conversion.mtp and not speculation.with_mtp:
        raise UsageError(
            f"--mtp-format {conversion.mtp} has nothing to act on: drafts by {speculation.method} do not load the head."
        )
    request = _memory_request(options, found, speculation, device, dtype, drafter)
    memory = plan_memory(found.spec, found.weight_bytes, box, request)
    config = EngineConfig(
        max_model_len=request.max_context_tokens,
        num_pages=memory.num_pages,
        num_checkpoints=memory.num_checkpoints,
        max_num_seqs=options.max_num_seqs,
        max_num_waiting=options.max_num_waiting,
        max_num_batched_tokens=request.max_batched_tokens,
        max_answer_wait_s=_ANSWER_WAIT_S if device.type == "cuda" else None,
        eos_token_ids=tokens.eos_token_ids,
        boundary_token_ids=tokens.boundary_token_ids,
        thinking_token_ids=tokens.thinking_token_ids,
        speculation=speculation,
        prefix_disk=prefix_disk(options),
    )
    return EnginePlan(
        directory,
        found.spec,
        device,
        dtype,
        load_format,
        memory,
        config,
        options.hf_overrides,
        conversion,
        draft_vocab,
        drafter,
    )


def prefix_disk(options: EngineOptions) -> PrefixDiskConfig | None:
    directory = prefix_directory(options.prefix_dir)
    if directory is None:
        if options.prefix_disk_bytes is not None:
            raise UsageError("--prefix-disk-bytes has nothing to act on without --prefix-dir; give a directory.")
        return None
    if not options.enable_prefix_caching:
        raise UsageError("--prefix-dir has nothing to act on with --no-enable-prefix-caching; leave one of them out.")
    limit = DEFAULT_PREFIX_DISK_BYTES if options.prefix_disk_bytes is None else options.prefix_disk_bytes
    return PrefixDiskConfig(str(directory), limit)


def foresee_memory(
    spec: ModelSpec, class_bytes: Mapping[ModuleClass, int], options: EngineOptions, box: Box | None = None
) -> MemoryPlan:
    """The memory plan of a checkpoint that is not here yet, from the bytes that it will store per class of modules."""
    from onebox.model.footprint import expected_footprint

    box = box or (detect_host() if options.device == "cpu" else detect_box())
    device = _device(options.device, box)
    dtype = _dtype(options.dtype, device)
    found = expected_footprint(spec, class_bytes, device, dtype)
    speculation = _speculation(options, found)
    if speculation.with_mtp:
        size = foreseen_draft_vocab_size(options.draft_vocab, spec.vocab_size)
        speculation = replace(speculation, draft_vocab_size=size)
    request = _memory_request(options, found, speculation, device, dtype)
    return plan_memory(spec, found.weight_bytes, box, request)


def _memory_request(
    options: EngineOptions,
    found: "Footprint",
    speculation: SpeculationConfig,
    device: "torch.device",
    dtype: "torch.dtype",
    drafter: DrafterPlan | None = None,
) -> MemoryRequest:
    request = MemoryRequest(
        max_context_tokens=_given(options.max_model_len, found.spec.max_context_tokens),
        slots=options.max_num_seqs,
        kv=KVFormat.parse(options.kv_cache_dtype),
        drafts=speculation.max_drafts,
        drafts_with_mtp=speculation.with_mtp,
        draft_vocab_size=speculation.draft_vocab_size,
        drafter=drafter.spec if drafter else None,
        drafter_bytes=drafter.num_bytes if drafter else 0,
        gpu_memory_utilization=options.gpu_memory_utilization,
        page_tokens=PAGE_TOKENS,
        max_batched_tokens=_given(options.max_num_batched_tokens, _BATCHED_TOKENS[device.type]),
        with_vision=found.has_tower and not options.language_model_only,
        activation_bytes=dtype.itemsize,
        cache_bytes=options.kv_cache_memory_bytes,
        default_cache_bytes=DEFAULT_CPU_CACHE_BYTES if device.type == "cpu" else None,
        with_prefix_cache=options.enable_prefix_caching,
        state_dtype=StateDtype.parse(options.mamba_ssm_cache_dtype),
        loading_bytes=CONVERSION_BYTES if LoadConversion.parse(options.lm_head, options.mtp_format) else 0,
    )
    if device.type == "cpu":
        kept_rows = min(
            _MOST_KEPT_ROWS, max(1 + MAX_DRAFTS, _KEPT_BYTES // max(1, kept_row_bytes(found.spec, request)))
        )
        request = replace(request, kept_rows=kept_rows)
    if prefix_disk(options) is None:
        return request
    from onebox.engine.disk.layout import staging_bytes

    return replace(request, staging_bytes=staging_bytes(found.spec, request, device.type))


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _device(asked: str, box: Box) -> "torch.device":
    """As asked; `auto` is the GPU. A GPU in the box that torch cannot use is refused unless the CPU is asked for."""
    import torch

    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r} is not known; give auto, cuda or cpu.")
    has_cuda = torch.cuda.is_available()
    if asked != "cpu":
        check_torch(box)
    if asked == "cuda" and not has_cuda:
        raise UnsupportedError("--device cuda was asked for, but torch finds no CUDA device here; give cpu or auto.")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")


def check_torch(box: Box) -> str:
    """Refuses a torch that cannot use the GPU of `box`, with the line that installs the right one; else its version."""
    import torch

    has_device = torch.cuda.is_available()
    build = TorchBuild(
        torch.__version__,
        torch.version.cuda,
        has_device,
        tuple(torch.cuda.get_arch_list()) if has_device else (),
    )
    refuse_unusable_torch(box, nvidia_driver() if box.compute_capability else "", build)
    return build.version


def _dtype(asked: str, device: "torch.device") -> "torch.dtype":
    """Of activations: bfloat16 where the device multiplies bfloat16 faster, float32 on other CPUs."""
    import torch

    if asked == "auto":
        is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if is_fast else torch.float32
    if asked not in _DTYPES:
        raise UsageError(f"--dtype {asked!r} is not known; give auto, {' or '.join(_DTYPES)}.")
    return torch.bfloat16 if asked == "bfloat16" else torch.float32


def _load_format(asked: str) -> "LoadFormat":
    """As asked; without the fastsafetensors package, which is optional, onebox's own reader is used."""
    from onebox.model.load import LoadFormat

    load_format = LoadFormat.parse(asked)
    if load_format is LoadFormat.FASTSAFETENSORS and importlib.util.find_spec("fastsafetensors") is None:
        _log.warning(
            "the package fastsafetensors is not installed: the weights are read by onebox's own reader, which also "
            "reads ahead without mmap; `pip install fastsafetensors` for the other one"
        )
        return LoadFormat.SAFETENSORS
    return load_format


def _speculation(options: EngineOptions, found: "Footprint", drafter: DrafterPlan | None = None) -> SpeculationConfig:
    """As asked; else `auto` where the model has an MTP head, and plain decoding where it has none."""
    default = SpeculationMethod.AUTO if found.has_mtp else SpeculationMethod.NONE
    try:
        method = default if options.speculation is None else SpeculationMethod(options.speculation)
    except ValueError:
        known = ", ".join(SpeculationMethod)
        raise UsageError(f"Speculation by {options.speculation!r} is not known; give one of {known}.") from None
    if method is SpeculationMethod.MTP and not found.has_mtp:
        raise UsageError("Speculation by mtp was asked for, but the checkpoint has no MTP head; give ngram or none.")
    asked = options.num_speculative_tokens
    drafts = 0 if method is SpeculationMethod.NONE else default_drafts(drafter) if asked is None else asked
    block_size = check_block_drafts(drafter, drafts) if drafter else 0
    return SpeculationConfig(method, drafts, found.has_mtp, options.synthetic_acceptance, block_size=block_size)
