"""The systems that are compared, each made for one setting.

Invariant: all run in the same simulator over the same trajectories, and pay the same for what they change. Those that
never change their plan are `baselines`. Who publishes a system by these names: verl, AReaL, Libra (arXiv 2606.03077).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.evaluation import baselines
from benchmarks.evaluation.baselines import router
from benchmarks.evaluation.foresight import Foreseeing, Foresight, Foretold
from benchmarks.evaluation.setting import Setting
from libra import Effort, Plan, Planner, choose_plan, simulated_gain
from libra.cost.device import SwitchCost
from libra.plan.decision import switch_cost
from libra.plan.replanner import Rehearse, Replanner
from libra.sim.training_run.episodes import Episodes
from libra.sim.training_run.system import PUBLISHED_SWITCH, Replan, Replanning, System
from tests.oracles.oracle_policy import Oracle

PERIOD = 5  # steps between two decisions
# Simulated samples of a plan, at most, in a choice and in the trial of a change: two rounds of a race of six. With a
# limit on the clock, as `libra plan` has, the machine would decide.
EFFORT = Effort(samples=3)
ORACLE_BUCKETS = (4, 1)  # at most; an oracle knows which of them is better for a run


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of our system: all, unless an ablation leaves one out."""

    early_gradients: bool = True
    route: str = "cmlfq"
    replan: bool = True
    move_kv: bool = True
    start_by_cache: bool = True
    # Engine sizes set by hand: prices alone decide, and nothing is simulated first. None: as `libra plan` chooses.
    most_buckets: int | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        """Its changes of the setting's recipe."""
        sizes = {"router": self.route} if self.most_buckets is None else {"max_buckets": self.most_buckets}
        return {"early_gradients": self.early_gradients, **sizes}


def chosen_plan(setting: Setting, parts: Parts) -> Plan:
    """The plan that `libra plan` chooses for the setting's log, under the router of `parts`."""
    planner = setting.planner(**parts.recipe)
    return choose_plan(planner.request(setting.tracker(planner)), setting.known, effort=EFFORT)


def ours(setting: Setting, parts: Parts | None = None, plan: Plan | None = None) -> System:
    """Gradients that begin before a batch is complete, the plan that `libra plan` chooses, C-MLFQ in full, KV that
    follows its trajectory, replanning with changes that are tried in simulation, and role changes at the published
    seconds. `plan` is what it begins with; None: it is chosen."""
    parts = parts or Parts()
    planner = setting.planner(**parts.recipe)
    by_hand = parts.most_buckets is not None
    if plan is None:
        plan = planner.plan(setting.tracker(planner)) if by_hand else chosen_plan(setting, parts)
    first = System(
        "ours",
        plan,
        router(setting, parts.route),
        switch=PUBLISHED_SWITCH,
        serve_by_priority=True,
        start_by_cache=parts.start_by_cache,
        move_kv=parts.move_kv,
    )
    if not parts.replan:
        return first
    rehearse = None if by_hand else partial(simulated_gain, effort=EFFORT)
    return replace(first, replan=partial(_replanning, setting, planner, first, rehearse))


def oracle(setting: Setting, most_buckets: int = ORACLE_BUCKETS[0]) -> tuple[System, Episodes]:
    """Knows the trajectories of a run in advance, their tools included: routes by them, and plans for those of the
    period to come. It pays what ours pays for changes.

    The trajectories that come with it are the setting's, and known when they are drawn."""
    planner = setting.planner(max_buckets=most_buckets, early_gradients=True)
    foretold = Foretold(setting.episodes)
    foresight = Foresight(setting.episodes, planner, PUBLISHED_SWITCH, PERIOD)
    plan = foresight.plan(None, 0)
    assert plan is not None
    system = System("oracle", plan, lambda: Oracle(foretold.known), serve_by_priority=True, start_by_cache=True)
    return replace(system, replan=lambda: Foreseeing(foresight, plan)), foretold


def _replanned(
    setting: Setting,
    name: str,
    route: str,
    *,
    switch: SwitchCost | None = None,
    move_kv: bool = False,
    **recipe: int,
) -> System:
    """Without a `switch` every change restarts what it touches."""
    planner = setting.planner(**recipe)
    plan, learned = planner.plan(setting.tracker(planner)), router(setting, route)
    usual = switch or switch_cost(setting.planner().request(setting.tracker(planner)))
    first = System(name, plan, learned, switch=usual, start_by_cache=True, move_kv=move_kv)
    return replace(first, replan=partial(_replanning, setting, planner, first))


def _replanning(setting: Setting, planner: Planner, first: System, rehearse: Rehearse | None = None) -> Replan:
    tracker = setting.tracker(planner)
    tracker.observe_running(())
    replanner = Replanner(planner, first.plan, period=PERIOD, tracker=tracker, switch=first.switch, rehearse=rehearse)
    return Replanning(replanner, PERIOD)


# Libra as published, part by part: the planner, with engines of one size; buckets of engines of different sizes, and a
# length predictor that routes to them; C-MLFQ; and all parts, with role changes at the published seconds.
MAKERS: dict[str, Callable[[Setting], System]] = {
    "homogeneous": partial(_replanned, name="+ homogeneous planner", route="least-loaded", max_buckets=1),
    "heterogeneous": partial(_replanned, name="+ heterogeneous tp", route="length-predictor"),
    "published-cmlfq": partial(_replanned, name="+ C-MLFQ", route="cmlfq-published", move_kv=True),
    "published": partial(
        _replanned, name="Libra as published", route="cmlfq-published", switch=PUBLISHED_SWITCH, move_kv=True
    ),
    "ours": ours,
}
NAMES = (*baselines.NAMES, *MAKERS, "oracle")
