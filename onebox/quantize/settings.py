"""The settings of a calibration, all of which determine its result."""

from dataclasses import asdict, dataclass

from onebox.spec.errors import UsageError

__all__ = ["CalibrationSettings"]


@dataclass(frozen=True)
class CalibrationSettings:
    """How much text is read and how long each block is tuned. The defaults are those of the auto-round library."""

    num_sequences: int = 128
    """That are tuned on."""
    sequence_tokens: int = 2048
    num_steps: int = 200
    batch_tokens: int = 8192
    """Tokens of one step."""
    experts_at_once: int = 16
    """Experts of a block that are tuned together; memory grows with it."""
    min_tokens: int = 64
    """An expert that fewer tokens reach is rounded to nearest."""
    num_held_out: int = 8
    """Sequences more, on which nothing is tuned: by their errors it is decided whether tuning was better."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name in ("min_tokens", "num_held_out", "seed") else 1):
                raise UsageError(f"--{name.replace('_', '-')} {value} is too small.")
        if self.sequence_tokens < 2:
            raise UsageError("--sequence-tokens 1 is too small: the MTP head needs the token after each.")
