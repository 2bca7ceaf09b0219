"""A tiny checkpoint of this architecture with random weights, for tests and for trying the engine.

Owns its sizes and how its weights are drawn. It is a complete checkpoint directory (config, safetensors, tokenizer,
chat template, generation config), written once into the cache directory and read back by the code that reads any other.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onebox.model import random_text
from onebox.spec.cache import user_cache_directory
from onebox.spec.errors import WriteError
from onebox.spec.model import ModelSpec, spec_from_config
from onebox.spec.modules import Module, fused_experts, modules
from onebox.spec.shapes import family_config

__all__ = ["TINY", "random_checkpoint", "random_weights", "write_random_checkpoint"]

SEED = 0
STD = 0.03
"""Small enough that rounding does not change tokens, large enough that layers have an effect."""

# Matrices have sides that are multiples of 128 where quantised formats group by 128, so this shape can be quantised.
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": random_text.PADDED_VOCAB_SIZE,
}


TINY: dict[str, Any] = family_config(text=_TEXT, has_vision=False, first_special_token=random_text.FIRST_SPECIAL_TOKEN)
"""The tiny model's config.json; it has no vision tower."""


def random_checkpoint(cache_home: Path | None = None) -> Path:
    """The tiny checkpoint's directory in the user's cache; it is written first if it does not exist."""
    cache = user_cache_directory() if cache_home is None else cache_home / "onebox"
    target = cache / f"tiny-random-{_recipe_hash()}"
    if not target.exists():
        write_random_checkpoint(target)
    return target


def write_random_checkpoint(target: Path, seed: int = SEED) -> None:
    """Writes the whole checkpoint beside `target` and renames it there, so that a directory that exists is complete."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    except OSError as error:
        raise WriteError(f"{target.parent} cannot hold the tiny random model: {error.strerror}.") from None
    try:
        _write_files(scratch, seed)
        scratch.rename(target)
    except OSError as error:
        # Another process may have written the same files meanwhile; then those are used.
        if not target.exists():
            raise WriteError(f"{target} could not be written: {error.strerror}.") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_files(directory: Path, seed: int) -> None:
    directory.chmod(0o755)
    weights = random_weights(spec_from_config(TINY), seed)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(TINY, indent=2) + "\n", encoding="utf-8")
    for name, text in random_text.text_files().items():
        (directory / name).write_text(text, encoding="utf-8")


def random_weights(spec: ModelSpec, seed: int = SEED, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random tensors of every module under the names that Qwen3.5's own checkpoints use.

    The layers' experts are fused and the MTP head's are not, as there. A tensor depends on the seed and its name alone.
    """
    fused = [group for group in fused_experts(spec) if not group.module_class.in_mtp]
    inside = tuple(f"{group.experts_name}." for group in fused)
    shapes = {group.tensor: group.shape for group in fused}
    weights = {name: _normal(name, shape, seed) for name, shape in shapes.items()}
    for module in _text_modules(spec):
        if not module.name.startswith(inside):
            weights[module.plain_tensor] = _draw(module, seed)
    return {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}


def _text_modules(spec: ModelSpec) -> Iterator[Module]:
    return (module for module in modules(spec) if not module.name.startswith("model.visual."))


def _draw(module: Module, seed: int) -> Tensor:
    """The distributions follow the model's own initialisation: decays between slow and fast, norms around neutral."""
    name = module.plain_tensor
    if name.endswith(".A_log"):
        return torch.empty(module.shape).uniform_(0.01, 16, generator=_generator(name, seed)).log()
    around_one = name.endswith((".dt_bias", ".linear_attn.norm.weight"))
    # Four small taps would make the layer's output vanish: its values are products of three small factors.
    scale = 10.0 if name.endswith(".conv1d.weight") else 1.0
    return _normal(name, module.shape, seed) * scale + (1.0 if around_one else 0.0)


def _normal(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=_generator(name, seed)) * STD


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _recipe_hash() -> str:
    """A hash of everything that determines the files' content, this file's source included."""
    recipe = {"config": TINY, "seed": SEED, "text": random_text.text_files(), "draw": Path(__file__).read_text()}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
