"""What N boxes bring for one model through vLLM's tensor parallelism: memory, users, bytes and time of a step.

    step on a rank   bytes of the rank / usable bandwidth / vLLM's share of it
    all-reduces      two a layer and one for the embedding, of `rows` x hidden x 2 bytes: latency, not bandwidth

All projected: no two boxes were measured by us. The share is what vLLM reaches on one Spark in published figures, and
the latencies are those published for NCCL between two Sparks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from onebox.planner.memory import MemoryPlan, MemoryRequest, plan_memory
from onebox.planner.report import Weights
from onebox.planner.roofline import Projection, Workload, project
from onebox.planner.vllm_accounting import vllm_cache
from onebox.scaleout.published import MEASURED_BOX, PUBLISHED, PublishedPair
from onebox.scaleout.ranks import class_bytes_per_rank, rank_spec
from onebox.spec.errors import DoesNotFitError, UsageError
from onebox.spec.hardware import Box
from onebox.spec.model import ModelSpec

__all__ = ["ALL_REDUCE_SECONDS", "VLLM_SHARE", "BoxesPlan", "RankStep", "all_reduce_seconds", "plan_boxes"]

VLLM_SHARE = 0.86
"""Of the usable bandwidth, on one Spark: 36.0 tok/s of the 41 that the hybrid's bytes allow, 28.2 of 34 for INT4."""
ALL_REDUCE_SECONDS: Mapping[int, float] = {8192: 31e-6, 16384: 31e-6, 32768: 38e-6, 65536: 66e-6}
"""NCCL between two Sparks over RoCE, by bytes: all_reduce_perf, NVIDIA/dgx-spark-playbooks #103 (30 to 68 us)."""
_SHARE_PER_BOX = 0.07
"""More for each box beyond two: 48 KB take 59 us among four Sparks (local-inference-lab/b12x #295), 52 between two."""
_ACTIVATION_BYTES = 2


def all_reduce_seconds(num_bytes: int) -> float:
    """One all-reduce between two boxes: between published sizes in proportion, beyond them by bandwidth."""
    sizes = sorted(ALL_REDUCE_SECONDS)
    if num_bytes <= sizes[0]:
        return ALL_REDUCE_SECONDS[sizes[0]]
    for low, high in pairwise(sizes):
        if num_bytes <= high:
            share = (num_bytes - low) / (high - low)
            return ALL_REDUCE_SECONDS[low] * (1 - share) + ALL_REDUCE_SECONDS[high] * share
    return ALL_REDUCE_SECONDS[sizes[-1]] * num_bytes / sizes[-1]


@dataclass(frozen=True)
class RankStep:
    """One decode step on each of N boxes."""

    num_boxes: int
    rank_bytes: int
    """Read on a rank, experts as expected."""
    read_seconds: float
    num_all_reduces: int
    all_reduce_bytes: int
    all_reduce_seconds: float
    """All of them together."""
    tokens_per_step: float

    @property
    def step_seconds(self) -> float:
        return self.read_seconds + self.all_reduce_seconds

    @property
    def tokens_per_second(self) -> float:
        """Over all streams."""
        return self.tokens_per_step / self.step_seconds


@dataclass(frozen=True)
class BoxesPlan:
    """N boxes beside one."""

    weights: Weights
    box: Box
    num_boxes: int
    request: MemoryRequest
    workload: Workload
    memory: Mapping[int, MemoryPlan | str]
    """By number of boxes: the plan of a rank, or why it does not fit."""
    steps: Mapping[int, RankStep]
    vllm_tokens: Mapping[int, int]
    """By number of boxes: tokens of KV that vLLM holds beside the states of its sequences."""
    published: tuple[PublishedPair, ...]
    """Empty for another box than those that were measured."""

    @property
    def speedup(self) -> float:
        return self.steps[self.num_boxes].tokens_per_second / self.steps[1].tokens_per_second


def plan_boxes(weights: Weights, box: Box, num_boxes: int, request: MemoryRequest, workload: Workload) -> BoxesPlan:
    """The plan for `num_boxes` boxes, one rank each, and for one of them."""
    if num_boxes < 2:
        raise UsageError(f"--boxes is {num_boxes}; give 2 or more, or use `onebox plan` for one.")
    if box.usable is None:
        raise UsageError(f"The bandwidth of {box.name} is not known, so no speed can be projected; name a --box.")
    rank_spec(weights.spec, num_boxes, "--boxes")  # refuses what does not divide
    counts = (1, num_boxes)
    memory = {count: _memory(weights, box, count, request) for count in counts}
    steps = {count: _step(weights, box, count, request, workload) for count in counts}
    tokens = {
        count: _vllm_tokens(weights.spec, count, plan) for count, plan in memory.items() if isinstance(plan, MemoryPlan)
    }
    published = _published(weights.model) if box.name == MEASURED_BOX else ()
    return BoxesPlan(weights, box, num_boxes, request, workload, memory, steps, tokens, published)


def _published(model: str) -> tuple[PublishedPair, ...]:
    """Of this model, else of all."""
    named = model.lower().rpartition("/")[2]
    return tuple(pair for pair in PUBLISHED if named.startswith(pair.model)) or PUBLISHED


def _memory(weights: Weights, box: Box, count: int, request: MemoryRequest) -> MemoryPlan | str:
    stored = class_bytes_per_rank(weights.spec, weights.stored, count)
    try:
        return plan_memory(rank_spec(weights.spec, count), stored, box, request)
    except DoesNotFitError as error:
        return str(error).partition("\n")[0]


def _step(weights: Weights, box: Box, count: int, request: MemoryRequest, workload: Workload) -> RankStep:
    spec, stored = rank_spec(weights.spec, count), class_bytes_per_rank(weights.spec, weights.stored, count)
    projection = project(spec, stored, box, request.kv, workload)
    reduced = workload.streams * (1 + workload.drafts) * spec.hidden_size * _ACTIVATION_BYTES
    num_reduces = 0 if count == 1 else 2 * (spec.num_hidden_layers + workload.mtp_drafts) + 1
    return RankStep(
        num_boxes=count,
        rank_bytes=projection.expected.total_bytes,
        read_seconds=_read_seconds(projection, box) / VLLM_SHARE,
        num_all_reduces=num_reduces,
        all_reduce_bytes=reduced,
        all_reduce_seconds=num_reduces * all_reduce_seconds(reduced) * _more_boxes(count),
        tokens_per_step=workload.streams * workload.tokens_per_step,
    )


def _more_boxes(count: int) -> float:
    """What an all-reduce takes among `count` boxes, by that between two."""
    return 1 + _SHARE_PER_BOX * max(0, count - 2)


def _read_seconds(projection: Projection, box: Box) -> float:
    rate = box.usable.bytes_per_second if box.usable else float("nan")
    return max(projection.expected.total_bytes / rate, projection.compute_seconds or 0.0)


def _vllm_tokens(spec: ModelSpec, count: int, plan: MemoryPlan) -> int:
    """In vLLM's blocks: those that its sequences' states take are no KV."""
    rank = rank_spec(spec, count)
    request = plan.request
    cache = vllm_cache(rank, request.kv.bytes_per_token_layer(rank), request.drafts)
    pool = plan.states_bytes + plan.prefix_bytes + plan.kv_bytes + plan.unused_bytes
    states = request.slots * cache.state_groups * cache.states_per_request
    return max(0, pool // cache.block_bytes - states) * cache.block_tokens
