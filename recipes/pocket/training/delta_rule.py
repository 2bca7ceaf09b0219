"""The gated delta rule for training: the reference's chunked rule on any device, fla's Triton kernels where correct.

Both take query and key [B, T, key heads, Dk] of norm 1, value [B, T, value heads, Dv], log_decay and write
[B, T, value heads], and return [B, T, value heads, Dv]. Every row of the batch starts from an empty state.
"""

import importlib
import importlib.util
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.model import reference
from onebox.spec.model import ModelSpec

__all__ = ["DeltaRule", "choose_delta_rule", "fused_delta_rule", "plain_delta_rule"]

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

FUSED_CHUNK = 32
"""Tokens of a chunk in fla's kernels. With 64, Triton 3.4 to 3.7.0 can miscompile their backward pass for Hopper (issue
640: the transposed result of one warp-group product as operand of the next); tiles of 32 are too small for it."""

TOLERANCE = 0.03
"""Largest relative error of fused outputs and gradients: bfloat16 leaves about 0.01, a miscompiled kernel over 0.3."""

# The tuning variants of each kernel to try, in this order, until the result is correct. Timing dozens of variants of a
# dozen kernels takes over a minute, so all of them come last; the middle one has medium tiles and warps.
_PICKS: tuple[Callable[[list[Any]], list[Any]], ...] = (
    lambda variants: [variants[len(variants) // 2]],
    lambda variants: variants[:1],
    lambda variants: variants,
)


def plain_delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
    """The reference's chunked rule in float32; the rows of the batch become additional heads."""
    num_rows, _, heads, value_dim = value.shape
    key_dim, dtype = key.shape[-1], value.dtype
    repeats = heads // key.shape[2]
    query = query.repeat_interleave(repeats, dim=2) * key_dim**-0.5
    key = key.repeat_interleave(repeats, dim=2)
    # The reference creates its masks on the default device.
    with torch.device(value.device):
        parts = (query, key, value, log_decay, write)
        query, key, value, log_decay, write = (part.float().transpose(0, 1).flatten(1, 2) for part in parts)
        empty = torch.zeros(num_rows * heads, key_dim, value_dim)
        mixed, _ = reference.chunked_delta_rule(query, key, value, log_decay, write, empty)
    return mixed.view(-1, num_rows, heads, value_dim).transpose(0, 1).to(dtype)


def fused_delta_rule(wheels: Path) -> DeltaRule:
    """Fla's rule, from an installed fla-core or from the wheels in `wheels`, which are unpacked for this process."""
    _make_importable("einops", wheels)
    _make_importable("fla", wheels)
    chunk_gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    # It refuses Triton 3.4 to 3.7.0 on Hopper whatever the chunk; `choose_delta_rule` checks its gradients instead.
    products: Any = importlib.import_module("fla.ops.common.chunk_o")
    products.TRITON_ABOVE_3_4_0 = False

    def rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
        mixed: Tensor = chunk_gated_delta_rule(
            query, key, value, log_decay, write, scale=key.shape[-1] ** -0.5, chunk_size=FUSED_CHUNK
        )[0]
        return mixed

    return rule


def choose_delta_rule(spec: ModelSpec, device: torch.device, wheels: Path) -> tuple[DeltaRule, str]:
    """The fused rule if it is available and agrees with the plain one, gradients included; and the reason as text."""
    if device.type != "cuda":
        return plain_delta_rule, f"plain delta rule on {device.type}"
    # Training continues without the fused rule, whatever is wrong with a package, the compiler or a kernel.
    try:
        fused = fused_delta_rule(wheels)
    except Exception as failure:
        return plain_delta_rule, f"plain delta rule: the fused one is not available ({failure})"
    tuners = [(tuner, list(tuner.configs)) for tuner in _tuners()]
    for pick in _PICKS:
        for tuner, variants in tuners:
            tuner.configs = pick(variants)
        try:
            error = largest_error(fused, spec, device)
        except Exception as failure:
            reason = f"fails ({type(failure).__name__}: {failure})"
            continue
        if error <= TOLERANCE:
            return fused, f"fused delta rule, relative error {error:.4f}"
        reason = f"has a relative error of {error:.3f}"
    return plain_delta_rule, f"plain delta rule: the fused one {reason}"


def largest_error(rule: DeltaRule, spec: ModelSpec, device: torch.device, length: int = 512) -> float:
    """The largest relative error of output and gradients of `rule` in bfloat16 against the plain rule in float32."""
    inputs = _random_inputs(spec, device, length)
    low = [part.to(torch.bfloat16) for part in inputs[:3]] + inputs[3:4] + [inputs[4].to(torch.bfloat16)]
    exact = _output_and_gradients(plain_delta_rule, [part.float() for part in low])
    found = _output_and_gradients(rule, low)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _random_inputs(spec: ModelSpec, device: torch.device, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, heads = (4, length, spec.linear_num_key_heads), (4, length, spec.linear_num_value_heads)
    query = reference.l2_norm(torch.randn(*keys, spec.linear_key_head_dim, generator=generator))
    key = reference.l2_norm(torch.randn(*keys, spec.linear_key_head_dim, generator=generator))
    value = torch.randn(*heads, spec.linear_value_head_dim, generator=generator)
    log_decay = -torch.rand(heads, generator=generator) * 0.1
    write = torch.rand(heads, generator=generator)
    return [part.to(device) for part in (query, key, value, log_decay, write)]


def _output_and_gradients(rule: DeltaRule, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in inputs]
    output = rule(*leaves)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction)]


def _tuners() -> list[Any]:
    """The autotuners of all imported fla modules; they may be wrapped in decorators."""
    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while value is not None and not isinstance(getattr(value, "configs", None), list):
                    value = getattr(value, "fn", None)
                if value is not None:
                    found[id(value)] = value
    return list(found.values())


def _make_importable(package: str, wheels: Path) -> None:
    if importlib.util.find_spec(package):
        return
    # Unpacked because Triton reads the source files of its kernels.
    folder = tempfile.mkdtemp(prefix="pocket-wheels-")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
