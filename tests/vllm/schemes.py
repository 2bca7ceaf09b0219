"""Runs in vLLM's own environment: which scheme vLLM finds for each module in a quantization_config, as JSON."""

import json
import sys
from pathlib import Path

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForConditionalGeneration


def main() -> None:
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())["quantization_config"]
    quantization = CompressedTensorsConfig.from_config(config)
    quantization.packed_modules_mapping = Qwen3_5MoeForConditionalGeneration.packed_modules_mapping
    found = {}
    for name in json.loads(Path(sys.argv[2]).read_text()):
        scheme = quantization.get_scheme_dict(torch.nn.Linear(1, 1), name)
        weights = scheme["weights"].model_dump(mode="json") if scheme else None
        found[name] = weights and [weights["num_bits"], weights["type"], weights["strategy"]]
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
