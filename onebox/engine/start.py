"""Starting an engine that was planned: kernels, weights, graphs, warm-up.

Kernels are compiled before the weights are loaded, while the memory that the compilers need is free. The starter
crosses a process boundary. Torch is imported where a plan is carried out: a process that only asks another one for an
engine never loads it.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.engine.draft.vocabulary import DraftVocabulary
from onebox.engine.draft.vocabulary_start import new_draft_vocabulary, open_draft_vocabulary
from onebox.engine.engine import Deliver, Engine
from onebox.engine.plan import EngineOptions, EnginePlan, TokenInfo, plan_engine
from onebox.engine.remote.messages import (
    DeviceMemory,
    Planned,
    PrefixDiskOpened,
    ReportStart,
    StartDetail,
    StartPhase,
    timed,
)
from onebox.engine.warm.early import import_engine, initialise_triton
from onebox.spec.cache import redirect_kernel_cache

if TYPE_CHECKING:
    from onebox.engine.disk.tier import DiskTier
    from onebox.engine.runner import ModelRunner
    from onebox.engine.warm.compile import WeightSource
    from onebox.model.memory import Memory

__all__ = [
    "CheckpointStarter",
    "allocate_memory",
    "compile_ahead",
    "kernels_are_compiled",
    "load_runner",
    "open_disk",
    "start_engine",
    "warm_runner",
]


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

    runner.rehearse()
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
        report(StartPhase("import", import_engine(self.options.device)))
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
