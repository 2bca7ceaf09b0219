"""The memory plan: every byte of the box is assigned before anything is loaded, and the parts sum to the box.

    weights      the classes that will be loaded, as stored
    drafter      the weights of a block drafter
    drafts       the draft vocabulary's rows of the LM head
    workspace    CUDA context and graphs, activations of the largest prefill batch, logits
    states       one slot per running sequence: DeltaNet state, convolution rows, rows awaiting verification, and the
                 ring of a block drafter
    prefix       checkpoints (a state, the last hidden vector, a ring) of reusable prefixes
    staging      on unified memory, the buffers between prefixes on disk and in memory
    KV pages     the remainder, limited by --kv-cache-memory-bytes, in whole pages
    reserve      not used by onebox: OS, desktop, page cache and, on unified memory, the loader's staging buffer
    unused       the remainder after rounding down to whole pages and checkpoints

Computes sizes only: the engine allocates according to a `MemoryPlan`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onebox.spec.dflash import DFlashSpec
from onebox.spec.dflash_memory import draft_page_bytes, num_full_layers, ring_bytes
from onebox.spec.draft_vocab import draft_head_bytes
from onebox.spec.errors import DoesNotFitError, UsageError
from onebox.spec.hardware import GIB, MIB, Box
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.pieces import BLOCK_DOUBLINGS, DIRECT_TOKENS, SLICE_TOKENS, doublings, piece_count
from onebox.spec.states import StateDtype

__all__ = [
    "DEFAULT_BATCHED_TOKENS",
    "DEFAULT_DRAFTS",
    "DEFAULT_HOST_BATCHED_TOKENS",
    "DEFAULT_SEQUENCES",
    "DEFAULT_UTILIZATION",
    "MemoryPart",
    "MemoryPlan",
    "MemoryRequest",
    "checkpoint_bytes",
    "context_pages_bytes",
    "draft_vocab_bytes",
    "kept_row_bytes",
    "loaded_weight_bytes",
    "page_bytes",
    "plan_memory",
    "reserve_bytes",
    "slot_bytes",
    "state_bytes",
    "workspace_bytes",
]

DEFAULT_UTILIZATION = 0.90
"""Share of the box's memory that onebox uses by default."""
DEFAULT_SEQUENCES = 8
DEFAULT_DRAFTS = 4
"""Where the weights have an MTP head."""
DEFAULT_BATCHED_TOKENS = 2048
"""Prompt tokens of a step on a GPU."""
DEFAULT_HOST_BATCHED_TOKENS = 512
"""On a CPU."""
PREFIX_SHARE = 0.10
"""Share for prefix checkpoints of what remains after weights, workspace, states and reserve; KV gets the rest."""
_STEP_ROWS = 128
"""Rows that a decode step computes at once; a larger step is computed in parts."""
_CAPTURED_PREFILL_ROWS = 1024
"""Rows of the largest captured prefill, whose activations are set aside beside those of longer ones."""
_PROMPT_ROWS = 64
"""Tokens of a prompt whose log-probabilities are computed together."""
_CHUNK = 64
"""Tokens in one chunk of DeltaNet's prefill."""
RUNTIME_BYTES = 1 * GIB
"""CUDA context, loaded kernels and captured graphs: an estimate; 0.77 GiB on an H200 with 102 graphs of the 122B."""
_SPARE_BYTES = 192 * MIB
"""What the engine sets aside beyond the largest use of a step: other sizes divide the workspace in other ways."""
_PREFILL_MARGIN = 1.15
"""On the estimate of a prefill's activations; measured on an H200: 1.05."""
_LOGPROB_ROWS = 8
"""Rows whose log-probabilities are computed at once, and the bytes that each of their tokens takes meanwhile."""
_LOGPROB_BYTES = 70


@dataclass(frozen=True)
class MemoryRequest:
    """The user's settings for a plan. `reserve_bytes`, if given, replaces `gpu_memory_utilization`."""

    max_context_tokens: int
    slots: int
    kv: KVFormat
    drafts: int = 0
    drafts_with_mtp: bool = True
    """Whether drafts come from the MTP head, which needs weights and pages; n-gram drafts need neither."""
    draft_vocab_size: int | None = None
    """Rows of the LM head that drafts have a copy of; None: they read the head itself."""
    drafter: DFlashSpec | None = None
    """A block drafter beside the model."""
    drafter_bytes: int = 0
    """Of its weights on the device."""
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    reserve_bytes: int | None = None
    page_tokens: int = PAGE_TOKENS
    max_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    with_vision: bool = True
    activation_bytes: int = 2
    """2 for bfloat16, 4 for float32."""
    state_dtype: StateDtype = StateDtype.FLOAT32
    """Of DeltaNet's recurrent states, in slots and in checkpoints."""
    kept_rows: int = 0
    """Rows of a slot that may wait to be written into the context of a drafter that is not used."""
    cache_bytes: int | None = None
    """For KV pages and prefix checkpoints together; more than there is, is refused. None: all remaining memory."""
    default_cache_bytes: int | None = None
    """Where `cache_bytes` is None: not more than this."""
    with_prefix_cache: bool = True
    loading_bytes: int = 0
    """Memory that loading takes beyond the weights, for a conversion: before anything else is allocated."""
    staging_bytes: int = 0
    """Host memory between prefixes on disk and in memory: part of the box where it is unified."""

    def __post_init__(self) -> None:
        _refuse_below(1, "--max-model-len", self.max_context_tokens)
        _refuse_below(1, "--max-num-seqs", self.slots)
        _refuse_below(0, "--speculative-tokens", self.drafts)
        _refuse_below(1, "the page size", self.page_tokens)
        _refuse_below(1, "--max-num-batched-tokens", self.max_batched_tokens)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} is not a fraction of the memory: "
                "give more than 0 and at most 1."
            )
        if self.reserve_bytes is not None:
            _refuse_below(0, "--reserve-gib", self.reserve_bytes)
        if self.cache_bytes is not None:
            _refuse_below(1, "--kv-cache-memory-bytes", self.cache_bytes)

    @property
    def with_mtp(self) -> bool:
        return self.drafts > 0 and self.drafts_with_mtp


class MemoryPart(NamedTuple):
    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class MemoryPlan:
    """How the box's memory is divided. All sizes in bytes; the parts sum to `box.memory_bytes` exactly."""

    box: Box
    request: MemoryRequest
    weights_bytes: int
    workspace_bytes: int
    slot_bytes: int
    checkpoint_bytes: int
    num_checkpoints: int
    page_bytes: int
    num_pages: int
    reserve_bytes: int
    draft_vocab_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        return self.request.slots * self.slot_bytes

    @property
    def prefix_bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the pages hold, over all sequences and cached prefixes."""
        return self.num_pages * self.request.page_tokens

    @property
    def unused_bytes(self) -> int:
        owned = self.weights_bytes + self.workspace_bytes + self.states_bytes + self.prefix_bytes + self.kv_bytes
        owned += self.draft_vocab_bytes + self.request.drafter_bytes
        return self.box.memory_bytes - self.reserve_bytes - self.staging_bytes - owned

    @property
    def staging_bytes(self) -> int:
        return _staging_bytes(self.box, self.request)

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        slots, pages = self.request.slots, f"{self.num_pages:,} pages of {self.request.page_tokens} tokens"
        runtime = "CUDA context, graphs" if self.box.compute_capability else "libraries"
        return (
            MemoryPart("weights", self.weights_bytes, _weights_note(self.request)),
            *self._drafter_part,
            *self._draft_vocab_part,
            MemoryPart("workspace", self.workspace_bytes, f"{runtime}, activations (estimate)"),
            MemoryPart(
                "states",
                self.states_bytes,
                f"{slots} slots of {self.slot_bytes / 1e6:.1f} MB, {self.request.state_dtype}",
            ),
            MemoryPart(
                "prefix cache",
                self.prefix_bytes,
                f"{self.num_checkpoints:,} checkpoints of {self.checkpoint_bytes / 1e6:.1f} MB",
            ),
            *([MemoryPart("disk staging", self.staging_bytes, "prefixes on disk")] if self.staging_bytes else []),
            MemoryPart("KV pages", self.kv_bytes, pages),
            MemoryPart("reserve", self.reserve_bytes, _reserve_note(self.box)),
            MemoryPart("unused", self.unused_bytes, _unused_note(self.request)),
        )

    @property
    def _drafter_part(self) -> tuple[MemoryPart, ...]:
        drafter = self.request.drafter
        if drafter is None:
            return ()
        note = f"DFlash, {drafter.num_hidden_layers} layers, blocks of {drafter.block_size}"
        return (MemoryPart("drafter", self.request.drafter_bytes, note),)

    @property
    def _draft_vocab_part(self) -> tuple[MemoryPart, ...]:
        size = self.request.draft_vocab_size
        if not self.draft_vocab_bytes or size is None:
            return ()
        return (MemoryPart("draft vocab", self.draft_vocab_bytes, f"{size:,} rows of the LM head"),)

    def context_bytes(self, context_tokens: int) -> int:
        """Bytes of one more sequence of that length: its pages and one slot."""
        return _pages(context_tokens, self.request.page_tokens) * self.page_bytes + self.slot_bytes

    def users_at(self, context_tokens: int) -> int:
        """Number of sequences of that length that fit into states and KV pages if the slots are divided anew."""
        return (self.states_bytes + self.kv_bytes + self.unused_bytes) // self.context_bytes(context_tokens)


def loaded_weight_bytes(stored: Mapping[ModuleClass, int], *, with_mtp: bool, with_vision: bool) -> int:
    """Bytes of the loaded classes: the MTP head only with MTP drafts, the vision tower only with image input."""
    return sum(
        size
        for kind, size in stored.items()
        if (with_mtp or not kind.in_mtp) and (with_vision or kind is not ModuleClass.VISION)
    )


def draft_vocab_bytes(spec: ModelSpec, stored: Mapping[ModuleClass, int], request: MemoryRequest) -> int:
    """The copy of some rows of the LM head that drafts read, and the token of each, as int64."""
    if request.draft_vocab_size is None or not (request.with_mtp or request.drafter):
        return 0
    head = stored.get(ModuleClass.LM_HEAD) or stored.get(ModuleClass.EMBEDDING, 0)
    return draft_head_bytes(head, spec.vocab_size, request.draft_vocab_size) + 8 * request.draft_vocab_size


def slot_bytes(
    spec: ModelSpec, drafts: int, activation_bytes: int = 2, state_dtype: StateDtype = StateDtype.FLOAT32
) -> int:
    """One sequence's slot: the contents of a checkpoint, and per row of a step the inputs that update the state.

    Stored per row until it is folded into the state: its convolution input and its two gates (float32); key, value and
    decay are computed from these.
    """
    row = activation_bytes * spec.conv_dim + 4 * 2 * spec.linear_num_value_heads
    return checkpoint_bytes(spec, activation_bytes, state_dtype) + (1 + drafts) * len(spec.linear_layers) * row


def checkpoint_bytes(spec: ModelSpec, activation_bytes: int = 2, state_dtype: StateDtype = StateDtype.FLOAT32) -> int:
    """A reusable prefix without its KV pages: states, convolution rows, and the hidden vector the MTP head needs."""
    conv_rows = (spec.linear_conv_kernel_dim - 1) * spec.conv_dim * activation_bytes
    layer = spec.recurrent_state_bytes(state_dtype) + conv_rows
    return len(spec.linear_layers) * layer + activation_bytes * spec.hidden_size


def state_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """A checkpoint of this request's engine: `checkpoint_bytes` and a block drafter's ring."""
    return checkpoint_bytes(spec, request.activation_bytes, request.state_dtype) + _ring_bytes(request)


def _ring_bytes(request: MemoryRequest) -> int:
    if request.drafter is None:
        return 0
    return ring_bytes(request.drafter, request.max_batched_tokens, request.activation_bytes)


def kept_row_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """Of a row kept for drafters: a hidden vector for the MTP head, and the streams that a block drafter taps.

    A stream is not added up yet: a float32 vector and one of the activations' dtype.
    """
    hidden = spec.hidden_size * request.activation_bytes if request.with_mtp else 0
    taps = request.drafter.feature_size * (4 + request.activation_bytes) if request.drafter else 0
    return hidden + taps


def workspace_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """An estimate: the runtime, a decode step's logits and sums, rows kept for drafters, the largest of prefill and
    logprobs, the captured prefills, a scratch page.

    Rows without a sequence write to the scratch page. The engine sets all of it aside before it is ready; while weights
    are loaded it is free, and has room for what converting them takes.
    """
    rows = min(_STEP_ROWS, request.slots * (1 + request.drafts))
    pieces = piece_count(request.max_context_tokens, doublings(request.kv))
    # The block drafter's follow the model's in the same memory.
    sums = max(4 * rows * pieces * spec.num_attention_heads * (spec.head_dim + 2), _block_sums(request))
    # Where sampling reads them, and as the model computes them or, twice as large, the shares of top-p.
    logits = (4 + 8) * rows * spec.vocab_size
    token_bytes = _PREFILL_MARGIN * (_prefill_bytes(spec, request.activation_bytes) + _feature_bytes(request))
    features = _STEP_ROWS * request.activation_bytes * request.drafter.feature_size if request.drafter else 0
    # As many again before they are sorted by slots; those of one slot are put together and added up when written.
    kept = (request.slots + 4) * request.kept_rows * kept_row_bytes(spec, request)
    step = logits + sums + features + kept
    activations = int(token_bytes * request.max_batched_tokens) + _decoded_bytes(spec, request)
    captured = int(token_bytes * min(_CAPTURED_PREFILL_ROWS, request.max_batched_tokens))
    logprobs = spec.vocab_size * (_LOGPROB_ROWS * _LOGPROB_BYTES + (4 + 8) * max(rows, _PROMPT_ROWS))
    largest = max(activations, logprobs, request.loading_bytes)
    return RUNTIME_BYTES + largest + captured + step + page_bytes(spec, request) + _SPARE_BYTES


def _feature_bytes(request: MemoryRequest) -> int:
    """Of a prompt token, for a block drafter: its taps, these side by side, fused, its keys and values."""
    if (drafter := request.drafter) is None:
        return 0
    width, kv = request.activation_bytes, 2 * drafter.num_hidden_layers * drafter.kv_size
    return width * (2 * drafter.feature_size + 2 * drafter.hidden_size + kv)


def _block_sums(request: MemoryRequest) -> int:
    """The sums of a block drafter's attention over the longest context."""
    if (drafter := request.drafter) is None or not num_full_layers(drafter):
        return 0
    rows = min(_STEP_ROWS, request.slots * (1 + request.drafts))
    pieces = 1 + piece_count(request.max_context_tokens, BLOCK_DOUBLINGS)
    return 4 * rows * pieces * drafter.num_attention_heads * (drafter.head_dim + 2)


def _decoded_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """What a prefill of many tokens takes to decode packed KV: a slice of it, and all tokens' sums between slices."""
    if max(request.kv.key_bits, request.kv.value_bits) > 8 or request.max_batched_tokens <= DIRECT_TOKENS:
        return 0
    slices = SLICE_TOKENS * spec.num_key_value_heads * 2 * (2 * spec.head_dim + 4)
    return slices + 4 * request.max_batched_tokens * spec.num_attention_heads * (spec.head_dim + 2)


def _prefill_bytes(spec: ModelSpec, width: int) -> int:
    """Peak activation bytes per prompt token: those of the largest layer part, activations of `width` bytes."""
    hidden, heads = spec.hidden_size, spec.linear_num_value_heads
    stream = (4 + width) * hidden  # in float32, and normalised
    attention = width * spec.head_dim * (4 * spec.num_attention_heads + 2 * spec.num_key_value_heads)
    keys = spec.linear_num_key_heads * spec.linear_key_head_dim
    # The projection, the convolved rows in float32, chunks of 64 in float16 halves, the output and the gated output.
    chunks = 2 * 3 * (keys + _CHUNK * heads)
    delta_net = width * (spec.conv_dim + 3 * spec.value_dim + 2 * heads) + 4 * (spec.conv_dim + 3 * heads) + chunks
    # Each expert's intermediate activations and its float32 output; their sum, and the shared expert's.
    experts = spec.num_experts_per_tok * (2 * spec.moe_intermediate_size + 4 * hidden)
    experts += (4 + 2 * width) * hidden + 3 * width * spec.shared_expert_intermediate_size
    return stream + max(attention, delta_net, experts)


def page_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """One page of keys and values in all layers with a KV cache."""
    own = draft_page_bytes(request.drafter, request.activation_bytes) if request.drafter else 0
    return request.page_tokens * request.kv.bytes_per_token(spec, with_mtp=request.with_mtp) + own


def context_pages_bytes(spec: ModelSpec, request: MemoryRequest) -> int:
    """The pages of one sequence of the full length."""
    return _pages(request.max_context_tokens, request.page_tokens) * page_bytes(spec, request)


def plan_memory(spec: ModelSpec, stored: Mapping[ModuleClass, int], box: Box, request: MemoryRequest) -> MemoryPlan:
    """Divides the box. Raises `DoesNotFitError` with a table if one sequence of the full context does not fit."""
    if request.max_context_tokens > spec.max_context_tokens:
        raise UsageError(
            f"--max-model-len {request.max_context_tokens:,} is more than the {spec.max_context_tokens:,} tokens "
            f"that the model supports; give that or less{_stretch_advice(spec, request.max_context_tokens)}."
        )
    page = page_bytes(spec, request)
    weights = loaded_weight_bytes(stored, with_mtp=request.with_mtp, with_vision=request.with_vision)
    draft_vocab = draft_vocab_bytes(spec, stored, request)
    slot = slot_bytes(spec, request.drafts, request.activation_bytes, request.state_dtype)
    slot += _ring_bytes(request)
    workspace, reserve = workspace_bytes(spec, request), reserve_bytes(box, request)
    left = (
        box.memory_bytes
        - reserve
        - weights
        - draft_vocab
        - request.drafter_bytes
        - workspace
        - request.slots * slot
        - _staging_bytes(box, request)
    )
    one_context = context_pages_bytes(spec, request)
    limit = request.default_cache_bytes if request.cache_bytes is None else request.cache_bytes
    if limit is not None and left >= one_context:
        _refuse_cache(request, limit, left, one_context)
        left = min(left, limit)
    checkpoint = state_bytes(spec, request)
    share = PREFIX_SHARE if request.with_prefix_cache else 0.0
    num_checkpoints = max(0, int(min(share * left, left - one_context)) // checkpoint)
    plan = MemoryPlan(
        box=box,
        request=request,
        weights_bytes=weights,
        workspace_bytes=workspace,
        slot_bytes=slot,
        checkpoint_bytes=checkpoint,
        num_checkpoints=num_checkpoints,
        page_bytes=page,
        num_pages=(left - num_checkpoints * checkpoint) // page,
        reserve_bytes=reserve,
        draft_vocab_bytes=draft_vocab,
    )
    if left < one_context:
        raise _does_not_fit(plan, one_context, one_context - left)
    return plan


def _stretch_advice(spec: ModelSpec, tokens: int) -> str:
    """How a model without YaRN is stretched to `tokens`, where YaRN's usual factor of 4 reaches that far."""
    factor = -(-tokens // spec.max_context_tokens)
    if spec.yarn is not None or factor > 4:
        return ""
    rope = {
        "mrope_interleaved": True,
        "mrope_section": list(spec.mrope_section),
        "rope_type": "yarn",
        "rope_theta": spec.rope_theta,
        "partial_rotary_factor": spec.partial_rotary_factor,
        "factor": float(factor),
        "original_max_position_embeddings": spec.max_position_embeddings,
    }
    overrides = {"rope_parameters": rope} if spec.is_text_only else {"text_config": {"rope_parameters": rope}}
    return f", or stretch it with YaRN: --hf-overrides '{json.dumps(overrides)}'"


def asked_reserve_bytes(box: Box, request: MemoryRequest) -> int:
    """The reserve requested by the flags; a plan's reserve is larger if other programs use more than that."""
    if request.reserve_bytes is not None:
        return request.reserve_bytes
    return box.memory_bytes - int(box.memory_bytes * request.gpu_memory_utilization)


def reserve_bytes(box: Box, request: MemoryRequest) -> int:
    """Left alone by the plan: what the flags ask for, or more if other programs hold more."""
    # Memory that other programs use on the detected machine is not available.
    held_by_others = box.memory_bytes - box.available_bytes if box.available_bytes is not None else 0
    return max(asked_reserve_bytes(box, request), held_by_others)


def _staging_bytes(box: Box, request: MemoryRequest) -> int:
    """Of the box: with a GPU of its own memory, staging takes the host's."""
    return request.staging_bytes if box.unified else 0


def _weights_note(request: MemoryRequest) -> str:
    return "as stored, or as converted while loading" if request.loading_bytes else "as stored"


def _unused_note(request: MemoryRequest) -> str:
    is_limited = request.cache_bytes is not None or request.default_cache_bytes is not None
    return "beyond the cache's own limit" if is_limited else "less than a page"


def _reserve_note(box: Box) -> str:
    return "OS, desktop, page cache, staging buffer" if box.unified else "driver, other programs"


def _does_not_fit(plan: MemoryPlan, one_context: int, short_bytes: int) -> DoesNotFitError:
    box, request = plan.box, plan.request
    rows = [(part.name, part.bytes) for part in plan.parts if part.name not in ("KV pages", "prefix cache", "unused")]
    rows.append((f"KV of one {request.max_context_tokens:,}-token sequence", one_context))
    width = max(len(name) for name, _ in rows)
    needed = sum(size for _, size in rows)
    table = [f"  {name:<{width}} {size / GIB:8.2f} GiB" for name, size in rows]
    table.append(f"  {'needed':<{width}} {needed / GIB:8.2f} GiB")
    table.append(f"  {box.name + ' has':<{width}} {box.memory_bytes / GIB:8.2f} GiB")
    if plan.weights_bytes + plan.workspace_bytes > box.memory_bytes - plan.reserve_bytes:
        advice = "the weights leave no room for any context; use smaller weights or a larger box"
    else:
        advice = (
            "use smaller weights, a smaller --max-model-len or --max-num-seqs, a packed --kv-cache-dtype, or a smaller "
            "reserve"
        )
    lines = [f"The plan is {short_bytes / GIB:.2f} GiB too large for {box.name}: {advice}.", *table]
    return DoesNotFitError("\n".join(lines))


def _refuse_cache(request: MemoryRequest, limit: int, left: int, one_context: int) -> None:
    """A cache that is larger than what is left, or smaller than one sequence of the full context."""
    if limit < one_context:
        raise DoesNotFitError(
            f"The cache of {limit / GIB:.2f} GiB is too small: the KV of one {request.max_context_tokens:,}-token "
            f"sequence takes {one_context / GIB:.2f} GiB. Give --kv-cache-memory-bytes {one_context} or more (up to "
            f"{left}), or a smaller --max-model-len."
        )
    if request.cache_bytes is not None and limit > left:
        default = request.default_cache_bytes
        otherwise = "to use all that is left" if default is None else f"for {min(default, left) / GIB:.2f} GiB"
        raise DoesNotFitError(
            f"--kv-cache-memory-bytes {limit} asks for {limit / GIB:.2f} GiB, but weights, workspace, states and the "
            f"reserve leave {left / GIB:.2f} GiB: give {left} or less, or leave it out {otherwise}."
        )


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def _refuse_below(least: int, name: str, value: int) -> None:
    if value < least:
        raise UsageError(f"{name} is {value}; give {least} or more.")
