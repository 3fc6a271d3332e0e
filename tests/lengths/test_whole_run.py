"""The tracker as a simulated run feeds it, where tools wait and engines slow down with load."""

from __future__ import annotations

import numpy as np

from benchmarks.tracking import simulated


def test_in_a_whole_run_lengths_are_those_of_a_tracker_that_knows_all_ends() -> None:
    errors = simulated("r2e_gym", 0, steps=12)[4:]
    tracked, finished_only = (
        np.mean([at[name] for at in errors], axis=0) for name in ("tracked", "finished only")
    )  # P50, P90, P99 and mean
    assert np.abs(tracked).max() < 0.05
    assert np.abs(finished_only).max() > 0.1
