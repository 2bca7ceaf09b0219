"""The auto-round library's optimiser (SignRound) on single matrices: what is tuned, and the loop that tunes it.

Each weight has an offset in -0.5..0.5 that is added before it is rounded. Rounding passes gradients through, and each
step moves every offset by the sign of its gradient.

A matrix of integers becomes codes and scales, as round-to-nearest does it, but its scales are first searched for the
least squared error, weighted by how large each column's inputs are, and a factor for the scale of each group is tuned
with the offsets. (The library calls this SignRoundV2.) Scales may be negative: the largest weight of a group becomes
the code of the largest size, which is negative. The library is an optional dependency.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onebox.formats import GroupInt, pack_quantized
from onebox.spec.errors import UnsupportedError

__all__ = ["MatrixTensors", "TunedIntegers", "TunedMatrix", "library_version", "tune"]

_SCALE_DTYPE = torch.bfloat16
_OFFSET_RATE = 1.0
"""The library's: the steps together can move an offset through half of its range."""
_FACTOR_RATE = 0.5
"""Half of the library's: scales that were searched need little change."""
MatrixTensors = dict[str, Tensor]
"""The tensors that a build writes of a matrix, by suffix."""
_INSTALL = "pip install 'onebox[quantize]'"


def library_version() -> str:
    """The version of the installed auto-round library. Raises `UnsupportedError` with what to install without it."""
    try:
        import auto_round
    except ImportError as error:
        raise UnsupportedError(
            f"Calibrated quantisation uses the auto-round library, which cannot be imported ({error}): {_INSTALL}, or "
            "use `onebox build`, which rounds to nearest."
        ) from None
    version: str = auto_round.__version__
    return version


class TunedMatrix(Protocol):
    """A weight, float32 [out, in], whose rounding is tuned."""

    @property
    def offsets(self) -> Tensor:
        """Of every weight: what is added before rounding, in units of the distance between codes."""

    @property
    def factors(self) -> Tensor | None:
        """Of the scale of every group; None if scales are not tuned."""

    def weight(self) -> Tensor:
        """The rounded weight, float32 [out, in], through which gradients reach offsets and factors."""

    def tensors(self) -> MatrixTensors:
        """Of the weight as it is rounded now, on the CPU."""


class TunedIntegers:
    """A weight, float32 [out, in], whose rounding to `bits` in groups of `group_size` columns is tuned.

    `importance` [in] is the sum of squares of each column's inputs.
    """

    def __init__(self, weight: Tensor, bits: int, group_size: int, importance: Tensor | None = None) -> None:
        from auto_round.algorithms.quantization.sign_roundv2.quantizer import SignRoundOptimizedWrapperLinear

        self.bits, self.group_size = bits, group_size
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        described = {"bits": bits, "group_size": group_size, "sym": True, "data_type": "int", "act_bits": 16}
        for name, value in {**described, "scale_dtype": _SCALE_DTYPE}.items():
            setattr(layer, name, value)
        if importance is not None:
            layer.imatrix = importance
        with torch.no_grad():
            self._tuned: Any = SignRoundOptimizedWrapperLinear(
                layer, enable_torch_compile=False, device=str(weight.device)
            )

    @property
    def offsets(self) -> Tensor:
        found: Tensor = self._tuned.value
        return found

    @property
    def factors(self) -> Tensor:
        found: Tensor = self._tuned.max_scale
        return found

    def weight(self) -> Tensor:
        rounded: Tensor = self._rounded()[0]
        return rounded

    def tensors(self) -> MatrixTensors:
        return pack_quantized(self.codes())

    def codes(self) -> GroupInt:
        """The codes and scales of the weight as it is rounded now, on the CPU."""
        with torch.no_grad():
            weight, scales = self._rounded()
            scales = scales.reshape(len(weight), -1)
            steps = scales.to(torch.float32).repeat_interleave(self.group_size, dim=1)[:, : weight.shape[1]]
            codes = (weight / steps).round().to(torch.int8)
        return GroupInt(codes.cpu(), scales.to(_SCALE_DTYPE).cpu(), None, None, self.group_size, self.bits)

    def _rounded(self) -> tuple[Tensor, Tensor]:
        weight, scales, _ = self._tuned._qdq_weight(self._tuned.value, self._tuned.min_scale, self._tuned.max_scale)
        return weight, scales


def tune(matrices: Sequence[TunedMatrix], losses: Callable[[], Iterable[Tensor]], num_steps: int) -> None:
    """Minimises the sum of `losses`, of a new batch at every call, by `num_steps` steps on all matrices together.

    Gradients of a loss are computed before the next one is: the parts of a batch need not fit into memory together.
    """
    from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD

    groups = [
        {"params": [matrix.offsets for matrix in matrices], "lr": _OFFSET_RATE / num_steps},
        {
            "params": [matrix.factors for matrix in matrices if matrix.factors is not None],
            "lr": _FACTOR_RATE / num_steps,
        },
    ]
    optimizer = SignSGD(groups, lr=_OFFSET_RATE / num_steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    for _ in range(num_steps):
        for loss in losses():
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
