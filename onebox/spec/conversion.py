"""`LoadConversion`: formats that weights are given while they are loaded, without a checkpoint being written.

The same formats, made by the same rule, as `onebox build` writes. Stdlib only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.spec.errors import UsageError
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import WeightFormat

__all__ = ["AS_STORED", "CONVERSION_BYTES", "LM_HEAD_FORMATS", "MTP_FORMATS", "LoadConversion"]

_KEEP = "keep"
LM_HEAD_FORMATS = (_KEEP, WeightFormat.INT8.value)
CONVERSION_BYTES = 512 << 20
"""Memory that converting takes beyond the weights: stored slabs that were read, and float32 copies of those that are
being rounded. Measured with eight threads: 405 MB."""
MTP_FORMATS = (_KEEP, WeightFormat.INT4.value, WeightFormat.FP8.value)


@dataclass(frozen=True)
class LoadConversion:
    """The format of the LM head, and of the MTP layer's experts and projections; None: as stored."""

    lm_head: WeightFormat | None = None
    mtp: WeightFormat | None = None

    @classmethod
    def parse(cls, lm_head: str = _KEEP, mtp_format: str = _KEEP) -> "LoadConversion":
        """From the values of `--lm-head` and `--mtp-format`."""
        return cls(
            lm_head=_parse("--lm-head", lm_head, LM_HEAD_FORMATS),
            mtp=_parse("--mtp-format", mtp_format, MTP_FORMATS),
        )

    def __bool__(self) -> bool:
        return bool(self.lm_head or self.mtp)

    @property
    def formats(self) -> Mapping[ModuleClass, WeightFormat]:
        """The classes that are converted, and to what."""
        result = {}
        if self.lm_head:
            result[ModuleClass.LM_HEAD] = self.lm_head
        if self.mtp:
            kinds = (ModuleClass.MTP_EXPERTS, ModuleClass.MTP_SHARED, ModuleClass.MTP_ATTENTION)
            result |= dict.fromkeys(kinds, self.mtp)
        return result

    @property
    def flags(self) -> Mapping[ModuleClass, str]:
        """The same classes, and the flag that asks for it."""
        return {kind: f"--{_name(kind)} {value.value}" for kind, value in self.formats.items()}


AS_STORED = LoadConversion()
"""Nothing is converted."""


def _name(kind: ModuleClass) -> str:
    return "lm-head" if kind is ModuleClass.LM_HEAD else "mtp-format"


def _parse(flag: str, value: str, allowed: Sequence[str]) -> WeightFormat | None:
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not known while loading: give {', '.join(allowed[:-1])} or {allowed[-1]}.")
    return None if value == _KEEP else WeightFormat(value)
