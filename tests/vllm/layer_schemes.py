"""Runs in vLLM's own environment: the scheme that vLLM finds for layers by its own names, as JSON.

Arguments: a checkpoint, and a file with a JSON list of [name, class name, whether it is of the MTP layer]. The answer
has for each either [bits, type, strategy, group size], null for a layer that is not quantised, or the error's text.
"""

import json
import sys
from pathlib import Path

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP


def targets(config, model):
    """As `configure_quant_config` prepares it for a model."""
    found = CompressedTensorsConfig.from_config(json.loads(json.dumps(config)))
    found.packed_modules_mapping = model.packed_modules_mapping
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        found.apply_vllm_mapper(mapper.get_rename_mapper())
    return found


def asked(quantization, name, class_name):
    layer = type(class_name, (torch.nn.Linear,), {})(1, 1)
    try:
        scheme = quantization.get_scheme_dict(layer, name)
    except ValueError as error:
        return str(error)
    if not scheme:
        return None
    weights = scheme["weights"].model_dump(mode="json")
    return [weights["num_bits"], weights["type"], weights["strategy"], weights["group_size"]]


def main() -> None:
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())["quantization_config"]
    main_model = targets(config, Qwen3_5MoeForConditionalGeneration)
    draft = targets(config, Qwen3_5MoeMTP)
    layers = json.loads(Path(sys.argv[2]).read_text())
    found = [asked(draft if is_mtp else main_model, name, kind) for name, kind, is_mtp in layers]
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
