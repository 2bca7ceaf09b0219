"""The first vLLM release with each thing that a checkpoint or a launch needs.

From vLLM's pull requests and tags; where a release is not named there, the first that was seen to have it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from onebox.spec.errors import UsageError

__all__ = [
    "BLOCK_DRAFTERS",
    "FAMILY",
    "FEW_BITS",
    "FP8_BLOCK_WEIGHTS",
    "METHODS",
    "MIXED_WINDOW_DFLASH",
    "MULTI_NODE",
    "QUANTIZED_EMBEDDING",
    "QUANTIZED_HEAD",
    "READ_VERSION",
    "Feature",
    "VllmVersion",
    "lowest_version",
]


class VllmVersion(NamedTuple):
    major: int
    minor: int
    patch: int = 0

    @staticmethod
    def parse(text: str) -> "VllmVersion":
        """`0.26`, `v0.26.0` or `0.26.1rc2+cu130`; what follows the numbers is not compared."""
        found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
        if not found:
            raise UsageError(f"--vllm {text!r} is not a version of vLLM; give one such as 0.26.0.")
        return VllmVersion(*(int(number or 0) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Feature(NamedTuple):
    """Something that older releases do not have."""

    name: str
    since: VllmVersion
    source: str


READ_VERSION = VllmVersion(0, 32, 0)
"""The release whose rules `onebox scaleout check` follows."""
METHODS = (
    "mtp",
    "dflash",
    "eagle",
    "eagle3",
    "dspark",
    "ngram",
    "ngram_gpu",
    "suffix",
    "draft_model",
    "medusa",
    "mlp_speculator",
    "extract_hidden_states",
    "custom_class",
)
"""Of vLLM's --speculative-config; names of single families' MTP are left out."""
FAMILY = Feature("Qwen3.5-MoE", VllmVersion(0, 17), "seen serving the 122B; 0.15 refuses the architecture")
MULTI_NODE = Feature("--nnodes with the mp executor", VllmVersion(0, 17), "in every release with the family")
FP8_BLOCK_WEIGHTS = Feature("FP8 blocks without quantised inputs", VllmVersion(0, 17), "#33280, 2026-01-30")
QUANTIZED_HEAD = Feature("a quantised LM head", VllmVersion(0, 20), "#37291, merged 2026-03-30")
BLOCK_DRAFTERS = Feature("DFlash drafters", VllmVersion(0, 20), "release notes")
QUANTIZED_EMBEDDING = Feature("quantised embeddings", VllmVersion(0, 23), "#44340")
FEW_BITS = Feature("integers of 2, 3, 5, 6 or 7 bits", VllmVersion(0, 25), "#46389, humming kernels")
MIXED_WINDOW_DFLASH = Feature("DFlash drafters with mixed windows", VllmVersion(0, 26), "2026-07-26")


def lowest_version(features: Iterable[Feature]) -> VllmVersion:
    """The first release that has all of them."""
    return max((feature.since for feature in features), default=FAMILY.since)
