"""The shape of a DFlash block drafter, `DFlashSpec`: its layers, their masks, its tensors, and whether it fits a model.

A DFlash drafter is a few Qwen3-style layers without an embedding and a head of their own. Its context is the target's
residual stream behind some layers (taps); its input is the last token and masks, and row j's logits are those of the
token at row j's own position. `dflash_config.py` reads it from config.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import Module, ModuleClass

__all__ = ["SLIDING", "DFlashSpec", "refuse_other_target"]

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DFlashSpec:
    """All config values that a drafter's tensors and arithmetic depend on. Field names are config.json's."""

    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int | None
    """Positions that a sliding layer sees; None if no layer slides."""
    is_causal: bool | None
    """Forces the causality of all layers; None: sliding layers are causal, full ones are not."""
    target_layer_ids: tuple[int, ...]
    """The taps: a feature is the target's residual stream behind each of these layers, side by side in this order."""
    mask_token_id: int
    block_size: int
    num_target_layers: int | None

    @property
    def max_drafts(self) -> int:
        """The most drafts of one pass: the block without its first row, the last token."""
        return self.block_size - 1

    @property
    def feature_size(self) -> int:
        """Numbers of one position's taps: the columns of `fc`."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Numbers of one position's keys in one layer, and of its values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SLIDING)

    def causal(self, layer: int) -> bool:
        """Whether the layer's queries see no key behind their own position, of the context and of the block alike."""
        return self._slides(layer) if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """A query sees keys less than this many positions away, before it and, unless causal, behind it; None: all."""
        return self.sliding_window if self._slides(layer) else None

    def modules(self) -> Iterator[Module]:
        """All weights of the drafter in the order of a forward pass; their names have no prefix."""
        hidden = self.hidden_size
        yield _matrix("fc", hidden, self.feature_size)
        yield _vector("hidden_norm", hidden)
        for layer in range(self.num_hidden_layers):
            yield from self._layer(f"layers.{layer}")
        yield _vector("norm", hidden)

    def _layer(self, name: str) -> Iterator[Module]:
        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        yield _vector(f"{name}.input_layernorm", hidden)
        yield _matrix(f"{name}.self_attn.q_proj", queries, hidden)
        yield _matrix(f"{name}.self_attn.k_proj", self.kv_size, hidden)
        yield _matrix(f"{name}.self_attn.v_proj", self.kv_size, hidden)
        yield _matrix(f"{name}.self_attn.o_proj", hidden, queries)
        yield _vector(f"{name}.self_attn.q_norm", self.head_dim)
        yield _vector(f"{name}.self_attn.k_norm", self.head_dim)
        yield _vector(f"{name}.post_attention_layernorm", hidden)
        yield _matrix(f"{name}.mlp.gate_proj", self.intermediate_size, hidden)
        yield _matrix(f"{name}.mlp.up_proj", self.intermediate_size, hidden)
        yield _matrix(f"{name}.mlp.down_proj", hidden, self.intermediate_size)

    def _slides(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING


def _matrix(name: str, rows: int, columns: int) -> Module:
    return Module(name, ModuleClass.DRAFTER, (rows, columns), True, f"{name}.weight")


def _vector(name: str, size: int) -> Module:
    return Module(name, ModuleClass.DRAFTER, (size,), False, f"{name}.weight")


def refuse_other_target(drafter: DFlashSpec, target: ModelSpec) -> None:
    """Raises `MismatchError` with the reason if `drafter` was not made for a model of this shape."""
    reason = _misfit(drafter, target)
    if reason:
        raise MismatchError(f"The drafter was made for another model: {reason}; give the drafter of this model.")


def _misfit(drafter: DFlashSpec, target: ModelSpec) -> str | None:
    if drafter.hidden_size != target.hidden_size:
        return f"its hidden_size is {drafter.hidden_size:,}, the model's {target.hidden_size:,}"
    if drafter.vocab_size != target.vocab_size:
        return f"its vocab_size is {drafter.vocab_size:,}, the model's {target.vocab_size:,}"
    layers = target.num_hidden_layers
    if drafter.num_target_layers not in (None, layers):
        return f"its num_target_layers is {drafter.num_target_layers}, and the model has {layers} layers"
    if max(drafter.target_layer_ids) >= layers:
        return f"it taps layer {max(drafter.target_layer_ids)}, and the model's last layer is {layers - 1}"
    return None
