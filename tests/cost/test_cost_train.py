"""One optimiser step against numbers worked out by hand."""

from __future__ import annotations

import pytest

from libra.cost.device import TrainCost
from libra.cost.train import step_seconds

COST = TrainCost(step=0.5, per_token=1e-4, exchange=0.25)


@pytest.mark.parametrize(("replicas", "wanted"), [(1, 0.5 + 2.0), (2, 0.5 + 1.0 + 0.25), (4, 0.5 + 0.5 + 0.25)])
def test_step_seconds(replicas: int, wanted: float) -> None:
    assert step_seconds(COST, 20_000, replicas) == pytest.approx(wanted)


def test_a_step_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="at least one training replica"):
        step_seconds(COST, 20_000, 0)
