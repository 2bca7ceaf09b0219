"""The class and kernel with which vLLM runs a scheme on a GB10 (compute capability 12.1), or why it does not."""

from typing import NamedTuple

from onebox.scaleout.layers import Split, VllmLayer
from onebox.scaleout.targets import Scheme
from onebox.scaleout.versions import FEW_BITS, FP8_BLOCK_WEIGHTS, QUANTIZED_EMBEDDING, QUANTIZED_HEAD, Feature

__all__ = ["Kernel", "kernel_of", "needed_features"]

_PACKED = "pack-quantized"
_WNA16_BITS = range(2, 9)
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")


class Kernel(NamedTuple):
    """vLLM's class for a layer and the kernel it picks; `refusal` says why there is none."""

    class_name: str
    name: str
    refusal: str | None = None


_UNQUANTIZED = Kernel("UnquantizedLinearMethod", "cuBLAS")
_UNQUANTIZED_EXPERTS = Kernel("UnquantizedFusedMoEMethod", "Triton")
_UNQUANTIZED_VOCABULARY = {
    "VocabParallelEmbedding": Kernel("UnquantizedEmbeddingMethod", "lookup"),
    "ParallelLMHead": Kernel("UnquantizedEmbeddingMethod", "cuBLAS"),
}


def kernel_of(layer: VllmLayer, scheme: Scheme | None) -> Kernel:
    """By vLLM's order of tests; its first match counts."""
    is_experts = layer.split is Split.EXPERTS
    if scheme is None:
        usual = _UNQUANTIZED_EXPERTS if is_experts else _UNQUANTIZED
        return _UNQUANTIZED_VOCABULARY.get(layer.class_name, usual)
    if layer.class_name == "VocabParallelEmbedding":
        return _embedding(scheme)
    if _is_nvfp4(scheme):
        name = "CompressedTensorsW4A4Nvfp4MoEMethod" if is_experts else "CompressedTensorsW4A4Fp4"
        return Kernel(name, "FlashInfer CUTLASS FP4" if scheme.has_inputs else "Marlin FP4, 16-bit inputs")
    if scheme.type == "int" and not scheme.has_inputs and scheme.strategy in ("group", "channel"):
        return _integers(scheme, is_experts=is_experts)
    if scheme.type == "float" and scheme.num_bits == 8:
        return _fp8(scheme, is_experts=is_experts)
    if scheme.type == "int" and scheme.num_bits == 8 and scheme.has_inputs:
        name = "CompressedTensorsW8A8Int8MoEMethod" if is_experts else "CompressedTensorsW8A8Int8"
        return Kernel(name, "CUTLASS INT8")
    return Kernel("none", "none", f"vLLM has no scheme for {scheme} in the format {scheme.format}")


def _is_nvfp4(scheme: Scheme) -> bool:
    return scheme.type == "float" and scheme.num_bits == 4 and scheme.strategy == "tensor_group"


def _integers(scheme: Scheme, *, is_experts: bool) -> Kernel:
    name = "CompressedTensorsWNA16MoEMethod" if is_experts else "CompressedTensorsWNA16"
    if scheme.format != _PACKED:
        why = f"integers without quantised inputs must be {_PACKED}, and these are {scheme.format}: vLLM stops"
        return Kernel(name, "none", why)
    if scheme.num_bits not in _WNA16_BITS:
        return Kernel(name, "none", f"vLLM reads integers of 2 to 8 bits, not of {scheme.num_bits}")
    if scheme.num_bits in (4, 8):
        return Kernel(name, "Marlin MoE" if is_experts else "Marlin")
    return Kernel(name, "humming")


def _fp8(scheme: Scheme, *, is_experts: bool) -> Kernel:
    if scheme.format not in _FLOAT_FORMATS or scheme.strategy not in ("tensor", "channel", "block"):
        return Kernel("none", "none", f"vLLM has no scheme for {scheme} in the format {scheme.format}")
    if is_experts:
        if not scheme.has_inputs:
            why = "FP8 experts need quantised inputs (input_activations), and the config has none"
            return Kernel("none", "none", why)
        return Kernel("CompressedTensorsW8A8Fp8MoEMethod", "FlashInfer, DeepGEMM, else Triton")
    if not scheme.has_inputs:
        return Kernel("CompressedTensorsW8A16Fp8", "humming, else Marlin")
    return Kernel("CompressedTensorsW8A8Fp8", "CUTLASS block" if scheme.strategy == "block" else "CUTLASS")


def _embedding(scheme: Scheme) -> Kernel:
    is_integer = scheme.type == "int" and not scheme.has_inputs and scheme.strategy in ("group", "channel")
    refusal = None if is_integer else f"vLLM quantises embeddings in integers alone, and these are {scheme}"
    return Kernel("CompressedTensorsEmbeddingWNA16Int", "torch", refusal)


def needed_features(layer: VllmLayer, scheme: Scheme | None) -> list[Feature]:
    """What older releases of vLLM lack for this layer."""
    if scheme is None:
        return []
    features = []
    if layer.class_name == "ParallelLMHead":
        features.append(QUANTIZED_HEAD)
    if layer.class_name == "VocabParallelEmbedding":
        features.append(QUANTIZED_EMBEDDING)
    if scheme.type == "int" and scheme.num_bits not in (4, 8):
        features.append(FEW_BITS)
    if scheme.block and not scheme.has_inputs:
        features.append(FP8_BLOCK_WEIGHTS)
    return features
