"""How DeltaNet's recurrent states are stored, by the names of `--mamba-ssm-cache-dtype`. Stdlib only.

Arithmetic is float32 in every dtype. A state is rounded, to nearest, ties to even, where a position ends that may be
stored: after every token of decoding, and after every 64 tokens of a prompt and its last. Where it is rounded follows
from the tokens alone: drafts, company, and how a prompt was cut or cached have no part in it.
"""

from enum import StrEnum

from onebox.spec.errors import UsageError

__all__ = ["StateDtype"]


class StateDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @staticmethod
    def parse(name: str) -> "StateDtype":
        """The dtype selected by `--mamba-ssm-cache-dtype`; auto is the one that checkpoints of the family name."""
        if name == "auto":
            return StateDtype.FLOAT32
        try:
            return StateDtype(name)
        except ValueError:
            known = ", ".join(StateDtype)
            raise UsageError(f"--mamba-ssm-cache-dtype {name!r} is not known; give auto, {known}.") from None

    @property
    def num_bytes(self) -> int:
        return 4 if self is StateDtype.FLOAT32 else 2
