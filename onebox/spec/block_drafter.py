"""A block drafter as the engine loads it: bytes of its weights, and what a step reads of them and of its context.

One pass over [last token, masks] drafts a whole block, so its weights are read once a step, whatever the depth. The
keys and values of newly accepted tokens are projected by a second copy of the layers' K and V matrices, stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onebox.spec.dflash import DFlashSpec
from onebox.spec.modules import Module
from onebox.spec.traffic import MatrixPacking, matrix_bytes
from onebox.spec.weights import WeightFormat

__all__ = ["DEFAULT_BLOCK_DRAFTS", "BlockDrafter", "is_context_projection"]

DEFAULT_BLOCK_DRAFTS = 12
"""Of a step, as the publishers run theirs."""

_BF16_BYTES = 2


@dataclass(frozen=True)
class BlockDrafter:
    """Shape, format by name, and bytes. `context_bytes` is the stacked copy of the K and V matrices."""

    spec: DFlashSpec
    format: str
    weight_bytes: int
    context_bytes: int

    @classmethod
    def predicted(
        cls, spec: DFlashSpec, weight_format: WeightFormat, packings: Mapping[WeightFormat, MatrixPacking]
    ) -> "BlockDrafter":
        """The drafter with all matrices in one format, as `onebox build` writes them; norms are BF16."""
        sizes = {module: _module_bytes(module, weight_format, packings) for module in spec.modules()}
        context = sum(size for module, size in sizes.items() if is_context_projection(module))
        return cls(spec, weight_format.value, sum(sizes.values()), context)

    @property
    def loaded_bytes(self) -> int:
        """On the device."""
        return self.weight_bytes + self.context_bytes

    def context_read_bytes(self, context_tokens: int, activation_bytes: int = _BF16_BYTES) -> int:
        """Keys and values that one sequence's block reads: a sliding layer's window, all of a full one."""
        spec = self.spec
        seen = (min(context_tokens, spec.window(i) or context_tokens) for i in range(spec.num_hidden_layers))
        return sum(seen) * 2 * spec.kv_size * activation_bytes

    def flops(self, num_rows: int, num_new_rows: float, context_tokens: int) -> float:
        """Of a pass over `num_rows` block rows, and of the context of `num_new_rows` tokens."""
        spec = self.spec
        matrices = [module for module in spec.modules() if module.is_matrix]
        layers = sum(module.numel for module in matrices if module.name != "fc")
        context = sum(module.numel for module in matrices if module.name == "fc" or is_context_projection(module))
        scores = sum(min(context_tokens, spec.window(i) or context_tokens) for i in range(spec.num_hidden_layers))
        attention = 2 * scores * spec.num_attention_heads * spec.head_dim
        return 2.0 * (num_rows * (layers + attention) + num_new_rows * context)


def is_context_projection(module: Module) -> bool:
    """Whether a module's rows are also in the stacked copy that projects the context."""
    return module.name.endswith((".k_proj", ".v_proj"))


def _module_bytes(module: Module, chosen: WeightFormat, packings: Mapping[WeightFormat, MatrixPacking]) -> int:
    if module.is_matrix and chosen in packings:
        return matrix_bytes(packings[chosen], module.shape[0], module.shape[1])
    return _BF16_BYTES * module.numel
