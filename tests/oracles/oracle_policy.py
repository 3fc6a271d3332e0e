"""A policy that knows every trajectory to its end: it bounds the gain of better predictions.

Invariant: an instance's work is the true rest of the live trajectories whose latest turn went there, from the start of
that turn on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libra.route.bucket import Bucketed
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest
from libra.route.service_cost import TOKEN_SECONDS
from libra.trajectory import Trajectory

Known = Mapping[str, Trajectory] | Callable[[str], Trajectory]


@dataclass(slots=True)
class _Progress:
    trajectory: Trajectory
    turn: int  # the latest turn to place
    instance: str | None = None  # whose work includes the rest of the trajectory


class Oracle(Bucketed):
    """The `oracle` policy: the right bucket from the start, and there the instance with the least true remaining work.

    `known` returns the trajectory of an id. A trajectory's final context is the most tokens that it ever has. Priority
    is the slack in milliseconds: the time at which the group is due (0 if unknown) minus the remaining time. The
    remaining time is the tokens to generate times `token_seconds` of the instance, plus the recorded seconds of tools.
    So among trajectories that are due at the same time, the longest is first. A decision is O(instances + turns). Make
    a new policy for each run, since a snapshot cannot be restored.

    Raises ValueError for an unknown trajectory, and for a turn that the trajectory does not have.
    """

    NAME = "oracle"
    REASON = "bucket of the true final context"

    def __init__(self, known: Known, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._trajectory = known.__getitem__ if isinstance(known, Mapping) else known
        self._progress: dict[str, _Progress] = {}
        self._work: Counter[str] = Counter()  # tokens generated and returned, by instance

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        progress = self._progress.get(request.trajectory_id)
        if progress is None:
            progress = _Progress(self._known(request.trajectory_id), 0)
        self._advance(progress, progress.turn, request)
        self._progress[request.trajectory_id] = progress
        return self._counted(progress, super().place(request, fleet))

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        self._placed(request)
        progress = self._progress[request.trajectory_id]
        self._advance(progress, progress.turn + 1, request)
        return self._counted(progress, super().tool_returned(request, returned, fleet))

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        return None  # the chosen bucket holds its final context

    def forget(self, trajectory_id: str) -> None:
        progress = self._progress.pop(trajectory_id, None)
        if progress is not None:
            self._uncount(progress)
        super().forget(trajectory_id)

    def instance_gone(self, instance: str) -> None:
        for progress in self._progress.values():
            if progress.instance == instance:
                self._uncount(progress)
        del self._work[instance]  # not an error where it had none
        super().instance_gone(instance)

    def _known(self, trajectory_id: str) -> Trajectory:
        try:
            return self._trajectory(trajectory_id)
        except KeyError:
            raise ValueError(
                f"trajectory {trajectory_id!r} is not known to the oracle: give all that will be routed"
            ) from None

    def _advance(self, progress: _Progress, least: int, request: TurnRequest) -> None:
        """Advance to the first turn from `least` on that matches the request. Turns that generate nothing may have been
        left out, and a turn that was stopped elsewhere may be partly done."""
        trajectory, asked = progress.trajectory, request.context_tokens
        turn = next(
            (
                least + later
                for later, (start, its) in enumerate(
                    zip(trajectory.contexts()[least:], trajectory.turns[least:], strict=True)
                )
                if asked == start or start < asked < start + its.generated_tokens
            ),
            None,
        )
        if turn is None:
            raise ValueError(
                f"trajectory {request.trajectory_id!r}: from turn {least} on none starts at {request.context_tokens}"
                " tokens: give the oracle the trajectories as they will be routed"
            )
        self._uncount(progress)
        progress.turn = turn

    def _counted(self, progress: _Progress, placement: Placement | None) -> Placement | None:
        if placement is not None:
            progress.instance = placement.instance
            self._work[placement.instance] += _tokens_left(progress)
        return placement

    def _uncount(self, progress: _Progress) -> None:
        if progress.instance is not None:
            self._work[progress.instance] -= _tokens_left(progress)
            progress.instance = None

    def _expected(self, request: TurnRequest) -> int:
        return self._progress[request.trajectory_id].trajectory.peak_context

    def _load(self, instance: Instance) -> float:
        return self._work[instance.id]

    def _priority(self, request: TurnRequest, instance: Instance) -> int:
        progress = self._progress[request.trajectory_id]
        turns = progress.trajectory.turns[progress.turn :]
        # Where instances do not say, any value gives the same order among requests that are due at once.
        token_seconds = TOKEN_SECONDS if instance.token_seconds is None else instance.token_seconds
        left = token_seconds * sum(turn.generated_tokens for turn in turns)
        left += sum(turn.tool_seconds for turn in turns if turn.tool_seconds is not None)
        return round(1_000 * ((0.0 if request.due is None else request.due) - left))


def _tokens_left(progress: _Progress) -> int:
    return sum(turn.generated_tokens + turn.returned_tokens for turn in progress.trajectory.turns[progress.turn :])
