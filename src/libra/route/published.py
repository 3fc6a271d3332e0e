"""C-MLFQ as published: a multi-level feedback queue driven by what tools return.

Invariant: a trajectory changes bucket by estimate only if the mean and the P90 of its remaining tokens name the same
other bucket, and no turn is ever placed on an instance that cannot hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from libra.route.bucket import bucket_of, server
from libra.route.causal_tree import MAX_NODES, CausalTree, ToolState, payload_class
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest, require_snapshot
from libra.trajectory import Trajectory

NAME = "cmlfq-published"
FORMAT = 1


@dataclass(slots=True)
class _Live:
    """What is remembered of a trajectory between its turns."""

    bucket: int = 0  # where it was last placed, or is to be placed when something can hold it
    instance: str | None = None  # served, or was to serve, its latest turn
    prefix_there: bool = False  # that instance has not gone since
    states: list[ToolState] = field(default_factory=list)


class PublishedCMLFQ:
    """The `cmlfq-published` policy.

    A trajectory starts in the shortest bucket. After each tool return, its prompt and tool-return states are looked up
    in the causal tree, and it migrates when the mean and the P90 of the remaining tokens fit the same other bucket.

    The rule buckets the remainder alone, while the limits of a fleet are final contexts. So a bucket's limit on the
    remainder is its limit less the mean prompt of the finished trajectories: at the start of a trajectory the final
    context is the prompt plus the remainder, and there both readings name the same bucket for the average prompt. The
    last bucket takes whatever is longer.

    An instance is eligible if it holds the context and one more turn. If the bucket has no eligible instance, the next
    larger bucket that has one serves the turn, else the next smaller one. In the bucket the turn goes to the instance
    that holds its prefix, else to the least loaded, ties by id.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._tree = CausalTree(max_nodes)
        self._prompt_tokens = 0  # of all finished trajectories
        self._live: dict[str, _Live] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        live = self._live.setdefault(request.trajectory_id, _Live())
        live.bucket = min(live.bucket, len(fleet.limits) - 1)
        reason = "starts in the shortest bucket" if live.instance is None else f"keeps bucket {live.bucket}"
        return _serve(live, request, fleet, live.bucket, reason)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        live = self._live.get(request.trajectory_id)
        if live is None:
            raise ValueError(f"trajectory {request.trajectory_id!r} was never placed: call place for its first turn")
        live.states.append(ToolState(returned.tool, payload_class(returned.returned_tokens), returned.status))
        # A new plan may have fewer buckets; the longest one takes over what the missing ones served.
        live.bucket = min(live.bucket, len(fleet.limits) - 1)
        bucket, reason = self._wanted(live, request.prompt_id, fleet.limits)
        return _serve(live, request, fleet, bucket, reason)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None

    def finished(self, trajectory: Trajectory) -> None:
        self._tree.add(trajectory)
        self._prompt_tokens += trajectory.prompt_tokens
        self._live.pop(trajectory.id, None)

    def forget(self, trajectory_id: str) -> None:
        self._live.pop(trajectory_id, None)

    def instance_gone(self, instance: str) -> None:
        for live in self._live.values():
            if live.instance == instance:
                live.prefix_there = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy": NAME,
            "prompt_tokens": self._prompt_tokens,
            "tree": self._tree.snapshot(),
            "live": [
                [trajectory_id, live.bucket, live.instance, live.prefix_there, [list(state) for state in live.states]]
                for trajectory_id, live in self._live.items()
            ],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        require_snapshot(snapshot, NAME, FORMAT)
        policy = cls()
        policy._tree = CausalTree.restore(snapshot["tree"])
        policy._prompt_tokens = snapshot["prompt_tokens"]
        policy._live = {
            trajectory_id: _Live(bucket, instance, prefix_there, [ToolState(*state) for state in states])
            for trajectory_id, bucket, instance, prefix_there, states in snapshot["live"]
        }
        return policy

    def _wanted(self, live: _Live, prompt_id: str, limits: tuple[int, ...]) -> tuple[int, str]:
        """The bucket the estimate asks for, or the trajectory's own if it does not ask clearly."""
        estimate = self._tree.estimate(prompt_id, live.states)
        if estimate is None:
            return live.bucket, "no evidence"
        mean_prompt = self._prompt_tokens / self._tree.trajectories
        by_mean = bucket_of(mean_prompt + estimate.mean, limits)
        by_p90 = bucket_of(mean_prompt + estimate.p90, limits)
        if by_mean == by_p90:
            return by_mean, f"mean {estimate.mean:.0f} and P90 {estimate.p90} remaining both fit bucket {by_mean}"
        return live.bucket, (
            f"mean {estimate.mean:.0f} remaining fits bucket {by_mean}, P90 {estimate.p90} fits bucket {by_p90}"
        )


def _serve(live: _Live, request: TurnRequest, fleet: Fleet, wanted: int, reason: str) -> Placement | None:
    """Place in the wanted bucket or the nearest that can hold the turn, and remember where."""
    needed = request.context_tokens + fleet.turn_tokens
    chosen = server(fleet.instances, needed, wanted, live.instance if live.prefix_there else None)
    if chosen is None:
        live.bucket = wanted
        return None
    if chosen.bucket != wanted:
        outgrown = any(instance.bucket == wanted for instance in fleet.instances)
        cause = (
            f"context {request.context_tokens} outgrew bucket {wanted}"
            if outgrown
            else f"bucket {wanted} has no instance"
        )
        reason = f"{reason}; {cause}"
    placement = Placement(
        instance=chosen.id,
        bucket=chosen.bucket,
        migrated=live.instance is not None and chosen.id != live.instance,
        reason=reason,
    )
    live.bucket, live.instance, live.prefix_there = chosen.bucket, chosen.id, True
    return placement
