"""Every module of the model by name: its class, its shape and the name of its plain tensor.

A *module* is one logical weight (one expert's gate projection, one norm), independent of how it is stored. Formats that
split a weight over several tensors are defined in `weights.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from onebox.spec.model import FULL, ModelSpec, VisionSpec

__all__ = ["FusedExperts", "Module", "ModuleClass", "fused_experts", "modules"]


class ModuleClass(StrEnum):
    """The role of a weight. Recipes select formats, and reports count bytes, per class."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DELTA = "delta"
    DELTA_GATES = "delta gates"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED = "shared expert"
    SMALL = "norms and small"
    LM_HEAD = "lm head"
    MTP_EXPERTS = "mtp experts"
    MTP_SHARED = "mtp shared expert"
    MTP_ATTENTION = "mtp attention"
    MTP_FC = "mtp fc"
    MTP_SMALL = "mtp small"
    VISION = "vision"
    DRAFTER = "drafter"
    """All weights of a block drafter, which is a checkpoint of its own (`dflash.py`)."""

    @property
    def in_mtp(self) -> bool:
        return self.value.startswith("mtp")


class Module(NamedTuple):
    """One weight of the model. `shape` is its plain shape; a matrix is [out, in] and may be stored quantised."""

    name: str
    module_class: ModuleClass
    shape: tuple[int, ...]
    is_matrix: bool
    plain_tensor: str
    """The tensor's name when the weight is not quantised: `name.weight`, or `name` for a bare parameter."""

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class FusedExperts:
    """One layer's experts in a 3-D tensor [experts, rows, columns]; an expert's rows are its `parts`, in order."""

    tensor: str
    module_class: ModuleClass
    shape: tuple[int, int, int]
    experts_name: str
    parts: tuple[str, ...]


def modules(spec: ModelSpec) -> Iterator[Module]:
    """All modules of the model, in the order of a forward pass; the MTP head and the vision tower come last."""
    prefix = spec.text_prefix
    hidden = spec.hidden_size
    yield _matrix(f"{prefix}embed_tokens", ModuleClass.EMBEDDING, spec.vocab_size, hidden)
    for layer, kind in enumerate(spec.layer_types):
        name = f"{prefix}layers.{layer}"
        yield _vector(f"{name}.input_layernorm", hidden)
        yield from _attention(spec, name, in_mtp=False) if kind == FULL else _delta_net(spec, name)
        yield _vector(f"{name}.post_attention_layernorm", hidden)
        yield from _moe(spec, name, in_mtp=False)
    yield _vector(f"{prefix}norm", hidden)
    if not spec.tie_word_embeddings:
        yield _matrix("lm_head", ModuleClass.LM_HEAD, spec.vocab_size, hidden)
    if spec.mtp_num_hidden_layers:
        yield from _mtp(spec)
    if spec.vision:
        yield from _vision(spec.vision)


def fused_experts(spec: ModelSpec) -> Iterator[FusedExperts]:
    """The 3-D tensors in which a BF16 checkpoint may store all experts of a layer; gate rows come before up rows."""
    layers = [(f"{spec.text_prefix}layers.{i}", False) for i in range(spec.num_hidden_layers)]
    layers += [(f"mtp.layers.{i}", True) for i in range(spec.mtp_num_hidden_layers)]
    experts, hidden, inner = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    for layer, in_mtp in layers:
        name = f"{layer}.mlp.experts"
        kind = ModuleClass.MTP_EXPERTS if in_mtp else ModuleClass.EXPERTS
        gate_up = (experts, 2 * inner, hidden)
        yield FusedExperts(f"{name}.gate_up_proj", kind, gate_up, name, ("gate_proj", "up_proj"))
        yield FusedExperts(f"{name}.down_proj", kind, (experts, hidden, inner), name, ("down_proj",))


def _matrix(name: str, kind: ModuleClass, rows: int, columns: int) -> Module:
    return Module(name, kind, (rows, columns), True, f"{name}.weight")


def _vector(name: str, *shape: int, kind: ModuleClass = ModuleClass.SMALL) -> Module:
    return Module(name, kind, shape, False, f"{name}.weight")


def _attention(spec: ModelSpec, layer: str, *, in_mtp: bool) -> Iterator[Module]:
    kind = ModuleClass.MTP_ATTENTION if in_mtp else ModuleClass.ATTENTION
    small = ModuleClass.MTP_SMALL if in_mtp else ModuleClass.SMALL
    name, hidden, head = f"{layer}.self_attn", spec.hidden_size, spec.head_dim
    # Twice the rows: each head's query is followed by its output gate.
    yield _matrix(f"{name}.q_proj", kind, spec.num_attention_heads * head * 2, hidden)
    yield _matrix(f"{name}.k_proj", kind, spec.num_key_value_heads * head, hidden)
    yield _matrix(f"{name}.v_proj", kind, spec.num_key_value_heads * head, hidden)
    yield _matrix(f"{name}.o_proj", kind, hidden, spec.num_attention_heads * head)
    yield _vector(f"{name}.q_norm", head, kind=small)
    yield _vector(f"{name}.k_norm", head, kind=small)


def _delta_net(spec: ModelSpec, layer: str) -> Iterator[Module]:
    name, hidden = f"{layer}.linear_attn", spec.hidden_size
    heads, small = spec.linear_num_value_heads, ModuleClass.SMALL
    yield _matrix(f"{name}.in_proj_qkv", ModuleClass.DELTA, spec.conv_dim, hidden)
    yield _matrix(f"{name}.in_proj_z", ModuleClass.DELTA, spec.value_dim, hidden)
    yield _matrix(f"{name}.in_proj_b", ModuleClass.DELTA_GATES, heads, hidden)
    yield _matrix(f"{name}.in_proj_a", ModuleClass.DELTA_GATES, heads, hidden)
    yield _vector(f"{name}.conv1d", spec.conv_dim, 1, spec.linear_conv_kernel_dim)
    yield Module(f"{name}.A_log", small, (heads,), False, f"{name}.A_log")
    yield Module(f"{name}.dt_bias", small, (heads,), False, f"{name}.dt_bias")
    yield _vector(f"{name}.norm", spec.linear_value_head_dim)
    yield _matrix(f"{name}.out_proj", ModuleClass.DELTA, hidden, spec.value_dim)


def _moe(spec: ModelSpec, layer: str, *, in_mtp: bool) -> Iterator[Module]:
    experts = ModuleClass.MTP_EXPERTS if in_mtp else ModuleClass.EXPERTS
    shared = ModuleClass.MTP_SHARED if in_mtp else ModuleClass.SHARED
    router = ModuleClass.MTP_SMALL if in_mtp else ModuleClass.ROUTER
    small = ModuleClass.MTP_SMALL if in_mtp else ModuleClass.SMALL
    name, hidden = f"{layer}.mlp", spec.hidden_size
    # The router is a bare parameter in the model's code, so quantisation tools leave it unquantised.
    yield _vector(f"{name}.gate", spec.num_experts, hidden, kind=router)
    for expert in range(spec.num_experts):
        yield from _swiglu(f"{name}.experts.{expert}", experts, hidden, spec.moe_intermediate_size)
    yield from _swiglu(f"{name}.shared_expert", shared, hidden, spec.shared_expert_intermediate_size)
    yield _vector(f"{name}.shared_expert_gate", 1, hidden, kind=small)


def _swiglu(name: str, kind: ModuleClass, hidden: int, inner: int) -> Iterator[Module]:
    yield _matrix(f"{name}.gate_proj", kind, inner, hidden)
    yield _matrix(f"{name}.up_proj", kind, inner, hidden)
    yield _matrix(f"{name}.down_proj", kind, hidden, inner)


def _mtp(spec: ModelSpec) -> Iterator[Module]:
    hidden, small = spec.hidden_size, ModuleClass.MTP_SMALL
    yield _vector("mtp.pre_fc_norm_embedding", hidden, kind=small)
    yield _vector("mtp.pre_fc_norm_hidden", hidden, kind=small)
    yield _matrix("mtp.fc", ModuleClass.MTP_FC, hidden, 2 * hidden)
    for layer in range(spec.mtp_num_hidden_layers):
        name = f"mtp.layers.{layer}"
        yield _vector(f"{name}.input_layernorm", hidden, kind=small)
        yield from _attention(spec, name, in_mtp=True)
        yield _vector(f"{name}.post_attention_layernorm", hidden, kind=small)
        yield from _moe(spec, name, in_mtp=True)
    yield _vector("mtp.norm", hidden, kind=small)


def _vision(vision: VisionSpec) -> Iterator[Module]:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    merged = hidden * vision.spatial_merge_size**2
    root = "model.visual"
    patch = (hidden, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield from _with_bias(f"{root}.patch_embed.proj", *patch)
    yield _vector(f"{root}.pos_embed", vision.num_position_embeddings, hidden, kind=ModuleClass.VISION)
    for block in range(vision.depth):
        name = f"{root}.blocks.{block}"
        yield from _with_bias(f"{name}.norm1", hidden)
        yield from _with_bias(f"{name}.norm2", hidden)
        yield from _with_bias(f"{name}.attn.qkv", 3 * hidden, hidden)
        yield from _with_bias(f"{name}.attn.proj", hidden, hidden)
        yield from _with_bias(f"{name}.mlp.linear_fc1", inner, hidden)
        yield from _with_bias(f"{name}.mlp.linear_fc2", hidden, inner)
    yield from _with_bias(f"{root}.merger.norm", hidden)
    yield from _with_bias(f"{root}.merger.linear_fc1", merged, merged)
    yield from _with_bias(f"{root}.merger.linear_fc2", vision.out_hidden_size, merged)


def _with_bias(name: str, *shape: int) -> Iterator[Module]:
    yield _vector(name, *shape, kind=ModuleClass.VISION)
    yield Module(f"{name}.bias", ModuleClass.VISION, (shape[0],), False, f"{name}.bias")
