"""Published sizes and speeds compared with the planner: sizes agree, and no speed exceeds the limit.

Every row names its source. Four are posts about this model on one DGX Spark:

    NVFP4 thread       NVIDIA forum, "Qwen3.5-122B-A10B NVFP4 Quantized for DGX Spark"
    122B blog          blog, "A 122B model on a single DGX Spark: measured for real" (25 April 2026)
    51 tok/s thread    NVIDIA forum, "Qwen3.5-122B-A10B on single Spark: up to 51 tok/s"
    51 tok/s blog      blog, "Pushing Qwen3.5-122B from 28.3 to 51 tok per second on a single DGX Spark"

`survey` is our survey of other published figures, `ours` our own measurements of vLLM on an H200.

A speed row asserts that the limit for its configuration is higher. Where a post gives no acceptance, the row accepts
every draft (k + 1 tokens per step), which makes the bound looser, never wrong. Where it gives a share of all draft
tokens, a step yields 1 + k * share. Context is the shortest that fits the row's prompt: again the looser choice.
Rows about other models (Gemma 4 in the 51 tok/s thread) or in unknown formats (llama.cpp's Q4_K_M) are left out.
"""

from dataclasses import dataclass, replace

import pytest

from onebox.planner.memory import loaded_weight_bytes
from onebox.planner.presets import PRESETS, WeightPreset, named_preset
from onebox.planner.roofline import Projection, Workload, project
from onebox.spec.hardware import BOXES, GIB, Bandwidth
from onebox.spec.kv import KVFormat
from onebox.spec.modules import ModuleClass
from onebox.spec.shapes import named_spec
from onebox.spec.weights import WeightFormat

BIG, SMALL = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b"
GB = 10**9
# Formats that a row names but no preset does.
HYBRID_BF16_HEAD = WeightPreset(
    "hybrid without the INT8 head",
    "step 1 of albond's recipe",
    {kind: fmt for kind, fmt in PRESETS["hybrid-mtp16"].formats.items() if kind is not ModuleClass.LM_HEAD},
)
ALL_NVFP4 = WeightPreset(
    "every matrix NVFP4", "the least that an NVFP4 engine can read", dict.fromkeys(ModuleClass, WeightFormat.NVFP4)
)


@dataclass(frozen=True)
class Size:
    """A published size: `ours` may differ by `tolerance` (a share), for the reason given."""

    source: str
    figure_bytes: float
    preset: str
    with_mtp: bool
    tolerance: float
    why: str
    model: str = BIG


SIZES = [
    Size(
        "NVFP4 thread: AutoRound INT4, 14 shards, 67 GB", 67 * GB, "autoround-int4", False, 0.008, "two digits printed"
    ),
    Size(
        "NVFP4 thread: AutoRound INT4 on the GPU, 62.65 GiB",
        62.65 * GIB,
        "autoround-int4",
        False,
        0.0015,
        "0.06 GiB less than the file: not traced; zero points that a symmetric kernel drops would be 0.015 to 0.44",
    ),
    Size("NVFP4 thread: txn545 NVFP4, 2 shards, 78 GB", 78 * GB, "nvfp4", False, 0.007, "two digits printed"),
    Size("122B blog: Sehyo NVFP4, 81.5 GB", 81.5 * GB, "nvfp4-llmc", True, 0.001, "three digits printed"),
    Size(
        "122B blog: Sehyo NVFP4, `Checkpoint size: 75.89 GiB`",
        75.89 * GIB,
        "nvfp4-llmc",
        True,
        0.0005,
        "vLLM counts files; the headers of 148,000 tensors are about 0.02 GiB",
    ),
    Size(
        "122B blog: Sehyo NVFP4 on the GPU, 76.02 GiB",
        76.02 * GIB,
        "nvfp4-llmc",
        True,
        0.0025,
        "0.15 GiB more than the file: not traced",
    ),
    Size("NVFP4 thread title, 122B blog: BF16, 234 GB", 234 * GIB, "bf16", True, 0.006, "GiB by `du`, called GB"),
]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row.source)
def test_predicted_sizes_are_the_published_ones(row):
    stored = named_preset(row.preset).weight_bytes(named_spec(row.model))
    ours = loaded_weight_bytes(stored, with_mtp=row.with_mtp, with_vision=True)
    assert ours == pytest.approx(row.figure_bytes, rel=row.tolerance), row.why


@pytest.mark.parametrize(("model", "expected_bytes"), [(BIG, 5_047_358_464), (SMALL, 1_689_281_536)])
def test_the_mtp_head_has_its_published_size(model, expected_bytes):
    """4.70 GiB for the 122B; the 122B blog and the 51 tok/s thread call it 5 GB and 4.8 GB."""
    stored = named_preset("bf16").weight_bytes(named_spec(model))
    assert sum(size for kind, size in stored.items() if kind.in_mtp) == expected_bytes


def test_two_published_sizes_are_not_explained():
    """Pinned until the reason is known. See docs/planner.md."""
    spec = named_spec(BIG)
    # Intel's repository is 76.8 GB in total; the shards that the NVFP4 thread loaded (67 GB) and the MTP file are 72.4.
    intel = sum(named_preset("autoround-int4").weight_bytes(spec).values())
    assert intel / GB == pytest.approx(72.4, abs=0.05)
    # The 122B blog gives 75.6 GB for txn545, the NVFP4 thread measured 78 GB for the same repository.
    txn545 = loaded_weight_bytes(named_preset("nvfp4").weight_bytes(spec), with_mtp=False, with_vision=True)
    assert txn545 / GB == pytest.approx(78.4, abs=0.05)


@dataclass(frozen=True)
class Speed:
    """A published speed over all streams. `kept` is tokens per step and stream; None: not published, accept all."""

    source: str
    tokens_per_second: float
    weights: str | WeightPreset
    drafts: int = 0
    kept: float | None = None
    streams: int = 1
    context: int = 0
    box: str = "dgx-spark"
    model: str = BIG
    kv: str = "bf16"
    is_mtp: bool = True
    boxes: int = 1


def mtp2(source: str, speed: float, share: float | None = None, **more) -> Speed:
    """A row of the 122B blog: Sehyo NVFP4, fp8 KV, MTP-2; `share` is the best acceptance it gives for the workload."""
    kept = None if share is None else 1 + 2 * share
    return Speed(f"122B blog, {source}", speed, "nvfp4-llmc", drafts=2, kept=kept, kv="fp8", **more)


def dflash(source: str, speed: float, drafts: int = 12, weights: str = "hybrid-mtp16", **more) -> Speed:
    """A block drafter of unpublished size and acceptance: drafting costs nothing and all drafts are accepted."""
    return Speed(f"survey, {source}", speed, weights, drafts=drafts, is_mtp=False, **more)


NVFP4_THREAD = [
    Speed("NVFP4 thread, INT4, think mode", 28.4, "autoround-int4"),
    Speed("NVFP4 thread, INT4, text", 28.6, "autoround-int4"),
    Speed("NVFP4 thread, INT4, Turkish", 27.7, "autoround-int4"),
    Speed("NVFP4 thread, INT4, vision", 17.2, "autoround-int4"),
    Speed("NVFP4 thread, INT4, tools", 5.7, "autoround-int4"),
    Speed("NVFP4 thread, INT4, server peak", 28.7, "autoround-int4"),
    Speed("NVFP4 thread, NVFP4, think mode", 15.1, "nvfp4"),
    Speed("NVFP4 thread, NVFP4, text", 15.1, "nvfp4"),
    Speed("NVFP4 thread, NVFP4, Turkish", 14.8, "nvfp4"),
    Speed("NVFP4 thread, NVFP4, vision", 9.8, "nvfp4"),
    Speed("NVFP4 thread, NVFP4, server peak", 15.4, "nvfp4"),
]
BLOG_122B = [
    *(mtp2(f"Q&A, {name}", speed, 0.74) for name, speed in (("32K", 24.7), ("32K tuned", 25.2), ("128K", 25.6))),
    *(mtp2(f"code, {name}", speed, 0.99) for name, speed in (("32K", 30.1), ("32K tuned", 29.7), ("128K", 30.1))),
    *(mtp2(f"JSON, {name}", speed, 1.0) for name, speed in (("32K", 31.0), ("32K tuned", 30.7), ("128K", 30.9))),
    *(mtp2(f"Hungarian, {name}", speed, 0.67) for name, speed in (("32K", 23.7), ("32K tuned", 23.9), ("128K", 24.6))),
    *(
        mtp2(f"RAG 8K, {name}", speed, 0.78, context=7500)
        for name, speed in (("32K", 26.9), ("32K tuned", 25.7), ("128K", 26.1))
    ),
    mtp2("RAG 32K", 26.4, 0.81, context=30_000),
    mtp2("4 streams, short", 63.86, 0.7613, streams=4),
    mtp2("4 streams, mixed", 57.65, 0.7389, streams=4),
    mtp2("4 streams, 108K", 14.65, 0.7589, streams=4, context=108_000),
    mtp2("4 streams, 108K, decode only", 4 * 6.2, 0.7589, streams=4, context=108_000),
    mtp2("2 streams, 108K", 6.54, 0.7584, streams=2, context=108_000),
    mtp2("2 streams, 108K, decode only", 2 * 20.6, 0.7584, streams=2, context=108_000),
    Speed("122B blog, 35B FP8", 60, "fp8", model=SMALL),
    Speed("122B blog, 35B FP8, 4 users", 100, "fp8", streams=4, model=SMALL),
    Speed("122B blog, hearsay, two Sparks", 70, "autoround-int4", drafts=2, streams=4, boxes=2),
]
THREAD_51 = [
    *(Speed("51 tok/s thread, INT4", speed, "autoround-int4") for speed in (28.3, 28.4, 27.3)),
    *(Speed("51 tok/s thread, hybrid", speed, HYBRID_BF16_HEAD) for speed in (30.8, 30.9, 29.7, 31.0)),
    *(
        Speed("51 tok/s thread, hybrid, MTP-1 at 95%", speed, HYBRID_BF16_HEAD, drafts=1, kept=1.95)
        for speed in (38.4, 37.8, 39.1, 39.0, 36.3, 39.9)
    ),
    *(
        Speed("51 tok/s thread, hybrid, MTP-1, a reader's run", speed, HYBRID_BF16_HEAD, drafts=1)
        for speed in (38.6, 40.0, 39.5, 36.7)
    ),
    # A bug in llama-benchy counted steps, so one token per step bounds these.
    Speed(
        "51 tok/s thread, hybrid, MTP-1, llama-benchy at 2K", 21.05, HYBRID_BF16_HEAD, drafts=1, kept=1.0, context=2048
    ),
    Speed(
        "51 tok/s thread, hybrid, MTP-1, llama-benchy at 12K",
        20.95,
        HYBRID_BF16_HEAD,
        drafts=1,
        kept=1.0,
        context=12_000,
    ),
    *(
        Speed("51 tok/s thread, INT4, MTP-1", speed, "autoround-int4", drafts=1, kept=1.95)
        for speed in (36.1, 37.4, 36.5, 34.4, 37.9)
    ),
    Speed("51 tok/s thread, NVFP4 (RedHatAI)", 16.6, "nvfp4-llmc"),
    Speed("51 tok/s thread, two Sparks, MTP", 56, "autoround-int4", drafts=1, boxes=2),
]
BLOG_51 = [
    Speed("51 tok/s blog, v2: MTP-2 and INT8 head", 51, "hybrid-mtp16", drafts=2),
    Speed("51 tok/s blog, v2-tq: TurboQuant KV", 39, "hybrid-mtp16", drafts=2, kv="turboquant"),
    Speed("51 tok/s blog, MTP-2 without INT8 head", 38.4, HYBRID_BF16_HEAD, drafts=2),
    Speed("51 tok/s blog, 35B", 112, "hybrid-mtp16", drafts=2, model=SMALL),
]
SURVEY = [
    Speed("survey, NVFP4, stock vLLM", 17, "nvfp4"),
    Speed("survey, nvidia NVFP4, MTP-2, random prompts", 22.4, "nvfp4", drafts=2),
    dflash("nvidia NVFP4, DFlash 8, random prompts", 20.3, drafts=8, weights="nvfp4"),
    Speed("survey, Atlas NVFP4, tiny prompt", 32, ALL_NVFP4),
    Speed("survey, Atlas NVFP4, batch 1", 33.4, ALL_NVFP4),
    Speed("survey, Entrpi, INT4", 28.2, "autoround-int4"),
    Speed("survey, Entrpi, FP8 shared experts and INT8 head", 36.0, "hybrid-mtp16"),
    Speed("survey, albond v2.4", 51.58, "hybrid-mtp16", drafts=2),
    Speed("survey, albond v2.4, LongCode", 54.9, "hybrid-mtp16", drafts=2),
    dflash("albond's harness", 59.0),
    dflash("agent turns, median", 81),
    Speed("survey, agent turns with MTP-2", 39.9, "hybrid-mtp16", drafts=2),
    dflash("prose", 48.8),
    dflash("code", 66.9),
    dflash("agentic, 6K", 121.8, context=6000),
    dflash("counting", 124.5),
    Speed("survey, 35B, INT4, INT8 head, MTP-2", 128, "hybrid-mtp16", drafts=2, model=SMALL),
    Speed("survey, 35B, Atlas NVFP4, MTP-2", 133, ALL_NVFP4, drafts=2, model=SMALL),
    dflash("3 streams, agentic", 200, streams=3),
    dflash("3 streams, code", 129, streams=3),
    dflash("3 streams, prose", 92.5, streams=3),
    Speed("survey, nvidia NVFP4, MTP-2, 4 streams, random", 47.8, "nvfp4", drafts=2, streams=4),
]
H200 = [
    Speed("ours, vLLM, plain", 142, "autoround-int4", context=32, box="h200"),
    Speed("ours, vLLM, MTP-2", 265, "autoround-int4", drafts=2, kept=2.62, context=32, box="h200"),
    Speed("ours, vLLM, plain at 8,000", 119, "autoround-int4", context=8000, box="h200"),
    Speed("ours, vLLM, MTP-2 at 8,000", 184, "autoround-int4", drafts=2, kept=2.62, context=8000, box="h200"),
    Speed("ours, vLLM, plain, 4 streams", 505, "autoround-int4", streams=4, context=32, box="h200"),
    Speed("ours, vLLM, MTP-2, 4", 745, "autoround-int4", drafts=2, kept=2.62, streams=4, context=32, box="h200"),
]
SPEEDS = NVFP4_THREAD + BLOG_122B + THREAD_51 + BLOG_51 + SURVEY + H200


def projection(row: Speed) -> Projection:
    preset = named_preset(row.weights) if isinstance(row.weights, str) else row.weights
    spec, box = named_spec(row.model), BOXES[row.box]
    if row.boxes > 1:
        box = replace(
            box,
            peak=Bandwidth(row.boxes * box.peak.bytes_per_second, "all boxes together"),
            usable=Bandwidth(row.boxes * box.usable.bytes_per_second, "all boxes together"),
        )
    acceptance = None if row.kept is None else ((row.kept - 1) / row.drafts,) * row.drafts
    workload = Workload(row.streams, row.drafts, row.context, acceptance, row.is_mtp)
    return project(spec, preset.weight_bytes(spec), box, KVFormat.parse(row.kv), workload)


@pytest.mark.parametrize("row", SPEEDS, ids=lambda row: f"{row.source}: {row.tokens_per_second}")
def test_nobody_beats_the_limit(row):
    assert row.tokens_per_second < projection(row).limit.tokens_per_second


def speed(source: str) -> Speed:
    return next(row for row in SPEEDS if row.source == source)


@pytest.mark.parametrize(
    "source",
    [
        "51 tok/s thread, INT4",
        "51 tok/s thread, hybrid",
        "51 tok/s thread, hybrid, MTP-1 at 95%",
        "NVFP4 thread, NVFP4, text",
        "122B blog, JSON, 128K",
        "survey, Entrpi, FP8 shared experts and INT8 head",
        "survey, Atlas NVFP4, batch 1",
    ],
)
def test_the_limit_says_something(source):
    """Rows whose bytes and tokens per step are known reach at least half of it."""
    row = speed(source)
    assert 0.5 < row.tokens_per_second / projection(row).limit.tokens_per_second < 1


@pytest.mark.parametrize(
    ("source", "share"),
    [
        ("51 tok/s thread, INT4", 0.86),
        ("51 tok/s thread, hybrid", 0.87),
        ("survey, Entrpi, FP8 shared experts and INT8 head", 0.90),
        ("NVFP4 thread, NVFP4, text", 0.88),
        ("122B blog, JSON, 128K", 0.87),
        ("122B blog, 4 streams, short", 1.01),
    ],
)
def test_the_expectation_forecasts_what_bandwidth_bound_engines_reach(source, share):
    """One stream reaches 0.86 to 0.90 of it. Four exceed it: rows of one text share experts; it is not a bound."""
    row = speed(source)
    reached = row.tokens_per_second / projection(row).expected_rate.tokens_per_second
    assert reached == pytest.approx(share, abs=0.01)


def test_bytes_alone_explain_why_nvfp4_is_slower_than_int4():
    """The NVFP4 thread blames kernels for 15.1 against 28.6 tok/s (1.89x); DeltaNet in BF16 explains 1.92x."""
    nvfp4, int4 = (projection(speed(f"NVFP4 thread, {name}, text")).least.total_bytes for name in ("NVFP4", "INT4"))
    assert nvfp4 / int4 == pytest.approx(1.92, abs=0.01)
