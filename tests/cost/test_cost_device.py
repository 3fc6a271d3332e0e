"""A profile refuses numbers that no measurement can give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost

PROFILE = DeviceProfile("slot", "tiny", EngineCost(1, 1, 1, 1, 1), TrainCost(1, 1, 1), SwitchCost(1, 1, 1), 0.1)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match=r"EngineCost\.per_turn"):
        replace(PROFILE.engine, per_turn=value)
    with pytest.raises(ValueError, match=r"TrainCost\.exchange"):
        replace(PROFILE.train, exchange=value)
    with pytest.raises(ValueError, match=r"SwitchCost\.trainer_join"):
        replace(PROFILE.switch, trainer_join=value)
    with pytest.raises(ValueError, match=r"DeviceProfile\.heldout_error"):
        replace(PROFILE, heldout_error=value)


def test_a_cost_of_zero_is_allowed() -> None:
    assert replace(PROFILE.engine, per_turn=0.0).per_turn == 0.0
