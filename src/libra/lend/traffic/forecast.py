"""Forecast of traffic: the season, the recent level, and the errors of past forecasts.

Invariant: the stated error of a forecast is that of its own past forecasts, made the same way from the data at that
time. Without enough past forecasts there is no forecast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_ERRORS = 20  # past forecasts of a horizon before their errors are used as quantiles


@dataclass(frozen=True, slots=True)
class RateForecast:
    """Forecast rate of one bin. `cases` are rates of equal probability, rising; `rate` need not be their mean."""

    rate: float
    cases: tuple[float, ...]

    def share_within(self, rate: float) -> float:
        """Probability that the rate is at most `rate`."""
        return sum(case <= rate for case in self.cases) / len(self.cases)


class TrafficForecast:
    """Forecast of the rates of bins of equal length, from the rates of earlier bins.

    The forecast of a bin is its season times the level. The season of a bin compares the bin's rate with the mean rate
    of its period: an exponentially weighted mean of their ratio over earlier periods, 1 in the first period. The level
    is an exponentially weighted mean of recent rates, each divided by its season (Holt & Winters' multiplicative form,
    without a trend).
    """

    def __init__(self, bin_seconds: float, period_bins: int, *, level_weight: float = 0.3, season_weight: float = 0.3):
        if not bin_seconds > 0 or period_bins < 1:
            raise ValueError(
                f"bins of {bin_seconds:g} s, {period_bins} a period; give a positive length and at least 1"
            )
        for name, weight in (("level_weight", level_weight), ("season_weight", season_weight)):
            if not 0 < weight <= 1:
                raise ValueError(f"{name} is {weight:g}; it must be above 0 and at most 1")
        self.bin_seconds = bin_seconds
        self.period_bins = period_bins
        self._level_weight = level_weight
        self._season_weight = season_weight
        self._season = np.ones(period_bins)
        self._level = math.nan
        self._period: list[float] = []  # rates of the period that is under way
        self._bins = 0
        self._made: dict[int, list[tuple[int, float]]] = {}  # bin that was forecast: (horizon, rate)
        self._errors: dict[int, deque[float]] = {}  # horizon: log of actual over forecast

    def observe(self, rate: float, horizons: tuple[int, ...] = (1,)) -> None:
        """Add the rate of the bin that has ended, in requests/s. The errors of forecasts `horizons` bins ahead are
        kept."""
        if not 0 <= rate < math.inf:
            raise ValueError(f"a rate of {rate:g} requests/s; it must be 0 or more, and finite")
        for horizon, forecast in self._made.pop(self._bins, ()):
            # A bin without a request counts as half a request, for a finite logarithm.
            least = 0.5 / self.bin_seconds
            error = math.log(max(rate, least) / max(forecast, least))
            self._errors.setdefault(horizon, deque(maxlen=4 * self.period_bins + 200)).append(error)
        at = self._bins % self.period_bins
        season = self._season[at]
        now = rate / season if season > 0 else rate
        self._level = now if math.isnan(self._level) else self._level + self._level_weight * (now - self._level)
        self._period.append(rate)
        self._bins += 1
        if len(self._period) == self.period_bins:
            self._end_period()
        for horizon in horizons:
            self._made.setdefault(self._bins + horizon - 1, []).append((horizon, self._rate(horizon)))

    def _end_period(self) -> None:
        rates = np.array(self._period)
        self._period = []
        if (mean := float(rates.mean())) > 0:
            first = self._bins == self.period_bins
            weight = 1.0 if first else self._season_weight
            level = self._level * self._season[-1]
            self._season += weight * (rates / mean - self._season)
            if self._season[-1] > 0:
                self._level = level / self._season[-1]

    def _rate(self, horizon: int) -> float:
        return float(self._level * self._season[(self._bins + horizon - 1) % self.period_bins])

    def forecast(self, horizon: int = 1, cases: int = 9) -> RateForecast | None:
        """Forecast of the bin `horizon` bins ahead; None: fewer than 20 errors of that horizon are known."""
        if horizon < 1 or cases < 1:
            raise ValueError(f"horizon {horizon}, {cases} cases; both are 1 or more")
        errors = self._errors.get(horizon, ())
        if len(errors) < LEAST_ERRORS:
            return None
        rate = self._rate(horizon)
        middles = (np.arange(cases) + 0.5) / cases
        return RateForecast(rate, tuple(float(rate * math.exp(e)) for e in np.quantile(errors, middles)))


def forecast_from(arrivals: Sequence[float], bin_seconds: float, period_bins: int, cases: int = 9) -> RateForecast:
    """Forecast of the bin after the last whole one of a log, whose first bin begins at 0. `arrivals` are seconds,
    rising. Raises ValueError if the log has too few bins for a forecast."""
    made = TrafficForecast(bin_seconds, period_bins)
    bins = int(arrivals[-1] / bin_seconds) if len(arrivals) else 0
    ends = np.searchsorted(arrivals, np.arange(bins + 1) * bin_seconds)
    for count in np.diff(ends):
        made.observe(float(count) / bin_seconds)
    found = made.forecast(cases=cases)
    if found is None:
        raise ValueError(
            f"the log has {bins} whole bins of {bin_seconds:g} s; a forecast needs {LEAST_ERRORS + 1}: give a longer"
            " log, or a shorter bin"
        )
    return found
