"""Planning requests from a log of trajectories, without a run.

Invariant: the log is read once and in order, and notes state all assumptions about missing data. For a run on one
machine, unfinished trajectories are left out, and every group trains. The router makes no errors, and a tool call of
unknown duration takes no time. For a cluster, unfinished trajectories count as lower bounds, and the recipe has the
other assumptions.
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
    """Evidence from a log about the work of one step."""

    tracker: LengthTracker
    finished: int  # trajectories
    unfinished: int  # trajectories, whose final lengths are unknown
    longest_turn: int  # generated tokens of the longest turn
    longest_tool_call: float  # seconds, after cutting
    cut_tool_calls: int  # tool calls whose durations were cut
    recent: tuple[Trajectory, ...] = ()  # latest finished ones, for simulation; see `gather_workload`


class _ToolCalls:
    """Cuts tool calls to `longest` seconds, and records the longest duration and the number of cuts."""

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
    """Read a log once, oldest first, in constant memory. Tool calls are cut to `longest_tool_call` seconds.

    Raises `ConfigError` if no trajectory is finished, or if one is too long for every engine size.
    """
    tracker = make_tracker(config.planner)
    holds = longest_context(config.engines)
    finished = unfinished = too_long = longest = longest_turn = 0
    tool_calls = _ToolCalls(longest_tool_call)
    for trajectory in map(tool_calls, trajectories):
        # An unfinished trajectory will be at least this long, so it counts as too long, too.
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
            f"engines.{name}.max_model_len: the largest value is {holds}, but {too_long} of the log's"
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
    """Read a log once, for a cluster. Weights of trajectories halve every `PLANNER_HALF_LIFE_STEPS` steps' worth.

    Unfinished trajectories count as lower bounds of their length. A tool return of unknown duration takes the recipe's
    seconds; long durations are cut to `longest_tool_call` seconds. The latest finished trajectories are kept. Their
    mean age is that of the tracker's weighted trajectories.
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
    """The planning request for the evidence of `gather`."""
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
