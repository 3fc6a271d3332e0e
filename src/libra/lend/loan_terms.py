"""The terms in a cluster file under which a pool that serves users lends its devices.

Invariant: terms have either a forecast, or a log of requests from which a forecast is made. Times are seconds. File
names are relative to the folder of the cluster file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import StrictInt

from libra.config.yaml_file import Section

_MOST_BINS = 1_000_000  # of a season


@dataclass(frozen=True, slots=True)
class TrafficLog:
    """Requests that all engines of the pool served together, counted in bins of `bin` seconds."""

    requests: str  # the file
    bin: float  # a loan is planned for one bin
    season: float  # seconds after which traffic repeats itself, such as a day

    def __post_init__(self) -> None:
        _require_positive("bin", self.bin)
        if not 1 <= self.season_bins <= _MOST_BINS or not math.isclose(self.season, self.season_bins * self.bin):
            raise ValueError(f"season is {self.season:g} s; give 1 to {_MOST_BINS:,} whole bins of {self.bin:g} s")

    @property
    def season_bins(self) -> int:
        return round(self.season / self.bin) if math.isfinite(self.season) else 0


@dataclass(frozen=True, slots=True)
class RatesAhead:
    """Requests/s that may reach all engines of the pool together in the coming `seconds`, all equally probable."""

    rates: tuple[float, ...]
    seconds: float

    def __post_init__(self) -> None:
        _require_positive("seconds", self.seconds)
        if not self.rates or not all(0 <= rate < math.inf for rate in self.rates):
            raise ValueError("rates are requests/s, 0 or more and finite; give one or more")


@dataclass(frozen=True, slots=True)
class LoanTerms:
    """The model that the pool serves, its latency targets, its certificates, and its traffic."""

    model: str  # as for `--model`
    tensor_parallel_size: int  # GPUs of one serving engine
    ttft: float
    tpot: float
    certificates: tuple[str, ...]  # files of `libra lend check`
    traffic: TrafficLog | RatesAhead

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size is {self.tensor_parallel_size}; set it to 1 or more")
        for name in ("ttft", "tpot"):
            _require_positive(name, getattr(self, name))
        if not self.certificates:
            raise ValueError("certificates is empty; name one that `libra lend check` has written")


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}; give a positive number of seconds")


class _TrafficSection(Section):
    requests: str
    bin: float
    season: float


class _ForecastSection(Section):
    rates: tuple[float, ...]
    seconds: float


class LoanSection(Section):
    """`lends` of a serving pool."""

    model: str
    ttft: float
    tpot: float
    certificates: tuple[str, ...]
    tensor_parallel_size: StrictInt = 1
    traffic: _TrafficSection | None = None
    forecast: _ForecastSection | None = None

    def terms(self) -> LoanTerms:
        """The terms of this section. Raises ValueError that begins with the key."""
        if (self.traffic is None) == (self.forecast is None):
            raise ValueError(
                "traffic: give either a log of the pool's traffic (requests, bin, season), or forecast (rates, seconds)"
            )
        ahead: TrafficLog | RatesAhead
        try:
            if self.traffic is not None:
                ahead = TrafficLog(self.traffic.requests, self.traffic.bin, self.traffic.season)
            else:
                assert self.forecast is not None
                ahead = RatesAhead(self.forecast.rates, self.forecast.seconds)
        except ValueError as error:
            raise ValueError(f"{'forecast' if self.traffic is None else 'traffic'}.{error}") from None
        return LoanTerms(self.model, self.tensor_parallel_size, self.ttft, self.tpot, self.certificates, ahead)
