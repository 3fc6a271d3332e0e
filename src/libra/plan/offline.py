"""What the planner is asked when there is a log of trajectories and no run.

Invariant: the log is read once and in order, and what it cannot say is assumed in the open. For a run on one machine
unfinished trajectories are left out, every group trains, the router never misses, and a tool call of unknown duration
takes no time; for a cluster unfinished ones count as lower bounds, and the recipe says the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from libra.config.recipe import Recipe
from libra.config.run import ConfigError, RunConfig
from libra.cost.device import DeviceProfile
from libra.lengths import LengthTracker
from libra.plan.options.slots import SLOT_CLASSES, SlotCounts, SlotRequest, longest_context, make_request, make_tracker
from libra.plan.planner import PLANNER_HALF_LIFE_STEPS, recipe_tracker
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What a log says about the work of one step."""

    tracker: LengthTracker
    finished: int
    unfinished: int  # how long they would have become is unknown
    longest_turn: int  # tokens; no turn of the log is longer
    longest_tool_call: float  # seconds, as counted
    cut_tool_calls: int  # that took longer than they count
    recent: tuple[Trajectory, ...] = ()  # finished ones, to draw from in simulation; see `gather_workload`


class _ToolCalls:
    """Tool calls of the trajectories that pass through; those longer than `longest` seconds are cut."""

    def __init__(self, longest: float | None) -> None:
        self._limit = longest
        self.longest, self.cut = 0.0, 0

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        longest = max((turn.tool_seconds or 0.0 for turn in trajectory.turns), default=0.0)
        if self._limit is None or longest <= self._limit:
            self.longest = max(self.longest, longest)
            return trajectory
        limit = self.longest = self._limit
        self.cut += sum((turn.tool_seconds or 0.0) > limit for turn in trajectory.turns)
        turns = (
            turn if turn.tool_seconds is None else replace(turn, tool_seconds=min(turn.tool_seconds, limit))
            for turn in trajectory.turns
        )
        return replace(trajectory, turns=tuple(turns))


def gather(
    config: RunConfig, trajectories: Iterable[Trajectory], longest_tool_call: float | None = None
) -> LogEvidence:
    """Read a log once, oldest first, in memory that does not grow with it. Tool calls of more than `longest_tool_call`
    seconds count as so long.

    Raises `ConfigError` when no trajectory is finished, or when one is longer than every engine size.
    """
    tracker = make_tracker(config.planner)
    holds = longest_context(config.engines)
    finished = unfinished = too_long = longest = longest_turn = 0
    tool_calls = _ToolCalls(longest_tool_call)
    for trajectory in map(tool_calls, trajectories):
        # An unfinished trajectory is at least this long: one that no engine holds already tells.
        longest = max(longest, trajectory.peak_context)
        if trajectory.peak_context > holds:
            too_long += 1
        elif trajectory.finished:
            finished += 1
            longest_turn = max(longest_turn, *(turn.generated_tokens for turn in trajectory.turns))
            tracker.observe(trajectory)
        else:
            unfinished += 1
    if too_long:
        name = max(config.engines, key=lambda name: config.engines[name].max_model_len)
        raise ConfigError(
            f"engines.{name}.max_model_len: it is {holds}, the largest, and {too_long} of the log's"
            f" {too_long + finished + unfinished} trajectories hold more, the longest {longest} tokens: raise it to"
            f" {longest} at least"
        )
    if not finished:
        raise ConfigError(
            f"trajectories: the log has {unfinished}, none of them finished; give a log with at least one finished"
            " trajectory, such as the trajectories.jsonl of a run"
        )
    return LogEvidence(tracker, finished, unfinished, longest_turn, tool_calls.longest, tool_calls.cut)


def gather_workload(
    recipe: Recipe, trajectories: Iterable[Trajectory], longest_tool_call: float | None = None
) -> LogEvidence:
    """Read a log once, for a cluster. Older trajectories weigh less, by half every
    `PLANNER_HALF_LIFE_STEPS` steps' worth.

    Unfinished ones count as lower bounds of their length; a tool return of unknown duration takes what the recipe says,
    one of more than `longest_tool_call` seconds counts as so long. The latest finished ones are kept: as many as have,
    unweighted, the mean age of all of them as the tracker weighs them.
    """
    tracker = recipe_tracker(recipe, PLANNER_HALF_LIFE_STEPS)
    recent: deque[Trajectory] = deque(maxlen=math.ceil(2 * tracker.half_life / math.log(2)))
    running: list[Trajectory] = []
    finished = longest_turn = 0
    tool_calls = _ToolCalls(longest_tool_call)
    for trajectory in map(tool_calls, trajectories):
        longest_turn = max([longest_turn, *(turn.generated_tokens for turn in trajectory.turns)])
        if trajectory.finished:
            finished += 1
            tracker.observe(trajectory)
            recent.append(trajectory)
        else:
            running.append(trajectory)
    if running:
        tracker.observe_running(running)
    return LogEvidence(tracker, finished, len(running), longest_turn, tool_calls.longest, tool_calls.cut, tuple(recent))


def request_from(config: RunConfig, evidence: LogEvidence, profile: DeviceProfile) -> SlotRequest:
    """The planning question for what `gather` found."""
    cluster = config.cluster
    return make_request(
        config.training,
        config.engines,
        evidence.tracker.classes(SLOT_CLASSES),
        profile,
        fleet=SlotCounts(cluster.core, cluster.hybrid, cluster.rollout),
        max_turn_tokens=max(1, evidence.longest_turn),
        train_tokens=evidence.tracker.mean_peak,  # as if every group gave a signal to train on
        router_hit=1.0,
        current=None,
    )
