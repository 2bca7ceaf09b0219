"""`--hf-overrides`: values of config.json replaced for one run, in vLLM's form.

    {"text_config": {"rope_parameters": {...}, "max_position_embeddings": 1010000}}

As in vLLM, `rope_parameters` replaces the whole object of config.json. What tensors depend on cannot be replaced.
"""

from collections.abc import Mapping
from typing import Any

from onebox.spec.errors import UsageError

__all__ = ["apply_overrides"]

_KEYS = ("rope_parameters", "max_position_embeddings")


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parsed config.json with `overrides` in it; keys that onebox would ignore or cannot replace are refused."""
    if not overrides:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):  # a bare text config
        return {**config, **_checked(config, overrides, "")}
    for key, value in overrides.items():
        if key in _KEYS:
            raise UsageError(f"--hf-overrides has {key} at its top; in this model it belongs under text_config.")
        if key != "text_config":
            raise UsageError(
                f"--hf-overrides has {key}, which onebox cannot replace; it takes {_taken('text_config.')}."
            )
        if not isinstance(value, Mapping):
            raise UsageError(f"--hf-overrides sets text_config to {value!r}; it must be an object.")
    return {**config, "text_config": {**text, **_checked(text, overrides["text_config"], "text_config.")}}


def _checked(section: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for key in overrides:
        if key not in _KEYS:
            raise UsageError(f"--hf-overrides has {where}{key}, which onebox cannot replace; it takes {_taken(where)}.")
    rope, stored = overrides.get("rope_parameters"), section.get("rope_parameters")
    if "rope_parameters" in overrides:
        if not isinstance(rope, Mapping):
            raise UsageError(f"--hf-overrides sets {where}rope_parameters to {rope!r}; it must be an object.")
        _refuse_left_out(rope, stored if isinstance(stored, Mapping) else {}, where)
    return overrides


def _refuse_left_out(rope: Mapping[str, Any], stored: Mapping[str, Any], where: str) -> None:
    """The object replaces the stored one: a constant that it leaves out would get a default that is not the model's."""
    for key in ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        if key in stored and key not in rope:
            raise UsageError(
                f"--hf-overrides replaces all of {where}rope_parameters, as in vLLM, and leaves out {key}: add "
                f"{key} {stored[key]!r}, the value of config.json."
            )


def _taken(where: str) -> str:
    return " and ".join(f"{where}{key}" for key in _KEYS)
