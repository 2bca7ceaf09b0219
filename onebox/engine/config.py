"""What is fixed for the engine's life: limits, sizes and how it speculates. All values are resolved."""

from dataclasses import dataclass, field
from enum import StrEnum

from onebox.engine.draft.kinds import Drafter
from onebox.spec.errors import UsageError
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["MAX_DRAFTS", "MAX_MTP_DRAFTS", "EngineConfig", "PrefixDiskConfig", "SpeculationConfig", "SpeculationMethod"]

MAX_DRAFTS = 15
"""Drafts of one sequence in a step; the attention kernel takes at most sixteen rows of one sequence."""
MAX_MTP_DRAFTS = 8
"""Of these, made by the MTP head: each takes a pass of its own, and later ones are rarely accepted."""


class SpeculationMethod(StrEnum):
    NONE = "none"
    MTP = "mtp"
    NGRAM = "ngram"
    DFLASH = "dflash"
    AUTO = "auto"


@dataclass(frozen=True)
class SpeculationConfig:
    """How tokens are drafted. It does not change the output."""

    method: SpeculationMethod = SpeculationMethod.NONE
    max_drafts: int = 0
    """Drafts per step, at most; with `auto` the depth is chosen up to it."""
    has_head: bool = True
    """Whether the model has an MTP head; without one, `auto` drafts from the text alone."""
    synthetic_acceptance: tuple[float, ...] = ()
    """For benchmarks on random weights: the i-th draft is accepted in this share of the steps, whatever the
    model computes. The text is then meaningless."""
    draft_vocab_size: int | None = None
    """Tokens that the heads' drafts are chosen from; None: all."""
    block_size: int = 0
    """Rows of one pass of the DFlash drafter: the last token, then its drafts. 0: none is loaded."""

    def __post_init__(self) -> None:
        least = 0 if self.method is SpeculationMethod.NONE else 1
        most = MAX_MTP_DRAFTS if self.method is SpeculationMethod.MTP else MAX_DRAFTS
        if not least <= self.max_drafts <= most:
            raise UsageError(
                f"Speculation by {self.method} takes {least} to {most} drafts per step, not {self.max_drafts}."
            )
        if any(not 0 <= rate <= 1 for rate in self.synthetic_acceptance):
            raise UsageError(f"Synthetic acceptance {self.synthetic_acceptance} must hold probabilities.")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise UsageError(f"A draft vocabulary has at least one token, not {self.draft_vocab_size}.")
        if self.block_size == 1 or self.block_size < 0:
            raise UsageError(f"A block of {self.block_size} rows has no drafts; a DFlash drafter's has 2 or more.")
        if self.method is SpeculationMethod.DFLASH and not self.block_size:
            raise UsageError("Speculation by dflash needs a DFlash drafter.")

    @property
    def with_mtp(self) -> bool:
        return self.method is SpeculationMethod.MTP or (self.method is SpeculationMethod.AUTO and self.has_head)

    @property
    def with_dflash(self) -> bool:
        return self.block_size > 0 and self.method in (SpeculationMethod.DFLASH, SpeculationMethod.AUTO)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those that may draft."""
        # The block drafter goes on from the text in a long copy, unless a benchmark decides what is accepted.
        is_block = self.method is SpeculationMethod.DFLASH and not self.synthetic_acceptance
        uses_text = self.method in (SpeculationMethod.NGRAM, SpeculationMethod.AUTO) or is_block
        uses = {Drafter.MTP: self.with_mtp, Drafter.NGRAM: uses_text, Drafter.DFLASH: self.with_dflash}
        return tuple(drafter for drafter, is_used in uses.items() if is_used)

    @property
    def max_mtp_drafts(self) -> int:
        """Drafts of the MTP head in a step, at most."""
        return min(self.max_drafts, MAX_MTP_DRAFTS) if self.with_mtp else 0

    @property
    def max_block_drafts(self) -> int:
        """Drafts of the DFlash drafter in a step, at most."""
        return min(self.max_drafts, self.block_size - 1) if self.with_dflash else 0


@dataclass(frozen=True)
class PrefixDiskConfig:
    """Where prefixes are kept on disk."""

    directory: str
    max_bytes: int
    """Of all files in the directory, those of other models included."""
    flush_s: float = 10.0
    """How long closing the engine may write what is not on disk yet."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise UsageError(f"The prefix directory may hold {self.max_bytes} bytes; give at least 1.")
        if self.flush_s < 0:
            raise UsageError(f"flush_s is {self.flush_s}; it cannot be negative.")


@dataclass(frozen=True)
class EngineConfig:
    """Limits that hold for the engine's life."""

    max_model_len: int
    num_pages: int
    """KV pages for sequences and cached prefixes together."""
    num_checkpoints: int = 0
    """Prefix states that the cache may hold; 0 turns the prefix cache off."""
    max_num_seqs: int = 8
    max_num_waiting: int = 64
    max_num_batched_tokens: int = 2048
    """Prompt tokens computed in one step: no running answer waits longer than these take."""
    max_answer_wait_s: float | None = None
    """How long running answers may wait for a step with prompts, as far as such steps can be cut; None: any time."""
    checkpoint_spacing: int = 4096
    """Tokens between the prefix states that are saved inside a long stretch without a message boundary."""
    eos_token_ids: tuple[int, ...] = ()
    boundary_token_ids: tuple[int, ...] = ()
    """Tokens that open a message: prefixes are saved up to them."""
    thinking_token_ids: tuple[int, int] | None = None
    """The tokens that open and close the reasoning of an answer: drafts of the two parts are counted apart."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    prefix_disk: PrefixDiskConfig | None = None
    """None: prefixes are kept in memory only."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "num_pages"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("max_num_waiting", "num_checkpoints"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it cannot be negative.")
        for name in ("max_num_batched_tokens", "checkpoint_spacing"):
            if getattr(self, name) < PAGE_TOKENS or getattr(self, name) % PAGE_TOKENS:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be a multiple of {PAGE_TOKENS} above 0.")

    @property
    def rows_per_sequence(self) -> int:
        """Rows of one sequence in a decode step, at most."""
        return 1 + self.speculation.max_drafts
