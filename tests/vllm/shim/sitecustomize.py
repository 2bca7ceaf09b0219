"""Makes torchvision's CUDA build importable beside a CPU torch: declares the operators it expects to find.

PyPI offers no CPU build of torchvision, and vLLM imports it whether or not there are pictures.
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareOperators(MetaPathFinder):
    """Finds nothing itself; when torchvision is looked for, declares its operators first."""

    library = None

    def find_spec(self, name, path, target=None):  # noqa: ARG002 (the import system's signature)
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                self.library.define(schema)


sys.meta_path.insert(0, DeclareOperators())
