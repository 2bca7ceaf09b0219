"""Writes small checkpoints of every kind that onebox takes (BF16, official FP8, AutoRound, GPTQ, both NVFP4s).

All kinds are made of the same random weights, so they are the same model in different formats. Files are written with
the safetensors library and laid out as the published checkpoints are: per-expert or fused experts, suffixes, index,
quantization_config, and the extra file in which some tools leave the MTP head.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from onebox.formats import (
    Dialect,
    pack_gptq,
    pack_quantized,
    quantize,
    quantize_fp8_block,
    quantize_fp8_tensor,
    quantize_nvfp4,
)
from onebox.spec.model import ModelSpec, spec_from_config
from onebox.spec.modules import Module, ModuleClass, fused_experts, modules
from onebox.spec.shapes import family_config

Tensors = dict[str, torch.Tensor]
EXPERTS = {ModuleClass.EXPERTS}
PROJECTIONS = {ModuleClass.ATTENTION, ModuleClass.DELTA}
MTP_MATRICES = {ModuleClass.MTP_EXPERTS, ModuleClass.MTP_SHARED, ModuleClass.MTP_ATTENTION}


def tiny_config(**text: Any) -> dict[str, Any]:
    """A config.json of the family with every dimension a multiple of what the block and group formats need."""
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "rope_type": "default",
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16}
    return family_config(text={**sizes, **text}, vision=vision, first_special_token=480)


def random_weights(spec: ModelSpec, seed: int = 0) -> Tensors:
    """One BF16 tensor per module under its plain name; experts are per expert."""
    generator = torch.Generator().manual_seed(seed)
    return {
        module.plain_tensor: (torch.randn(module.shape, generator=generator) * 0.03).to(torch.bfloat16)
        for module in modules(spec)
    }


def fuse(spec: ModelSpec, tensors: Tensors, *, only_main: bool = False) -> Tensors:
    """The same tensors with each layer's experts stacked into the 3-D form of the official BF16 checkpoints."""
    result = dict(tensors)
    for fused in fused_experts(spec):
        if only_main and fused.module_class.in_mtp:
            continue
        names = [
            [f"{fused.experts_name}.{expert}.{part}.weight" for part in fused.parts]
            for expert in range(spec.num_experts)
        ]
        result[fused.tensor] = torch.stack([torch.cat([result.pop(name) for name in row]) for row in names])
    return result


def packed_int3(spec: ModelSpec, weights: Tensors) -> Tensors:
    """Projections and experts of 3 bits, the experts' down projections of 4, as compressed-tensors packs them."""
    result = dict(weights)
    for module in modules(spec):
        if module.module_class in EXPERTS | PROJECTIONS:
            is_down = module.name.endswith("down_proj")
            made = pack_quantized(quantize(result.pop(module.plain_tensor), 4 if is_down else 3, 128))
            result |= {f"{module.name}.{suffix}": tensor for suffix, tensor in made.items()}
    return result


Quantiser = Callable[[torch.Tensor], Tensors]


def gptq_int4(weight: torch.Tensor) -> Tensors:
    return pack_gptq(quantize(weight, 4, 128, torch.float16))


def gptq_int4_g_idx(weight: torch.Tensor) -> Tensors:
    index = torch.arange(weight.shape[1], dtype=torch.int32) // 128
    return {**gptq_int4(weight), "g_idx": index}


def gptq_int4_asymmetric(weight: torch.Tensor) -> Tensors:
    symmetric = quantize(weight, 4, 128, torch.float16)
    zeros = (torch.arange(symmetric.scales.numel()).reshape(symmetric.scales.shape) % 5 - 2).to(torch.int8)
    return pack_gptq(replace(symmetric, zeros=zeros))


def fp8_block(weight: torch.Tensor) -> Tensors:
    values, scale = quantize_fp8_block(weight)
    return {"weight": values, "weight_scale_inv": scale.to(torch.bfloat16)}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    values, scale = quantize_fp8_tensor(weight)
    return {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.01)}


def nvfp4_llmc(weight: torch.Tensor) -> Tensors:
    packed, scale, global_scale = quantize_nvfp4(weight, Dialect.LLM_COMPRESSOR)
    one = torch.ones(1)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": global_scale.reshape(1),
        "input_global_scale": one * 40,
    }


def nvfp4_modelopt(weight: torch.Tensor) -> Tensors:
    packed, scale, global_scale = quantize_nvfp4(weight, Dialect.MODELOPT)
    return {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": global_scale.reshape(()),
        "input_scale": torch.tensor(0.02),
    }


def quantised(spec: ModelSpec, weights: Tensors, classes: set[ModuleClass], quantiser: Quantiser) -> Tensors:
    """`weights` with every matrix of `classes` replaced by what `quantiser` makes of it."""
    result = dict(weights)
    for module in modules(spec):
        if module.module_class in classes and module.is_matrix:
            weight = result.pop(module.plain_tensor)
            result |= {f"{module.name}.{suffix}": tensor for suffix, tensor in quantiser(weight).items()}
    return result


def _modules_of(spec: ModelSpec, classes: set[ModuleClass]) -> list[Module]:
    return [module for module in modules(spec) if module.module_class in classes and module.is_matrix]


def autoround_config(spec: ModelSpec) -> dict[str, Any]:
    sixteen = {"bits": 16, "data_type": "fp"}
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "int",
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.language_model.layers",
        "extra_config": {module.name: sixteen for module in _modules_of(spec, {ModuleClass.SHARED})},
    }


GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
    "dynamic": {
        "lm_head": {},
        "model.language_model.embed_tokens": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    },
}
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc"],
}
NVFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": "local",
            },
        }
    },
    "ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert.*", "re:.*attn.*", "re:^mtp.*"],
}
MODELOPT_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
        }
    },
    "ignore": ["lm_head", "model.visual*", "mtp*", "*linear_attn*", "*self_attn*", "*shared_expert*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}

_PACKED = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
PACKED_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {**_PACKED, "num_bits": 3}},
        "group_1": {"targets": [r"re:.*experts\.\d+\.down_proj$"], "weights": {**_PACKED, "num_bits": 4}},
    },
    "ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert.*", "re:^mtp.*"],
}

KINDS = (
    "bf16-fused",
    "bf16-per-expert",
    "fp8",
    "autoround",
    "gptq",
    "nvfp4-llmc",
    "nvfp4-modelopt",
    "modelopt-mixed",
    "packed-int3",
)


def tensors_of(kind: str, spec: ModelSpec, weights: Tensors) -> tuple[Tensors, dict[str, Any] | None]:
    """The tensors and the quantization_config of one kind of checkpoint made of `weights`."""
    projections = PROJECTIONS | {ModuleClass.DELTA_GATES}
    if kind == "bf16-fused":
        return fuse(spec, weights, only_main=True), None
    if kind == "bf16-per-expert":
        return weights, None
    if kind == "fp8":
        classes = EXPERTS | PROJECTIONS | {ModuleClass.SHARED} | MTP_MATRICES
        return quantised(spec, weights, classes, fp8_block), FP8_CONFIG
    if kind == "autoround":
        return quantised(spec, weights, EXPERTS | projections, gptq_int4), autoround_config(spec)
    if kind == "gptq":
        return quantised(spec, weights, EXPERTS, gptq_int4_g_idx), GPTQ_CONFIG
    if kind == "nvfp4-llmc":
        return quantised(spec, weights, EXPERTS, nvfp4_llmc), NVFP4_CONFIG
    if kind == "nvfp4-modelopt":
        main = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
        return quantised(spec_without_mtp(spec), main, EXPERTS, nvfp4_modelopt), MODELOPT_CONFIG
    if kind == "modelopt-mixed":
        dense = quantised(spec, weights, PROJECTIONS, fp8_tensor)
        four = EXPERTS | {ModuleClass.SHARED, ModuleClass.LM_HEAD}
        return quantised(spec, dense, four, nvfp4_modelopt), {**MODELOPT_CONFIG, "quant_algo": "MIXED_PRECISION"}
    if kind == "packed-int3":
        return packed_int3(spec, weights), PACKED_CONFIG
    raise ValueError(kind)


def spec_without_mtp(spec: ModelSpec) -> ModelSpec:
    return ModelSpec(**{**vars(spec), "mtp_num_hidden_layers": 0})


def write_checkpoint(
    directory: Path,
    kind: str,
    *,
    shards: int = 1,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Writes a checkpoint of `kind` into `directory` in `shards` files; `change` may spoil its tensors first.

    AutoRound's MTP head goes into `model_extra_tensors.safetensors`, which its index does not name.
    """
    config = dict(config or tiny_config())
    spec = spec_from_config(config)
    tensors, quantization = tensors_of(kind, spec, random_weights(spec, seed))
    if change:
        change(tensors)
    if quantization:
        config["quantization_config"] = quantization
    directory.mkdir(parents=True, exist_ok=True)
    extra = {name: tensors.pop(name) for name in list(tensors) if kind == "autoround" and name.startswith("mtp.")}
    _write_shards(directory, tensors, shards)
    if extra:
        save_file(_contiguous(extra), directory / "model_extra_tensors.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [482, 480]}))
    for name in ("tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / name).write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _write_shards(directory: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(_contiguous(tensors), directory / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        save_file(_contiguous(part), directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
