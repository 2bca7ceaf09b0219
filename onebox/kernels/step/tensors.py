"""The inputs of a decode step that change from one step to the next, and those of its drafts."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["ANCHOR_WORDS", "BlockRows", "ChainRows", "DraftLimits", "FollowingRows", "LastRows", "StepTensors"]

ANCHOR_WORDS = 10
"""Of one block: `block_anchors` has their order."""


class StepTensors(NamedTuple):
    """What `next_inputs` replaces in place by the next step's."""

    token_ids: Tensor
    """int64 [R]."""
    positions: Tensor
    """int64 [R]."""
    slot_mapping: Tensor
    """int64 [R]."""
    num_accepted: Tensor
    """int32 [S]: rows of the step before that were accepted."""
    seen: Tensor
    """int32 [S]: tokens that a sequence's last row attends to, this step's included."""


class FollowingRows(NamedTuple):
    """The rows of a step one token later, as the MTP head takes them."""

    places: Tensor
    """int64 [R]: in the sequence's tokens."""
    positions: Tensor
    """int64 [R]: what the token is rotated by."""
    slot_mapping: Tensor
    """int64 [R]."""
    seen: Tensor
    """int32 [S]."""


class DraftLimits(NamedTuple):
    """How tokens are sampled, [R] or [S] each."""

    temperature: Tensor
    """float64, and so top_p and min_p."""
    top_k: Tensor
    """int64."""
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    """int64."""


class ChainRows(NamedTuple):
    """Drafting from draft to draft, one row per sequence: of draft d the row d of each tensor [depth, S]."""

    hidden: Tensor
    """[S, H]: the head's output from which the first draft is sampled."""
    places: Tensor
    """int64: where the draft is sampled for; as a row, it lies there."""
    positions: Tensor
    """int64: what it is rotated by."""
    slot_mapping: Tensor
    """int64."""
    seen: Tensor
    """int32: tokens that its row attends to, itself included."""
    cu_rows: Tensor
    """int32 [S + 1]: one row per sequence."""
    limits: DraftLimits
    """[S] each."""


class LastRows(NamedTuple):
    """A step's rows and sequences, of which `block_anchors` takes each sequence's last accepted row."""

    token_ids: Tensor
    """int64 [R]: the token after each row, as `verify_drafts` gives them."""
    places: Tensor
    """int64 [R]: the row's place in its sequence's tokens."""
    positions: Tensor
    """int64 [R]: what it is rotated by."""
    cu_rows: Tensor
    """int32 [S + 1]."""
    num_accepted: Tensor
    """int64 [S]."""
    slots: Tensor
    """int32 [S]."""


class BlockRows(NamedTuple):
    """The rows of B blocks of 1 + n rows each: a token and n masks."""

    token_ids: Tensor
    """int64 [B * (1 + n)]."""
    positions: Tensor
    """int64 [B * (1 + n)]: what they are rotated by."""
    length: Tensor
    """int32 [B]: tokens before the block, and so the next two as in `draft.BlockContext`."""
    slots: Tensor
    sequences: Tensor
    places: Tensor
    """int64 [B * n]: where each draft is sampled for."""
    limits: DraftLimits
    """[B * n] each: how it is sampled."""
