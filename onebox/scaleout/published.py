"""Published speeds of two boxes, beside which a projection can be held. None was measured by us."""

from typing import NamedTuple

__all__ = ["MEASURED_BOX", "PUBLISHED", "PublishedPair"]

MEASURED_BOX = "dgx-spark"
"""All figures are of these."""


class PublishedPair(NamedTuple):
    """One figure for two Sparks, and that of one Spark from the same source where there is one; tok/s, one stream."""

    model: str
    how: str
    one_box: str
    two_boxes: str
    source: str


PUBLISHED = (
    PublishedPair("qwen3.5-122b-a10b", "AutoRound INT4, vLLM, TP2", "", "~65", "NVIDIA forum, one user"),
    PublishedPair("qwen3.5-122b-a10b", "vLLM, TP2 with Ray, MTP", "", "up to 56", "an owner's logs"),
    PublishedPair("qwen3.5-122b-a10b", "Atlas, expert parallel, MTP", "", "46-51", "Atlas recipe, 4K of context"),
    PublishedPair("qwen3.5-122b-a10b", "hybrid, int8 head, no drafts", "36.0", "", "Entrpi"),
    PublishedPair("qwen3.5-122b-a10b", "hybrid, MTP-2", "51.6", "", "albond v2.4"),
    PublishedPair("qwen3.5-122b-a10b", "hybrid, DFlash n=12", "59.0", "", "Entrpi"),
    PublishedPair("qwen3.5-35b-a3b", "NVFP4, vLLM", "41.8", "67", "forum digest, 2026-07-14"),
    PublishedPair("qwen3.5-35b-a3b", "3.6, FP8, vLLM, TP2", "", "75-80", "NVIDIA forum, one user"),
    PublishedPair("qwen3.8-flash-next", "NVFP4, DGPP, own collectives", "41.7-49.6", "62-75", "DGPP benchmarks"),
)
