"""What stock transformers cannot read of a checkpoint that is described as compressed-tensors, in sentences.

As of transformers 5.23; `tests/checkpoint/test_stock_tools.py` holds each sentence against the installed version.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from onebox.spec.modules import ModuleClass
from onebox.spec.weights import Layout, Stored, WeightFormat

__all__ = ["stock_limits"]


def stock_limits(quantization: Mapping[str, Any] | None, formats: Iterable[tuple[ModuleClass, Stored]]) -> list[str]:
    """Sentences on the formats of module classes that transformers stops at or reads wrongly; none if it reads all."""
    if not quantization or quantization.get("quant_method") != "compressed-tensors":
        return []
    held = set(formats)
    stored_experts = {stored for kind, stored in held if kind is ModuleClass.EXPERTS}
    experts = {stored.format for stored in stored_experts}
    limits = []
    if WeightFormat.FP8 in experts:
        limits.append("Stock transformers (5.23) cannot open FP8 experts described as compressed-tensors: it stops.")
    if WeightFormat.NVFP4 in experts:
        limits.append(
            "Stock transformers (5.23) opens NVFP4 experts and ignores their global scales: its numbers are wrong."
        )
    if sum(stored.layout is not Layout.PLAIN for stored in stored_experts) > 1:
        limits.append(
            "Stock transformers (5.23) takes one format for all routed experts; here there are several: its numbers "
            "are wrong. vLLM takes one format for the experts of a layer, and stops at others."
        )
    if any(stored.has_zero_points for stored in stored_experts):
        limits.append("Stock transformers (5.23) cannot open asymmetric INT4 (symmetric: false) experts: it stops.")
    return limits
