"""What one of N tensor-parallel ranks holds: whole heads, groups and blocks, or why it cannot; and its bytes.

Seen from a rank, the model is a smaller one: fewer heads, narrower experts, a part of the vocabulary. `rank_spec` is
that model, so that the planner's memory and roofline hold for a rank as they do for a box.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onebox.scaleout.layers import LayerPart, Split, VllmLayer
from onebox.scaleout.targets import Scheme
from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["class_bytes_per_rank", "rank_parts", "rank_spec", "split_problems", "stage_specs"]

_VOCAB_STEP = 64
"""vLLM pads the vocabulary to a multiple of this before it is divided."""
_REPLICATED = {ModuleClass.ROUTER, ModuleClass.SMALL, ModuleClass.MTP_SMALL}


def rank_spec(spec: ModelSpec, tp: int, flag: str = "--tp") -> ModelSpec:
    """The model as one rank of `tp` sees it. Raises `UsageError` where heads or experts do not divide.

    `flag` is the option that the number comes from.
    """
    if tp < 1:
        raise UsageError(f"{flag} is {tp}; give 1 or more.")
    wrong = [
        f"{count} {name}"
        for name, count in (
            ("attention heads", spec.num_attention_heads),
            ("DeltaNet key heads", spec.linear_num_key_heads),
            ("DeltaNet value heads", spec.linear_num_value_heads),
            ("columns of an expert", spec.moe_intermediate_size),
            ("columns of the shared expert", spec.shared_expert_intermediate_size),
        )
        if count % tp
    ]
    heads = spec.num_key_value_heads
    if heads % tp and tp % heads:
        wrong.append(f"{heads} KV heads")
    if wrong:
        raise UsageError(f"{flag} {tp} does not divide the model's {', '.join(wrong)}; vLLM refuses it.")
    return replace(
        spec,
        num_attention_heads=spec.num_attention_heads // tp,
        num_key_value_heads=max(1, heads // tp),
        linear_num_key_heads=spec.linear_num_key_heads // tp,
        linear_num_value_heads=spec.linear_num_value_heads // tp,
        moe_intermediate_size=spec.moe_intermediate_size // tp,
        shared_expert_intermediate_size=spec.shared_expert_intermediate_size // tp,
        vocab_size=-(-spec.vocab_size // (_VOCAB_STEP * tp)) * _VOCAB_STEP,
    )


def stage_specs(spec: ModelSpec, pp: int) -> list[ModelSpec]:
    """The layers of each of `pp` pipeline stages as models of their own; as vLLM divides them, evenly.

    Where they do not divide, vLLM gives one more to the last stages but one, which have neither embedding nor head.
    """
    if not 1 <= pp <= spec.num_hidden_layers:
        raise UsageError(f"--pp is {pp}; give 1 to {spec.num_hidden_layers}, the number of layers.")
    counts = [spec.num_hidden_layers // pp] * pp
    for place in range(2, spec.num_hidden_layers % pp + 2):
        counts[-place] += 1
    stages, first = [], 0
    for count in counts:
        kinds = spec.layer_types[first : first + count]
        stages.append(replace(spec, layer_types=kinds, num_hidden_layers=count))
        first += count
    return stages


def class_bytes_per_rank(spec: ModelSpec, stored: Mapping[ModuleClass, int], tp: int) -> dict[ModuleClass, int]:
    """Bytes of each class on a rank: matrices are divided, vectors and the router are whole on every rank."""
    kv_heads, heads = spec.num_key_value_heads, spec.num_attention_heads
    held = {kind: size if kind in _REPLICATED else -(-size // tp) for kind, size in stored.items()}
    if tp > kv_heads:
        # More ranks than KV heads: each rank has a whole one, which is stored on several.
        rows = 2 * heads + 2 * kv_heads  # of q with its gate, k and v, in heads
        share = (2 * heads / tp + 2 + heads / tp) / (rows + heads)
        for kind in (ModuleClass.ATTENTION, ModuleClass.MTP_ATTENTION):
            if kind in stored:
                held[kind] = round(stored[kind] * share)
    return held


def split_problems(layer: VllmLayer, scheme: Scheme | None, tp: int) -> Iterator[str]:
    """Clauses on groups or blocks that would straddle two ranks: "down_proj has 64 columns a rank, ..."."""
    if scheme is None or layer.split is Split.WHOLE:
        return
    held = rank_parts(layer, tp)
    for part in held:
        if layer.is_by_columns(part):
            size, what = (scheme.block[1], "blocks") if scheme.block else (scheme.group_size, "groups")
            if size and tp > 1 and part.columns % size:
                yield f"{part.name} has {part.columns} columns on a rank, which are no whole {what} of {size}"
        # Only blocks reach over rows, and the last part of an undivided layer may end within one.
        elif scheme.block and part.rows % scheme.block[0] and not (tp == 1 and part is held[-1]):
            yield f"{part.name} has {part.rows} rows on a rank, which are no whole blocks of {scheme.block[0]}"


def rank_parts(layer: VllmLayer, tp: int) -> list[LayerPart]:
    """The parts of a layer with the rows and columns that one of `tp` ranks has."""
    if layer.split is Split.WHOLE:
        return list(layer.parts)
    return [
        part._replace(columns=part.columns // tp)
        if layer.is_by_columns(part)
        else part._replace(rows=part.rows * _copies(part, tp) // tp)
        for part in layer.parts
    ]


def _copies(part: LayerPart, tp: int) -> int:
    """More ranks than heads: each rank has a whole one, which is stored on several."""
    return tp // part.heads if part.heads and tp > part.heads else 1
