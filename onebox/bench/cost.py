"""What a million tokens cost: energy at a price per kWh, and hardware over its lifetime. Pure functions.

Costs are in the currency of the prices. Tokens are those of answers; the energy of their prompts is included. Hardware
counts as used all the time at the measured speed, so its share is the least that it can be.
"""

from dataclasses import dataclass

from onebox.bench.record import WorkloadRecord
from onebox.spec.errors import UsageError

__all__ = ["Prices", "TokenCost", "token_cost"]

_JOULES_PER_KWH = 3.6e6
_MILLION = 1e6
_YEAR_S = 365.25 * 86400


@dataclass(frozen=True)
class Prices:
    """Prices in one currency; None: not given."""

    kwh: float | None = None
    hardware: float | None = None
    lifetime_years: float = 3.0
    api: float | None = None
    """Of a million tokens elsewhere, for the time after which the hardware has paid for itself."""

    def __post_init__(self) -> None:
        if self.api is not None and self.hardware is None:
            raise UsageError("--price-api says what is saved; give what was paid with --price-hardware too.")

    @property
    def is_set(self) -> bool:
        return self.kwh is not None or self.hardware is not None


@dataclass(frozen=True)
class TokenCost:
    """Of a million tokens of one workload; None: not known or no price given."""

    power: str
    """"box", "GPU" if only that tells, or empty."""
    energy: float | None
    hardware: float | None
    paid_after_days: float | None
    """Days of this load until the hardware is paid by what the same tokens cost elsewhere; None if never."""

    @property
    def total(self) -> float | None:
        known = [part for part in (self.energy, self.hardware) if part is not None]
        return sum(known) if known else None


def token_cost(workload: WorkloadRecord, prices: Prices) -> TokenCost | None:
    """None if the workload made no tokens."""
    made = sum(request.completion_tokens or 0 for request in workload.measured)
    if not made or not workload.duration_s:
        return None
    tokens_s = made / workload.duration_s
    power = next((name for name in ("box", "gpu") if f"{name}_j_per_token" in workload.figures), "")
    energy = hardware = paid = None
    if power and prices.kwh is not None:
        energy = workload.figures[f"{power}_j_per_token"] * _MILLION / _JOULES_PER_KWH * prices.kwh
    if prices.hardware is not None:
        hardware = prices.hardware / (prices.lifetime_years * _YEAR_S) / tokens_s * _MILLION
    if prices.hardware is not None and prices.api is not None:
        saved = prices.api - (energy or 0.0)
        paid = prices.hardware / saved * _MILLION / tokens_s / 86400 if saved > 0 else None
    return TokenCost("GPU" if power == "gpu" else power, energy, hardware, paid)
