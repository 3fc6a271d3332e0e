"""A cell of `routing_strong`: all policies over one run of a workload, on an idle fleet.

Invariant: all policies see the same trajectories, turns and fleet in the same order; what C-MLFQ predicts is written
down at the moments at which its placements are judged, and changes none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.workloads.baselines import TURN_TOKENS, whole_run
from benchmarks.workloads.definition import read
from benchmarks.workloads.routing_quality import Quality, evaluate, static_fleet
from libra.route.bucket import bucket_of
from libra.route.catalogue import POLICIES, policy_named
from libra.route.cmlfq import CMLFQ
from libra.route.oracle import Oracle
from libra.route.policy import Fleet, Placement, Policy, ToolReturn, TurnRequest
from libra.route.remaining import Remaining
from libra.route.tool_state import payload_class, state_of
from libra.trajectory import Trajectory

ROUTED = (*POLICIES, Oracle.NAME)  # those whose placements are counted
PREDICTED = ("median", "most likely")  # buckets of a prediction


class Foretelling(CMLFQ):
    """`cmlfq`, with the buckets that its prediction names at a trajectory's first placement, and instead of these at
    its first tool return once there is one: by trajectory, as of `PREDICTED`."""

    def __init__(self) -> None:
        super().__init__()
        self.foretold: dict[str, tuple[int, int]] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        if request.trajectory_id not in self._live:
            self._foretell(request, self._hierarchy.predict(request, ()), fleet)
        return super().place(request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        if self._live[request.trajectory_id].returns == 0:
            state = state_of(returned.tool, payload_class(returned.returned_tokens), returned.status)
            self._foretell(request, self._hierarchy.predict(request, (state,)), fleet)
        return super().tool_returned(request, returned, fleet)

    def _foretell(self, request: TurnRequest, remaining: Remaining | None, fleet: Fleet) -> None:
        if remaining is not None:
            self.foretold[request.trajectory_id] = buckets_of(remaining, request.context_tokens, fleet.limits)


def buckets_of(remaining: Remaining, context: int, limits: Sequence[int]) -> tuple[int, int]:
    """The bucket of the median final context, and the most likely bucket (ties: the shorter one)."""
    beyond = [1.0, *(remaining.beyond(limit - context) for limit in limits[:-1]), 0.0]
    likely = -np.diff(beyond)
    return bucket_of(context + remaining.quantile(0.5), limits), int(likely.argmax())


def judge(workload: str, signal: str, steps: int, seed: int) -> dict[str, Any]:
    """Shares of 0 to 1 for each of `ROUTED`, and the accuracy of the buckets that `cmlfq` predicts. `seed` is added to
    the workload's. The first step teaches and is not counted."""
    what = read(workload)
    trajectories = whole_run_of(workload, signal, steps, seed)
    step = what.groups_per_step * what.shape.samples_per_prompt
    fleet = static_fleet(what.limits, turn_tokens=TURN_TOKENS)
    found: dict[str, Any] = {}
    for name in ROUTED:
        policy: Policy
        foretelling = Foretelling()
        if name == CMLFQ.NAME:
            policy = foretelling
        elif name == Oracle.NAME:
            policy = Oracle({it.id: it for it in trajectories})
        else:
            policy = policy_named(name, seed=seed)
        quality = evaluate(policy, trajectories, fleet, batch=step, warm_up=step)
        found[name] = {
            "accuracy": quality.single_shot_accuracy,
            "balanced": quality.balanced_accuracy,
            "migrated": quality.migrated_share,
        }
        if name == CMLFQ.NAME:
            found["predicted"] = dict(zip(PREDICTED, hits(quality, foretelling.foretold), strict=True))
        found["majority"] = quality.majority_rate
    return found


def hits(quality: Quality, foretold: dict[str, tuple[int, int]]) -> list[dict[str, float]]:
    """For each of `PREDICTED`, the share of the counted trajectories whose true bucket it names, and the mean of that
    share over the true buckets that occur. Raises KeyError for a trajectory of which nothing was foretold."""
    true = quality.outcomes["bucket"]
    named = np.array([foretold[id] for id in quality.ids])
    return [
        {
            "accuracy": float((column == true).mean()),
            "balanced": float(np.mean([(column == true)[true == bucket].mean() for bucket in np.unique(true)])),
        }
        for column in named.T
    ]


def whole_run_of(workload: str, signal: str, steps: int, seed: int) -> list[Trajectory]:
    """The drift of the whole workload in `steps` steps: all trajectories, in order."""
    what = read(workload)
    episodes = what.episodes(signal, seed=what.seed + seed, steps=steps)
    return whole_run(replace(what, steps=steps), episodes)
