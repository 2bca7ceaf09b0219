"""generation_config.json: the model maker's sampling defaults and the tokens that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import read_config, read_json

__all__ = ["GenerationDefaults"]

_FILE = "generation_config.json"
_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
_READ = {"do_sample", "eos_token_id", *_NUMBERS}
_HARMLESS = {"_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache"}


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of requests. `eos_token_ids` end an answer unless the request ignores them."""

    eos_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, directory: Path, source: str = "auto") -> "GenerationDefaults":
        """Those of `--generation-config`: the checkpoint's (auto), neutral ones (vllm), or those of a directory.

        The tokens that end an answer are the checkpoint's unless a directory's file names others.
        """
        own = cls._of_checkpoint(directory)
        if source == "auto":
            return own
        if source == "vllm":
            return cls(own.eos_token_ids)
        path = Path(source) / _FILE
        if not path.is_file():
            raise UnreadableError(
                f"--generation-config {source}: there is no {path}; give auto, vllm or a directory with {_FILE}."
            )
        given = cls.from_config(read_json(path))
        return given if given.eos_token_ids else replace(given, eos_token_ids=own.eos_token_ids)

    @classmethod
    def _of_checkpoint(cls, directory: Path) -> "GenerationDefaults":
        """Without the file, plain sampling and config.json's own end token."""
        if (directory / _FILE).exists():
            return cls.from_config(read_json(directory / _FILE))
        eos = read_config(directory).eos_token_id
        return cls(() if eos is None else (eos,))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "GenerationDefaults":
        for key, value in config.items():
            if key not in _READ | _HARMLESS:
                raise UnsupportedError(f"{_FILE} sets {key} to {value!r}, which onebox cannot honour; remove it.")
        eos = config.get("eos_token_id", [])
        numbers = {name: kind(config[name]) for name, kind in _NUMBERS.items() if config.get(name) is not None}
        if config.get("do_sample") is False:
            numbers["temperature"] = 0.0
        return cls(tuple(eos) if isinstance(eos, list) else (eos,), **numbers)

    def overridden(self, changes: Mapping[str, Any]) -> "GenerationDefaults":
        """With the operator's own numbers in place of the model maker's."""
        for key, value in changes.items():
            if key not in _NUMBERS:
                raise UsageError(f"--override-generation-config holds {key!r}; it takes {', '.join(_NUMBERS)}.")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UsageError(f"--override-generation-config sets {key} to {value!r}; it must be a number.")
        return replace(self, **{key: _NUMBERS[key](value) for key, value in changes.items()})
