"""A profile refuses numbers that no measurement can give; a step against numbers worked out by hand."""

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


COST = TrainCost(step=0.5, per_token=1e-4, exchange=0.25)


@pytest.mark.parametrize(("replicas", "wanted"), [(1, 0.5 + 2.0), (2, 0.5 + 1.0 + 0.25), (4, 0.5 + 0.5 + 0.25)])
def test_step_seconds(replicas: int, wanted: float) -> None:
    assert COST.step_seconds(20_000, replicas) == pytest.approx(wanted)


def test_a_step_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="at least one training replica"):
        COST.step_seconds(20_000, 0)
