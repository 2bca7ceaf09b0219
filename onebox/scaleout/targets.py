"""Which scheme a quantization_config gives to a layer, by the rules of vLLM (read in 0.32.0).

Names in `targets` and `ignore` are compared with vLLM's own layer names, in this order:

    ignore       the layer's name, else the names of all the matrices that are fused in it: all or none must match
    targets      the layer's name; else the fused matrices, which all must match, and the first one's target counts;
                 else the layer's class, if it contains the target ("Linear" is in QKVParallelLinear)

A target that begins with `re:` is a regular expression, matched from the beginning of the name. Others are names. vLLM
renames a name with a dot as it renames tensors; a name without one, such as "lm_head", it leaves alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FUSED_PARTS", "QuantizationTargets", "Resolution", "Scheme"]

FUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""vLLM's fused linear layers of this family, and the matrices that a checkpoint stores for each, in vLLM's order."""


@dataclass(frozen=True)
class Scheme:
    """One config group: how the weights, and the inputs if at all, are quantised."""

    group: str
    num_bits: int
    type: str
    """int or float."""
    strategy: str
    """tensor, channel, group, block or tensor_group."""
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    format: str
    has_inputs: bool
    has_dynamic_inputs: bool

    @staticmethod
    def of_group(name: str, group: Mapping[str, Any], default_format: str) -> "Scheme":
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        block = weights.get("block_structure")
        return Scheme(
            group=name,
            num_bits=int(weights.get("num_bits", 0)),
            type=str(weights.get("type", "int")),
            strategy=str(weights.get("strategy") or "tensor"),
            group_size=weights.get("group_size"),
            block=(int(block[0]), int(block[1])) if block else None,
            symmetric=bool(weights.get("symmetric", True)),
            format=str(group.get("format") or default_format),
            has_inputs=bool(inputs),
            has_dynamic_inputs=bool(inputs.get("dynamic")),
        )

    def __str__(self) -> str:
        number = f"{'FP' if self.type == 'float' else 'INT'}{self.num_bits}"
        sizes = {"group": f"g{self.group_size}", "tensor_group": f"g{self.group_size}", "channel": "per row"}
        size = f"{self.block[0]}x{self.block[1]} blocks" if self.block else sizes.get(self.strategy, self.strategy)
        return f"{number} {size}{'' if self.symmetric else ' asym'}"


@dataclass(frozen=True)
class Resolution:
    """What a layer gets: a scheme, or none; the target that gave it; or why vLLM stops."""

    scheme: Scheme | None = None
    target: str | None = None
    is_ignored: bool = False
    complaint: str | None = None


class QuantizationTargets:
    """The targets of a quantization_config of compressed-tensors, under vLLM's names."""

    def __init__(self, config: Mapping[str, Any], renamed: Mapping[str, str | None]) -> None:
        """`renamed`: the beginnings of names that vLLM replaces, as it does in tensors; None: it drops the name."""
        default = str(config.get("format") or "")
        self._schemes: dict[str, Scheme] = {}
        for name, group in (config.get("config_groups") or {}).items():
            for target in group.get("targets") or ():
                # Of two groups with one target the later holds, as in vLLM's dictionary.
                self._schemes[target] = Scheme.of_group(name, group, default)
        self._schemes = {
            new: scheme for old, scheme in self._schemes.items() if (new := _rename(old, renamed)) is not None
        }
        ignored = (_rename(old, renamed) for old in config.get("ignore") or ())
        self._ignored = [name for name in ignored if name is not None]

    @property
    def schemes(self) -> list[Scheme]:
        return list(dict.fromkeys(self._schemes.values()))

    def resolve(self, name: str, class_name: str) -> Resolution:
        """The scheme of the layer `name`, whose class in vLLM is `class_name`."""
        ignored = list(self._shards_ignored(name))
        if any(ignored) and not all(ignored):
            parts = " and ".join(FUSED_PARTS[name.rpartition(".")[2]])
            return Resolution(complaint=f"{parts} are one layer in vLLM, and `ignore` lists only some of them")
        if all(ignored):
            return Resolution(is_ignored=True)
        target = self._first(name) or self._first_of_fused(name) or self._first_of_class(class_name)
        return Resolution(self._schemes[target], target) if target else Resolution()

    def own_schemes(self, name: str) -> list[tuple[str, Scheme | None]]:
        """Each matrix fused in the layer, or the layer itself, with the scheme that its own name is given."""
        names = _shards(name) or [name]
        found = ((one, self._first(one)) for one in names if not self._is_ignored(one))
        return [(one, self._schemes[target] if target else None) for one, target in found]

    def _shards_ignored(self, name: str) -> Iterator[bool]:
        if self._is_ignored(name) or not _shards(name):
            yield self._is_ignored(name)
            return
        for shard in _shards(name):
            yield self._is_ignored(shard)

    def _is_ignored(self, name: str) -> bool:
        return any(_matches(name, target) for target in self._ignored)

    def _first(self, name: str) -> str | None:
        return next((target for target in self._schemes if _matches(name, target)), None)

    def _first_of_fused(self, name: str) -> str | None:
        found = [self._first(shard) for shard in _shards(name)]
        return found[0] if found and all(found) else None

    def _first_of_class(self, class_name: str) -> str | None:
        lowered = class_name.lower()
        for target in self._schemes:
            is_pattern = target.startswith("re:")
            if _matches(class_name, target) if is_pattern else target.lower() in lowered:
                return target
        return None


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return name == target


def _shards(name: str) -> Sequence[str]:
    stem, _, last = name.rpartition(".")
    return [f"{stem}.{part}" for part in FUSED_PARTS.get(last, ())]


def _rename(target: str, renamed: Mapping[str, str | None]) -> str | None:
    if target.startswith("re:") or "." not in target:
        return target
    for old, new in renamed.items():
        if target.startswith(old):
            return None if new is None else new + target[len(old) :]
    return target
