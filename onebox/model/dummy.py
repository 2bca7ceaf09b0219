"""A model with random weights in the kernels' layouts, drawn on the device: full-size benchmarks without files.

On `meta` nothing is drawn: the model has its shapes and formats alone.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS, TILE_ROWS
from onebox.kernels.common.dispatch import uses_kernels
from onebox.model.build import build_model
from onebox.model.cpu import cpu_experts, cpu_layer, cpu_linear
from onebox.model.dflash import DFlash, build_dflash
from onebox.model.experts import Experts, Fp8Experts, IntExperts, Nvfp4Experts, PlainExperts
from onebox.model.layers import StreamLayer
from onebox.model.layers.plain import Mixer, PlainLayer
from onebox.model.linear import Fp8Linear, IntLinear, Linear, Nvfp4Linear, PlainLinear
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.dflash import DFlashSpec
from onebox.spec.errors import UnsupportedError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import Module, ModuleClass, modules
from onebox.spec.traffic import ClassFormats
from onebox.spec.weights import FP8_BLOCK, INTEGER_BITS, ExpertFormats, WeightFormat

__all__ = ["DUMMY_FORMATS", "HYBRID", "DummyParts", "dummy_drafter", "dummy_model"]

# What `onebox build` makes of the 122B for one box: INT4 where most bytes are, more bits where quality needs them.
HYBRID = {
    ModuleClass.EXPERTS: WeightFormat.INT4,
    ModuleClass.ATTENTION: WeightFormat.INT4,
    ModuleClass.DELTA: WeightFormat.INT4,
    ModuleClass.DELTA_GATES: WeightFormat.INT4,
    ModuleClass.SHARED: WeightFormat.FP8,
    ModuleClass.LM_HEAD: WeightFormat.INT8,
    ModuleClass.MTP_EXPERTS: WeightFormat.INT4,
    ModuleClass.MTP_SHARED: WeightFormat.FP8,
    ModuleClass.MTP_ATTENTION: WeightFormat.INT4,
}

_PROJECTIONS = (ModuleClass.EXPERTS, ModuleClass.ATTENTION, ModuleClass.DELTA)
_OF_MTP = (ModuleClass.MTP_EXPERTS, ModuleClass.MTP_SHARED, ModuleClass.MTP_ATTENTION)
_NVFP4_EXPERTS = dict.fromkeys((ModuleClass.EXPERTS, ModuleClass.MTP_EXPERTS), WeightFormat.NVFP4)

DUMMY_FORMATS: Mapping[str, ClassFormats] = {
    "hybrid": HYBRID,
    "hybrid-int3": {**HYBRID, ModuleClass.EXPERTS: WeightFormat.INT3},
    "hybrid-int34": {**HYBRID, ModuleClass.EXPERTS: ExpertFormats(WeightFormat.INT3, WeightFormat.INT4)},
    "hybrid-int2": {**HYBRID, ModuleClass.EXPERTS: WeightFormat.INT2},
    # As published: projections and experts alone, the rest BF16.
    "int4": dict.fromkeys((*_PROJECTIONS, ModuleClass.DELTA_GATES), WeightFormat.INT4),
    "nvfp4": {**HYBRID, **_NVFP4_EXPERTS},
    "fp8": dict.fromkeys((*_PROJECTIONS, ModuleClass.SHARED, *_OF_MTP), WeightFormat.FP8),
    "bf16": {},
}
"""By name: formats of classes of modules; other classes are BF16. `nvfp4` is the hybrid with other experts, and so are
`hybrid-int3`, `hybrid-int34` (gate and up of 3 bits, down of 4) and `hybrid-int2`."""

# A weight's spread, as the model's own initialisation has it.
_SPREAD = 0.02
_E2M1_SPREAD = 2.93
"""Of all E2M1 codes alike."""

_TILED = (WeightFormat.INT4, WeightFormat.INT3, WeightFormat.INT2)
_EXPERT_FORMATS = (*_TILED, WeightFormat.FP8, WeightFormat.NVFP4)


class DummyMatrices:
    """Random linears of any modules, each class of them in its format.

    BF16, or float32 on a CPU, if the class has no format or its sizes do not fit it.
    """

    def __init__(self, own: Iterable[Module], formats: ClassFormats, device: torch.device) -> None:
        self.device = device
        self._formats = formats
        self._modules: dict[str, Module] = {module.name: module for module in own}
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def linear(self, *names: str, float32_output: bool = False) -> Linear:  # noqa: ARG002 - kernels sum in float32 anyway
        first = self._modules[names[0]]
        rows, columns = sum(self._modules[name].shape[0] for name in names), first.shape[1]
        chosen = self._formats.get(first.module_class, WeightFormat.BF16) if first.is_matrix else WeightFormat.BF16
        if chosen in (WeightFormat.INT4, WeightFormat.INT8) and columns % TILE_COLUMNS:
            chosen = WeightFormat.BF16
        if chosen is WeightFormat.BF16:
            return self.tied_head(self._normal(rows, columns))
        if chosen is WeightFormat.FP8:
            return Fp8Linear(True, *self._fp8(rows, columns))
        if chosen is WeightFormat.NVFP4:
            return Nvfp4Linear(*self._nvfp4(rows, columns), self._full(_SPREAD / _E2M1_SPREAD, 1))
        bits = 4 if chosen is WeightFormat.INT4 else 8
        if chosen not in (WeightFormat.INT4, WeightFormat.INT8):
            raise UnsupportedError(f"Dummy linears are BF16, FP8, NVFP4, INT8 or INT4, not {chosen}.")
        groups = columns // TILE_COLUMNS
        tiles = self._bytes(groups, -(-rows // TILE_ROWS), 256 * bits)
        return IntLinear(bits, tiles, self._scales(*((groups, rows) if bits == 4 else (rows,)), bits=bits))

    def can_join(self, *names: str) -> bool:
        formats = {self._formats.get(self._modules[name].module_class, WeightFormat.BF16) for name in names}
        return uses_kernels(self.device) and len(formats) == 1 and formats <= {WeightFormat.INT4, WeightFormat.BF16}

    def tied_head(self, embedding: Tensor) -> Linear:
        return PlainLinear(embedding) if uses_kernels(self.device) else cpu_linear(embedding, embedding.dtype)

    def _tiles(self, count: int, rows: int, columns: int, chosen: WeightFormat) -> tuple[Tensor, Tensor]:
        """(tiles, scales) of `count` matrices [rows, columns] of integers in groups."""
        shape, bits = (count, rows // TILE_ROWS, columns // TILE_COLUMNS), INTEGER_BITS[chosen]
        return self._bytes(*shape, 256 * bits), self._scales(*shape, TILE_ROWS, bits=bits)

    def _normal(self, *shape: int) -> Tensor:
        dtype = torch.bfloat16 if uses_kernels(self.device) else torch.float32
        drawn = torch.empty(shape, dtype=dtype, device=self.device)
        return drawn.normal_(0, _SPREAD, generator=self._generator) if self._generator else drawn

    def _bytes(self, *shape: int, below: int = 256) -> Tensor:
        drawn = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return drawn.random_(0, below, generator=self._generator) if self._generator else drawn

    def _fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """(codes [..., N, K], block scales)."""
        # Codes whose magnitude is below 0x70 are finite, up to 128; a scale brings them back to the spread.
        codes = self._bytes(*shape, below=0xE0)
        codes += (codes >= 0x70).to(torch.uint8) * 0x10
        blocks = (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))
        scale = torch.full(blocks, _SPREAD / 32, dtype=torch.bfloat16, device=self.device)
        return codes.view(torch.float8_e4m3fn), scale

    def _nvfp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """(codes [..., N, K/2], scales [..., N, K/16], all 1)."""
        *rows, columns = shape
        scale = torch.full((*rows, columns // 16), 0x38, dtype=torch.uint8, device=self.device)
        return self._bytes(*rows, columns // 2), scale.view(torch.float8_e4m3fn)

    def _full(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=self.device)

    def _scales(self, *shape: int, bits: int) -> Tensor:
        """Of either sign: codes have one negative level more, and a mean of all weights would make all tokens alike."""
        # Codes are uniform over 2^bits levels, whose spread is 2^bits / sqrt(12).
        signs: Tensor = self._bytes(*shape, below=2).to(torch.float16) * 2 - 1
        return signs.mul_(_SPREAD * 12**0.5 / 2**bits)


class DummyParts(DummyMatrices):
    """Random weights of a whole model."""

    def __init__(self, spec: ModelSpec, formats: ClassFormats, device: torch.device) -> None:
        super().__init__(modules(spec), formats, device)
        self.has_mtp = spec.mtp_num_hidden_layers > 0
        self._spec = spec

    def experts(self, name: str) -> Experts:
        count, hidden, inner = self._spec.num_experts, self._spec.hidden_size, self._spec.moe_intermediate_size
        chosen = self._formats.get(self._modules[f"{name}.0.gate_proj"].module_class, WeightFormat.BF16)
        has_kernel = set(chosen) <= set(_TILED) if isinstance(chosen, ExpertFormats) else chosen in _EXPERT_FORMATS
        if hidden % TILE_COLUMNS or inner % TILE_COLUMNS or not has_kernel:
            if not uses_kernels(self.device):
                each = ((self._normal(1, hidden, 2 * inner), self._normal(1, inner, hidden)) for _ in range(count))
                return cpu_experts(each, count)
            return PlainExperts(self._normal(count, 2 * inner, hidden), self._normal(count, hidden, inner))
        if chosen is WeightFormat.FP8:
            return Fp8Experts(*self._fp8(count, 2 * inner, hidden), *self._fp8(count, hidden, inner))
        if chosen is WeightFormat.NVFP4:
            multipliers = self._full(_SPREAD / _E2M1_SPREAD, count, 3)
            return Nvfp4Experts(*self._nvfp4(count, 2 * inner, hidden), *self._nvfp4(count, hidden, inner), multipliers)
        gate_up, down = chosen if isinstance(chosen, ExpertFormats) else (chosen, chosen)
        return IntExperts(*self._tiles(count, 2 * inner, hidden, gate_up), *self._tiles(count, hidden, inner, down))

    def small(self, name: str) -> Tensor:
        return self._normal(*self._modules[name].shape).to(torch.float32)

    def embedding(self, name: str) -> Tensor:
        return self._normal(*self._modules[name].shape)

    def choose_layer(self, layer: PlainLayer[Mixer]) -> StreamLayer:
        return layer if uses_kernels(self.device) else cpu_layer(layer)


class DummyDrafterParts(DummyMatrices):
    """Random weights of a block drafter; its norms are factors around one."""

    def small(self, name: str) -> Tensor:
        return 1 + self._normal(*self._modules[name].shape).to(torch.float32)


def dummy_drafter(
    spec: DFlashSpec, chosen: WeightFormat, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> DFlash:
    """The block drafter of `spec` with random weights, its matrices in the format `chosen`."""
    parts = DummyDrafterParts(spec.modules(), {ModuleClass.DRAFTER: chosen}, device)
    return build_dflash(spec, parts, dtype)


def dummy_model(
    spec: ModelSpec,
    formats: ClassFormats,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    with_mtp: bool = True,
) -> Qwen35:
    """The model of `spec` with random weights in `formats`."""
    return build_model(spec, DummyParts(spec, formats, device), dtype, with_mtp=with_mtp)
