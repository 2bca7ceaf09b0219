"""The layers that vLLM makes of a Qwen3.5-MoE: their names and classes, and what of each lies on a rank.

vLLM fuses matrices (q, k and v; gate and up; DeltaNet's in_proj_qkv and in_proj_z, in_proj_b and in_proj_a), and a
layer of routed experts is one layer. With tensor parallel size N every rank holds 1/N of the rows of a layer, or of its
columns where the layer adds up the ranks' results, and vectors whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from onebox.scaleout.targets import FUSED_PARTS
from onebox.spec.model import ModelSpec
from onebox.spec.modules import Module, ModuleClass, modules

__all__ = ["RENAMED", "RENAMED_TEXT_ONLY", "LayerPart", "Split", "VllmLayer", "vllm_layers"]

RENAMED = {
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "mtp.": None,
}
"""Beginnings of names, and vLLM's in their place, in its multimodal class; the MTP layer is another model's there."""
RENAMED_TEXT_ONLY = {"model.language_model.": "model.", "mtp.": None}

_FUSED_OF = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}
_BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "in_proj_qkvz": "MergedColumnParallelLinear",
    "in_proj_ba": "MergedColumnParallelLinear",
    "lm_head": "ParallelLMHead",
    "embed_tokens": "VocabParallelEmbedding",
    "fc": "ColumnParallelLinear",
    "experts": "RoutedExperts",
}
_PLAIN_LINEARS = ("mlp.gate", "mlp.shared_expert_gate")
"""Linear layers that no recipe quantises and that vLLM asks its quantisation about all the same."""


class Split(StrEnum):
    """How a layer is divided among the ranks."""

    ROWS = "rows"
    COLUMNS = "columns"
    EXPERTS = "expert width"
    """Routed experts: gate and up by rows, down by columns."""
    WHOLE = "whole"


class LayerPart(NamedTuple):
    """Rows of a layer that are divided by themselves: q, k and v of a fused layer."""

    name: str
    rows: int
    columns: int
    heads: int | None = None
    """Heads that the rows belong to; a rank has whole ones. None: any number of rows."""


@dataclass(frozen=True)
class VllmLayer:
    """One layer of vLLM: the checkpoint's modules in it, and the parts that are divided one by one."""

    name: str
    class_name: str
    modules: tuple[Module, ...]
    parts: tuple[LayerPart, ...]
    split: Split

    @property
    def module_class(self) -> ModuleClass:
        return self.modules[0].module_class

    def is_by_columns(self, part: LayerPart) -> bool:
        """Whether a rank has some of the part's columns, and not of its rows."""
        return self.split is Split.COLUMNS or (self.split is Split.EXPERTS and part.name == "down_proj")

    @property
    def asked_names(self) -> tuple[str, ...]:
        """The names by which vLLM asks for the scheme: of routed experts only those of the first."""
        if self.split is not Split.EXPERTS:
            return (self.name,)
        return tuple(f"{self.name}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj"))


def vllm_layers(spec: ModelSpec) -> list[VllmLayer]:
    """All layers that hold a matrix, in the order of a forward pass; vectors and convolutions are in none."""
    grouped: dict[str, list[Module]] = {}
    for module in modules(spec):
        if module.is_matrix or module.name.endswith(_PLAIN_LINEARS) or _is_vision_linear(module):
            grouped.setdefault(_layer_name(spec, module), []).append(module)
    return [_layer(spec, name, members) for name, members in grouped.items()]


def _is_vision_linear(module: Module) -> bool:
    is_linear = module.name.endswith((".attn.qkv", ".attn.proj", ".linear_fc1", ".linear_fc2"))
    return module.module_class is ModuleClass.VISION and is_linear


def _layer_name(spec: ModelSpec, module: Module) -> str:
    """The name in vLLM of the layer that the module is in."""
    name = module.name
    renamed = RENAMED_TEXT_ONLY if spec.is_text_only else RENAMED
    for old, new in renamed.items():
        if new is not None and f"{name}.".startswith(old):
            name = f"{new}{f'{name}.'[len(old) :]}".rstrip(".")
            break
    stem, _, last = name.rpartition(".")
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    is_fused = last in _FUSED_OF and module.module_class is not ModuleClass.VISION
    return f"{stem}.{_FUSED_OF[last]}" if is_fused else name


def _layer(spec: ModelSpec, name: str, members: list[Module]) -> VllmLayer:
    last = name.rpartition(".")[2]
    order = {part: place for place, part in enumerate(FUSED_PARTS.get(last, ()))}
    ordered = tuple(sorted(members, key=lambda module: order.get(module.name.rpartition(".")[2], 0)))
    if last == "experts":
        return VllmLayer(name, _CLASSES[last], ordered, tuple(_expert_parts(spec)), Split.EXPERTS)
    plain = name.endswith(_PLAIN_LINEARS) or members[0].module_class is ModuleClass.VISION
    split = Split.WHOLE if plain else Split.COLUMNS if last in _BY_COLUMNS else Split.ROWS
    class_name = "ReplicatedLinear" if plain else _CLASSES.get(last, "RowParallelLinear")
    parts = tuple(part for module in ordered for part in _parts(spec, module, split))
    return VllmLayer(name, class_name, ordered, parts, split)


def _expert_parts(spec: ModelSpec) -> Iterator[LayerPart]:
    inner, hidden = spec.moe_intermediate_size, spec.hidden_size
    yield from (LayerPart(name, inner, hidden) for name in ("gate_proj", "up_proj"))
    yield LayerPart("down_proj", hidden, inner)


def _parts(spec: ModelSpec, module: Module, split: Split) -> Iterator[LayerPart]:
    name, (rows, columns) = module.name.rpartition(".")[2], (module.shape[0], module.shape[1])
    if name == "in_proj_qkv":
        # One matrix of the checkpoint, three shards of vLLM's layer.
        keys = spec.linear_num_key_heads
        for part, size in (("q", spec.key_dim), ("k", spec.key_dim), ("v", spec.value_dim)):
            yield LayerPart(f"in_proj_{part}", size, columns, keys if part != "v" else spec.linear_num_value_heads)
        return
    heads = {
        "q_proj": spec.num_attention_heads,
        "k_proj": spec.num_key_value_heads,
        "v_proj": spec.num_key_value_heads,
        "o_proj": spec.num_attention_heads,
        "in_proj_z": spec.linear_num_value_heads,
        "in_proj_a": spec.linear_num_value_heads,
        "in_proj_b": spec.linear_num_value_heads,
        "out_proj": spec.linear_num_value_heads,
    }
    yield LayerPart(name, rows, columns, None if split is Split.WHOLE else heads.get(name))
