"""What decides the bits of a stored prefix, by name. Prefixes with any other value are never read.

And, as one digest, the part of it that is the model's alone, which equal servers on different machines share.
"""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.model.identity import code_identity, weights_identity
from onebox.spec.conversion import AS_STORED

if TYPE_CHECKING:
    import torch

    from onebox.engine.plan import EnginePlan

__all__ = ["fingerprint_parts", "model_fingerprint"]

_PACKAGES = ("torch", "triton", "numba", "llvmlite", "numpy")
_CPU_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def fingerprint_parts(plan: "EnginePlan") -> dict[str, str]:
    """By name: weights, code, packages, device, and how states and KV pages are stored."""
    return {
        **_model_parts(plan),
        "code": code_identity(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "device": _device_name(plan.device),
        "drafter": _drafter(plan),
        "mtp": "with the MTP head's pages" if plan.config.speculation.with_mtp else "without the MTP head's pages",
    }


def model_fingerprint(plan: "EnginePlan") -> str:
    """A digest of weights, dtype, KV format and states' dtype: servers that differ in it answer differently."""
    return hashlib.sha256(json.dumps(_model_parts(plan), sort_keys=True).encode()).hexdigest()


def _model_parts(plan: "EnginePlan") -> dict[str, str]:
    kv = plan.memory.request.kv
    return {
        "weights": weights_identity(plan.directory, plan.load_format, plan.hf_overrides, plan.conversion),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "kv_format": f"keys {kv.key_bits} bits, values {kv.value_bits} bits",
        "state_dtype": plan.memory.request.state_dtype.value,
    }


def _drafter(plan: "EnginePlan") -> str:
    if plan.drafter is None:
        return "none"
    return weights_identity(plan.drafter.directory, plan.load_format, {}, AS_STORED)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _device_name(device: "torch.device") -> str:
    if device.type == "cpu":
        return f"{platform.machine()} CPU {_cpu_digest()}"
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, {major}.{minor}, CUDA {torch.version.cuda}"


def _cpu_digest() -> str:
    """Of the processor's model and instruction sets: compiled code and matrix libraries choose by them."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = [line for line in first.splitlines() if line.split("\t")[0].strip() in _CPU_FIELDS]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
