"""What `onebox serve` says while it starts: phases, the memory plan, and how many users of which length it serves."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.spec.prefix_place import prefix_directory_line

if TYPE_CHECKING:
    from onebox.engine.api import EngineConfig, Planned, Progress, SpeculationConfig

__all__ = ["plan_lines", "progress_lines"]

_CONTEXTS = (32_768, 131_072)
"""Lengths for which users are counted, beside the full one."""
_GIB = 2**30


def progress_lines(progress: "Progress") -> Iterator[str]:
    """A phase with its seconds or how far it is, the memory in use, or the memory plan and the resolved settings."""
    from onebox.engine.api import DeviceMemory, DraftVocabOpened, PrefixDiskOpened, StartDetail, StartPhase

    match progress:
        case StartPhase(name, seconds):
            yield f"{name}: {seconds:.2f} s"
        case StartDetail(name, text):
            yield f"{name}: {text}"
        case DeviceMemory(used_bytes, planned_bytes):
            yield f"device memory: {used_bytes / _GIB:.2f} GiB in use, of {planned_bytes / _GIB:.2f} GiB in the plan"
        case PrefixDiskOpened(path, num_entries, num_bytes, num_foreign_bytes):
            foreign = f", and {num_foreign_bytes / _GIB:.2f} GiB of other models" if num_foreign_bytes else ""
            yield f"prefixes on disk: {num_entries:,} of {num_bytes / _GIB:.2f} GiB in {path}{foreign}"
        case DraftVocabOpened(size, vocab_size, num_counted, coverage):
            said = "nothing was counted yet" if coverage is None else f"{coverage:.1%} of {num_counted:,} tokens said"
            yield f"draft vocabulary: {size:,} of {vocab_size:,} tokens, {said}"
        case _:
            yield from plan_lines(progress)


def plan_lines(planned: "Planned") -> Iterator[str]:
    """The division of the memory, the size of the KV cache in tokens and users, and the limits of a step."""
    memory, config = planned.memory, planned.config
    yield f"{memory.box.device}, {planned.dtype} activations, {memory.request.kv.name} KV cache:"
    for part in memory.parts:
        yield f"  {part.name:<13}{part.bytes / _GIB:9.3f} GiB  {part.note}"
    yield f"KV cache size: {memory.kv_tokens:,} tokens, for requests and cached prefixes"
    full = config.max_model_len
    yield f"Maximum concurrency for {full:,} tokens per request: {memory.kv_tokens / full:.2f}x"
    yield _users(planned)
    yield _step_limits(config)
    if config.prefix_disk:
        yield prefix_directory_line(Path(config.prefix_disk.directory), config.prefix_disk.max_bytes)


def _users(planned: "Planned") -> str:
    config, page_tokens = planned.config, planned.memory.request.page_tokens
    lengths = [*(length for length in _CONTEXTS if length < config.max_model_len), config.max_model_len]
    counts = [planned.memory.num_pages // -(-length // page_tokens) for length in lengths]
    each = ", ".join(f"{count:,} at {length:,} tokens" for count, length in zip(counts, lengths, strict=True))
    waiting = f"{config.max_num_waiting:,} more wait" if config.max_num_waiting else "none waits"
    return (
        f"Users that the KV cache holds: {each} (full length). At most {config.max_num_seqs:,} run at once "
        f"(--max-num-seqs), {waiting}."
    )


def _step_limits(config: "EngineConfig") -> str:
    prefixes = f"up to {config.num_checkpoints:,} states" if config.num_checkpoints else "off"
    prefill = f"up to {config.max_num_batched_tokens:,} prompt tokens a step"
    return f"Prefill: {prefill}. Drafts: {_drafts(config.speculation)}. Prefix cache: {prefixes}."


def _drafts(speculation: "SpeculationConfig") -> str:
    from onebox.engine.api import SpeculationMethod

    if speculation.method is SpeculationMethod.NONE:
        return "none"
    sources = {
        "the MTP head": speculation.with_mtp,
        "the DFlash drafter": speculation.with_dflash,
        "the text itself": speculation.method in (SpeculationMethod.NGRAM, SpeculationMethod.AUTO),
    }
    used = " or ".join(name for name, is_used in sources.items() if is_used)
    return f"up to {speculation.max_drafts} a step, from {used} ({speculation.method})"
