from __future__ import annotations

import numpy as np
import pytest

from libra.lend.traffic.forecast import LEAST_ERRORS, TrafficForecast, forecast_from


def daily(bins: int, period: int, seed: int, noise: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    season = 1 + 0.6 * np.sin(2 * np.pi * np.arange(bins) / period)
    return 10 * season * rng.lognormal(0, noise, bins)


def test_a_season_is_learned() -> None:
    rates = daily(24 * 20, 24, seed=3, noise=0.05)

    def error(forecast: TrafficForecast) -> float:
        errors = []
        for at, rate in enumerate(rates):
            made = forecast.forecast(6)  # six bins ahead: of the bin at + 5
            if made is not None and at > 24 * 5 and at + 5 < len(rates):
                errors.append(abs(np.log(made.rate / rates[at + 5])))
            forecast.observe(float(rate), (6,))
        return float(np.mean(errors))

    assert error(TrafficForecast(3600.0, 24)) < 0.1 < error(TrafficForecast(3600.0, 1))


def test_the_cases_are_as_wide_as_past_errors() -> None:
    forecast, inside, asked = TrafficForecast(60.0, 48), 0, 0
    for at, rate in enumerate(daily(48 * 60, 48, seed=4, noise=0.2)):
        made = forecast.forecast(cases=10)
        if made is not None and at > 48 * 10:
            asked += 1
            inside += made.cases[0] <= rate <= made.cases[-1]  # the quantiles at 5 % and 95 %
            assert list(made.cases) == sorted(made.cases)
        forecast.observe(float(rate))
    assert inside / asked == pytest.approx(0.9, abs=0.02)


def test_nothing_is_claimed_before_errors_are_known() -> None:
    forecast = TrafficForecast(60.0, 10)
    for _ in range(LEAST_ERRORS):
        forecast.observe(5.0)
        assert forecast.forecast() is None
    forecast.observe(5.0)
    made = forecast.forecast()
    assert made is not None and made.rate == pytest.approx(5.0) and made.cases == pytest.approx([5.0] * 9)
    assert made.share_within(6.0) == 1.0 and made.share_within(4.0) == 0.0


def test_a_silence_is_no_error_and_ends() -> None:
    forecast = TrafficForecast(60.0, 4)
    for _ in range(40):
        forecast.observe(0.0)
    made = forecast.forecast()
    assert made is not None and made.rate == 0.0
    for _ in range(30):
        forecast.observe(3.0)
    made = forecast.forecast()
    assert made is not None and made.rate == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrafficForecast(0.0, 4), "bins of 0 s"),
        (lambda: TrafficForecast(1.0, 4, level_weight=0.0), "level_weight is 0"),
        (lambda: TrafficForecast(1.0, 4).observe(-1.0), "a rate of -1"),
        (lambda: TrafficForecast(1.0, 4).forecast(0), "horizon 0"),
    ],
)
def test_what_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_log_is_counted_in_whole_bins() -> None:
    steady = [0.5 * number for number in range(2 * 30)]  # two a second for just under 30 s
    made = forecast_from(steady, 1.0, 4)
    assert made.rate == pytest.approx(2.0) and made.cases == pytest.approx([2.0] * 9)
    with pytest.raises(ValueError, match="the log has 14 whole bins of 2 s; a forecast needs 21: give a longer log"):
        forecast_from(steady, 2.0, 4)
    with pytest.raises(ValueError, match="the log has 0 whole bins"):
        forecast_from([], 2.0, 4)
