"""What an engine is asked for and told before anything is read: plain values that cross a process boundary.

Nothing here imports torch, so that whoever only asks another process for an engine does not load it.
"""

from dataclasses import dataclass

from onebox.planner.memory import DEFAULT_UTILIZATION
from onebox.spec.vocabulary import TokenTable

__all__ = ["EngineOptions", "Vocabulary"]


@dataclass(frozen=True)
class EngineOptions:
    """What a user may ask for, in the words of the command line; None and auto leave the choice to onebox."""

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    kv_cache_dtype: str = "bf16"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_waiting: int = 64
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    language_model_only: bool = False
    """Leaves the vision tower out, where the checkpoint has one."""
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    synthetic_acceptance: tuple[float, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """What the engine is told about tokens: which end an answer, which open a message, and what each one spells."""

    eos_token_ids: tuple[int, ...] = ()
    boundary_token_ids: tuple[int, ...] = ()
    table: TokenTable | None = None
