"""generation_config.json: the model maker's sampling defaults and the tokens that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnsupportedError
from onebox.spec.model import read_config, read_json

__all__ = ["GenerationDefaults"]

_FILE = "generation_config.json"
_READ = {"do_sample", "eos_token_id", "temperature", "top_k", "top_p"}
_HARMLESS = {"_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache"}
# Settings that onebox does not have, each at the value that changes nothing.
_NEUTRAL: dict[str, Any] = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request that does not say otherwise gets. `eos_token_ids` end an answer unless it ignores them."""

    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def load(cls, directory: Path) -> "GenerationDefaults":
        """Read from the checkpoint; without the file, plain sampling and config.json's own end token."""
        if (directory / _FILE).exists():
            return cls.from_config(read_json(directory / _FILE))
        eos = read_config(directory).eos_token_id
        return cls(() if eos is None else (eos,))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "GenerationDefaults":
        for key, value in config.items():
            if key not in _READ | _HARMLESS and (key not in _NEUTRAL or _NEUTRAL[key] != value):
                raise UnsupportedError(f"{_FILE} sets {key} to {value!r}, which onebox cannot honour; remove it.")
        eos = config.get("eos_token_id", [])
        greedy = config.get("do_sample") is False
        return cls(
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            temperature=0.0 if greedy else float(config.get("temperature", 1.0)),
            top_p=float(config.get("top_p", 1.0)),
            top_k=int(config.get("top_k", 0)),
        )
