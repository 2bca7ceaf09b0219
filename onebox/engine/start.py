"""Starting an engine from a checkpoint: options, memory plan, kernels, weights, graphs, warm-up.

The plan comes first and reads only headers, so that what does not fit is refused before anything is loaded. Kernels are
compiled before the weights are loaded, while the memory that the compilers need is free. Options and
the starter cross a process boundary. Torch is imported where a plan is made or carried out: a process that only asks
another one for an engine never loads it.
"""

import importlib.util
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebox.engine.config import EngineConfig, PrefixDiskConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.draft.drafter_start import DrafterPlan, check_block_drafts, default_drafts, plan_drafter
from onebox.engine.draft.vocabulary import DraftVocabulary
from onebox.engine.draft.vocabulary_start import (
    DraftVocabPlan,
    foreseen_draft_vocab_size,
    new_draft_vocabulary,
    open_draft_vocabulary,
    plan_draft_vocab,
)
from onebox.engine.engine import Deliver, Engine
from onebox.engine.remote.messages import DeviceMemory, Planned, PrefixDiskOpened, ReportStart, StartDetail, timed
from onebox.engine.warm.early import initialise_cuda, initialise_triton
from onebox.planner.memory import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_SEQUENCES,
    DEFAULT_UTILIZATION,
    MemoryPlan,
    MemoryRequest,
    plan_memory,
)
from onebox.spec.cache import redirect_kernel_cache
from onebox.spec.conversion import CONVERSION_BYTES, LoadConversion
from onebox.spec.dflash_memory import ring_tokens
from onebox.spec.errors import UnsupportedError, UsageError
from onebox.spec.hardware import GIB, Box, detect_box, detect_host, nvidia_driver
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.prefix_place import prefix_directory
from onebox.spec.states import StateDtype
from onebox.spec.torch_build import TorchBuild, refuse_unusable_torch
from onebox.spec.vocabulary import TokenTable

if TYPE_CHECKING:
    import torch

    from onebox.engine.disk.tier import DiskTier
    from onebox.engine.runner import ModelRunner
    from onebox.engine.warm.compile import WeightSource
    from onebox.model.footprint import Footprint
    from onebox.model.load import LoadFormat
    from onebox.model.memory import Memory, MemoryShape

__all__ = [
    "CheckpointStarter",
    "EngineOptions",
    "EnginePlan",
    "TokenInfo",
    "allocate_memory",
    "check_torch",
    "compile_ahead",
    "foresee_memory",
    "kernels_are_compiled",
    "load_runner",
    "open_disk",
    "plan_engine",
    "prefix_disk",
    "start_engine",
    "warm_runner",
]

_log = logging.getLogger(__name__)

_BATCHED_TOKENS = {"cpu": 512, "cuda": DEFAULT_BATCHED_TOKENS}
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
        max_context_tokens=options.max_model_len or found.spec.max_context_tokens,
        slots=options.max_num_seqs,
        kv=KVFormat.parse(options.kv_cache_dtype),
        drafts=speculation.max_drafts,
        drafts_with_mtp=speculation.with_mtp,
        draft_vocab_size=speculation.draft_vocab_size,
        drafter=drafter.spec if drafter else None,
        drafter_bytes=drafter.num_bytes if drafter else 0,
        gpu_memory_utilization=options.gpu_memory_utilization,
        page_tokens=PAGE_TOKENS,
        max_batched_tokens=options.max_num_batched_tokens or _BATCHED_TOKENS[device.type],
        with_vision=found.has_tower and not options.language_model_only,
        activation_bytes=dtype.itemsize,
        cache_bytes=options.kv_cache_memory_bytes,
        default_cache_bytes=DEFAULT_CPU_CACHE_BYTES if device.type == "cpu" else None,
        with_prefix_cache=options.enable_prefix_caching,
        state_dtype=StateDtype.parse(options.mamba_ssm_cache_dtype),
        loading_bytes=CONVERSION_BYTES if LoadConversion.parse(options.lm_head, options.mtp_format) else 0,
    )
    if prefix_disk(options) is None:
        return request
    from onebox.engine.disk.layout import staging_bytes

    return replace(request, staging_bytes=staging_bytes(found.spec, request, device.type))


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
    drafts = 0 if method is SpeculationMethod.NONE else options.num_speculative_tokens or default_drafts(drafter)
    block_size = check_block_drafts(drafter, drafts) if drafter else 0
    return SpeculationConfig(method, drafts, found.has_mtp, options.synthetic_acceptance, block_size=block_size)


# Load and build.


def start_engine(plan: EnginePlan, tokens: TokenInfo) -> Engine:
    """Loads and allocates what was planned, warms it up, and starts the engine on a thread of this process."""
    vocabulary = open_draft_vocabulary(plan, tokens.added_token_ids)
    runner = warm_runner(plan, draft_vocabulary=vocabulary)
    return Engine(runner, plan.config, tokens.table, disk=open_disk(plan, runner), draft_vocabulary=vocabulary)


def open_disk(plan: EnginePlan, runner: "ModelRunner", report: ReportStart = lambda _: None) -> "DiskTier | None":
    """The prefixes on disk that this engine can use, and the threads that read and write them."""
    config = plan.config.prefix_disk
    if config is None or not plan.config.num_checkpoints:
        return None
    from onebox.engine.disk.fingerprint import fingerprint_parts
    from onebox.engine.disk.layout import NUM_READERS, PrefixLayout
    from onebox.engine.disk.tier import DiskTier
    from onebox.engine.disk.transfer import PrefixTransfer
    from onebox.store.directory import PrefixDirectory

    with timed("prefixes on disk", report):
        layout = PrefixLayout(runner.memory, runner.first_checkpoint)
        label = {"model": plan.directory.name, "path": str(plan.directory)}
        parts, root = fingerprint_parts(plan), Path(config.directory)
        directory = PrefixDirectory(root, parts, layout.chunks, config.max_bytes, label=label)
        stats = directory.stats()
    report(PrefixDiskOpened(str(root), stats.num_entries, stats.num_bytes, stats.total_bytes - stats.num_bytes))
    return DiskTier(directory, PrefixTransfer(layout, plan.device), NUM_READERS[plan.device.type])


def warm_runner(
    plan: EnginePlan,
    report: ReportStart = lambda _: None,
    *,
    owns_process: bool = False,
    draft_vocabulary: DraftVocabulary | None = None,
) -> "ModelRunner":
    """The model loaded, its kernels compiled, its graphs captured and its workspace set aside: ready for requests.

    In a process of its own it then takes no more of the GPU's memory. Without a list of tokens for drafts, where the
    plan has one, it is that of a model that has said nothing yet.
    """
    is_gpu = plan.device.type == "cuda"
    if is_gpu:
        initialise_triton()
        with timed("kernels", report):
            compile_ahead(plan, lambda count: report(StartDetail("kernels", f"{count} compiled")))
    with timed("weights", report):
        runner = load_runner(plan, draft_vocabulary)
    if is_gpu:
        with timed("graphs", report):
            runner.capture_graphs(lambda done, total: report(StartDetail("graphs", f"{done} of {total} shapes")))
    with timed("warm-up", report):
        _warm_up(runner, plan, report, owns_process=owns_process)
    return runner


def compile_ahead(plan: EnginePlan, report: Callable[[int], None]) -> int:
    """Compiles the kernels of this engine for this machine's GPU; returns their number, 0 if all were compiled before.

    `report` is called with the number so far. No weights are read.
    """
    redirect_kernel_cache()
    from onebox.engine.warm.compile import compile_kernels

    weights = _weight_source(plan)
    return compile_kernels(weights, plan.dtype, plan.memory_shape, plan.config, report)


def kernels_are_compiled(plan: EnginePlan) -> bool:
    """Whether `compile_ahead` has nothing to do, because an engine of this plan was compiled before."""
    redirect_kernel_cache()
    from onebox.engine.warm.compile import are_compiled

    weights = _weight_source(plan)
    return are_compiled(weights, plan.dtype, plan.memory_shape, plan.config)


def _weight_source(plan: EnginePlan) -> "WeightSource":
    from onebox.engine.warm.compile import WeightSource

    drafter = plan.drafter.directory if plan.drafter else None
    return WeightSource(plan.directory, plan.load_format, plan.conversion, drafter)


def _warm_up(runner: "ModelRunner", plan: EnginePlan, report: ReportStart, *, owns_process: bool) -> None:
    from onebox.engine.warm.exercise import exercise, reserve_workspace

    runner.rehearse_draft_rows()
    if plan.device.type != "cuda":
        exercise(runner, plan.config, fully=False)
        return
    import torch

    reserve_workspace(runner, plan.config, plan.device, owns_process=owns_process)
    free, total = torch.cuda.mem_get_info(plan.device)
    report(DeviceMemory(total - free, plan.memory.box.memory_bytes - plan.memory.reserve_bytes))


def load_runner(plan: EnginePlan, draft_vocabulary: DraftVocabulary | None = None) -> "ModelRunner":
    """Reads the weights and allocates the memory, as planned."""
    import torch

    from onebox.engine.runner import ModelRunner
    from onebox.model.build import trim_model
    from onebox.model.drafter import attach_drafter, load_drafter
    from onebox.model.load import load_model
    from onebox.model.vision import load_tower

    model = load_model(
        plan.directory,
        plan.device,
        plan.dtype,
        plan.load_format,
        with_mtp=plan.config.speculation.with_mtp,
        overrides=plan.hf_overrides,
        conversion=plan.conversion,
    )
    if plan.drafter:
        directory = plan.drafter.directory
        drafter = load_drafter(directory, plan.spec, plan.device, plan.dtype, plan.load_format)
        model = attach_drafter(model, drafter)
    if plan.draft_vocab:
        listed = (draft_vocabulary or new_draft_vocabulary(plan.draft_vocab)).token_ids
        model = trim_model(model, torch.tensor(listed))
    tower = load_tower(plan.directory, plan.dtype, plan.device) if plan.memory.request.with_vision else None
    return ModelRunner(model, allocate_memory(plan), plan.config, tower)


def allocate_memory(plan: EnginePlan) -> "Memory":
    """The slots, checkpoints and pages of the plan."""
    import torch

    from onebox.model.memory import Memory

    with torch.inference_mode():
        return Memory.allocate(plan.spec, plan.memory_shape, plan.dtype, plan.device)


@dataclass(frozen=True)
class CheckpointStarter:
    """Starts an engine over a checkpoint in the engine's own process (an `EngineStarter`)."""

    directory: Path
    options: EngineOptions
    tokens: TokenInfo
    num_threads: int | None = None
    """Threads of computation on a CPU; None: torch's default."""

    def plan(self, report: ReportStart) -> Planned:
        if self.options.device != "cpu":
            initialise_cuda()
        with timed("import", report):
            import onebox.engine.runner  # noqa: F401 - and with it torch, the model and the kernels
        with timed("memory plan", report):
            plan = plan_engine(self.directory, self.options, self.tokens)
        from onebox.engine.disk.fingerprint import model_fingerprint

        dtype = str(plan.dtype).removeprefix("torch.")
        fingerprint = model_fingerprint(plan)
        return Planned(plan.config, plan.spec.vocab_size, plan.memory, dtype, pickle.dumps(plan), fingerprint)

    def start(self, planned: Planned, report: ReportStart, deliver: Deliver) -> Engine:
        import torch

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        plan = pickle.loads(planned.plan)  # noqa: S301 - written by `plan` above, in a process like this one
        vocabulary = open_draft_vocabulary(plan, self.tokens.added_token_ids, report)
        runner = warm_runner(plan, report, owns_process=True, draft_vocabulary=vocabulary)
        disk = open_disk(plan, runner, report)
        return Engine(runner, plan.config, self.tokens.table, deliver, disk, vocabulary)
