"""The systems that are compared, each made for one setting.

Invariant: all run in the same simulator over the same trajectories, and pay the same for what they change; a baseline's
free choices are searched exhaustively in the simulator, on the trajectories that were known before the first step
(`hindsight`: on the whole drift). Who publishes a system by these names: verl, AReaL, Libra (arXiv 2606.03077).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.evaluation.fixed_plans import uniform_plans
from benchmarks.evaluation.foresight import Foreseeing, Foresight, Foretold
from benchmarks.evaluation.setting import Setting
from libra.cost.device import SwitchCost
from libra.lengths import LengthTracker
from libra.plan.cluster_request import ClusterRequest
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.plan.switching import switch_cost
from libra.route.catalogue import policy_named
from libra.route.oracle import Oracle
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.sim.posttrain.episodes import Episodes
from libra.sim.posttrain.loop import simulate_posttraining
from libra.sim.posttrain.rehearsal import Rehearsal
from libra.sim.posttrain.replanning import Replanning
from libra.sim.posttrain.resampled import Resampled
from libra.sim.posttrain.system import PUBLISHED_SWITCH, Replan, System

PERIOD = 5  # steps between two decisions
SEARCH_STEPS = 4  # that a candidate is judged by, after those that fill the pipeline
HINDSIGHT_STEPS = 15  # over the whole drift


def router(setting: Setting, name: str) -> Callable[[], Policy]:
    """A policy that has learned from what is known."""

    def make() -> Policy:
        policy = policy_named(name)
        teach(policy, setting.known)
        return policy

    return make


# Systems that never change their plan


def colocated(setting: Setting) -> System:
    """All GPUs generate, then all train (verl). Free: tp of the engines."""
    planner = setting.planner(mode="colocated", staleness=0)
    total = planner.cluster.devices
    return _searched(setting, "colocated", planner, [total])


def even_split(setting: Setting) -> System:
    """Half of the GPUs train. Free: tp."""
    planner = setting.planner()
    return _searched(setting, "even split", planner, [planner.cluster.devices // 2])


def greedy(setting: Setting) -> System:
    """GPUs to whichever side is behind, until both take equally long by throughput alone; the smallest engines that
    hold the longest context. It sees neither the longest trajectory nor what engines lose by waiting."""
    planner = setting.planner()
    plans = list(uniform_plans(_request(setting, planner)))
    smallest = min(_tp(plan) for plan in plans)
    plan = min((plan for plan in plans if _tp(plan) == smallest), key=_imbalance)
    return System("greedy", plan, router(setting, "least-loaded"))


def best_static(setting: Setting) -> System:
    """The best split and tp for what is known at the start (AReaL, as the paper has it)."""
    return _searched(setting, "best static", setting.planner(), None)


def hindsight(setting: Setting) -> System:
    """The best split and tp for the whole drift, which nobody knows at the start."""
    planner = setting.planner()
    systems = [
        System("best static in hindsight", plan, router(setting, "least-loaded"))
        for plan in uniform_plans(_request(setting, planner), range(8, planner.cluster.devices, 8))
    ]
    short = replace(setting, steps=HINDSIGHT_STEPS)
    return max(systems, key=lambda it: simulate_posttraining(it, short.episodes, HINDSIGHT_STEPS).throughput)


# Libra as published, part by part


def homogeneous(setting: Setting) -> System:
    """The planner, with engines of one size, replanning; every change restarts what it touches."""
    return _replanned(setting, "+ homogeneous planner", "least-loaded", _restarts(setting), max_buckets=1)


def heterogeneous(setting: Setting) -> System:
    """Buckets of engines of different sizes, and a length predictor that routes to them."""
    return _replanned(setting, "+ heterogeneous tp", "length-predictor", _restarts(setting))


def published_cmlfq(setting: Setting) -> System:
    return _replanned(setting, "+ C-MLFQ", "cmlfq-published", _restarts(setting))


def published(setting: Setting) -> System:
    """All of it: role changes at the published seconds."""
    return _replanned(setting, "Libra as published", "cmlfq-published", PUBLISHED_SWITCH)


# Ours


@dataclass(frozen=True, slots=True)
class Parts:
    """What of ours is there: all, unless an ablation leaves a part out."""

    early_gradients: bool = True

    route: str = "cmlfq"
    rehearse: bool = True
    replan: bool = True
    move_kv: bool = True
    most_buckets: int = 4
    period: int = PERIOD


def ours(setting: Setting, parts: Parts | None = None, name: str = "ours") -> System:
    """Plans that are rehearsed in the simulator with the router that will serve them, C-MLFQ in full, KV that follows
    its trajectory, and role changes at the published seconds."""
    parts = parts or Parts()
    planner = setting.planner(max_buckets=parts.most_buckets, early_gradients=parts.early_gradients)
    first = System(
        name,
        planner.plan(setting.tracker(planner)),
        router(setting, parts.route),
        serve_by_priority=True,
        move_kv=parts.move_kv,
    )
    if parts.rehearse:
        first = replace(first, plan=_rehearsed_start(setting, planner, first))
    if not parts.replan:
        return first
    return replace(first, replan=partial(_replanning, setting, planner, first, parts.rehearse, parts.period))


def oracle(setting: Setting) -> tuple[System, Episodes]:
    """Knows the trajectories of a run in advance, their tools included: routes by them, and plans for those of the
    period to come, in rehearsals with these very trajectories. It pays what ours pays for changes. A lower bound for
    those who route to buckets and change plans by period, as far as its search goes; not for everyone.

    The trajectories that come with it are the setting's, and known when they are drawn."""
    planner = setting.planner(early_gradients=True)
    foretold = Foretold(setting.episodes)
    system = System(
        "oracle", planner.plan(setting.tracker(planner)), lambda: Oracle(foretold.known), serve_by_priority=True
    )
    foresight = Foresight(setting.episodes, planner, system, PERIOD)
    plan = foresight.plan(None, 0)
    assert plan is not None
    return replace(system, plan=plan, replan=lambda: Foreseeing(foresight, plan)), foretold


MAKERS: dict[str, Callable[[Setting], System]] = {
    "colocated": colocated,
    "even": even_split,
    "greedy": greedy,
    "static": best_static,
    "hindsight": hindsight,
    "homogeneous": homogeneous,
    "heterogeneous": heterogeneous,
    "published-cmlfq": published_cmlfq,
    "published": published,
    "ours": ours,
}
NAMES = (*MAKERS, "oracle")


def made(setting: Setting, name: str) -> tuple[System, Episodes]:
    """The system of this name, and the trajectories that it runs on. Raises ValueError for a name not in `NAMES`."""
    if name == "oracle":
        return oracle(setting)
    if name not in MAKERS:
        raise ValueError(f"system is {name!r}; choose one of {', '.join(NAMES)}")
    return MAKERS[name](setting), setting.episodes


def _searched(setting: Setting, name: str, planner: Planner, devices: Sequence[int] | None) -> System:
    """The best of all engine sizes and splits for what is known."""
    recipe = planner.recipe
    episodes = Resampled(setting.known, recipe.samples_per_prompt, recipe.max_length, setting.seed)
    systems = [
        System(name, plan, router(setting, "least-loaded"))
        for plan in uniform_plans(_request(setting, planner), devices)
    ]
    steps = 1 + recipe.staleness + SEARCH_STEPS
    return max(systems, key=lambda it: simulate_posttraining(it, episodes, steps).throughput)


def _request(setting: Setting, planner: Planner) -> ClusterRequest:
    return planner.request(setting.tracker(planner))


def _tp(plan: Plan) -> int:
    return max(group.devices for group in plan.placement if group.role == "generate")


def _imbalance(plan: Plan) -> float:
    return max(plan.predicted.training, plan.predicted.rollout)


def _replanned(setting: Setting, name: str, route: str, switch: SwitchCost, **recipe: int) -> System:
    planner = setting.planner(**recipe)
    first = System(name, planner.plan(setting.tracker(planner)), router(setting, route), switch=switch, move_kv=False)
    return replace(first, replan=partial(_replanning, setting, planner, first, False, PERIOD))


def _replanning(setting: Setting, planner: Planner, first: System, rehearse: bool, period: int) -> Replan:
    rehearsal = Rehearsal(first, seed=setting.seed) if rehearse else None
    replanner = Replanner(
        planner, first.plan, period=period, tracker=_fresh(setting, planner), switch=first.switch, check=rehearsal
    )
    return Replanning(replanner, period, rehearsal)


def _fresh(setting: Setting, planner: Planner) -> LengthTracker:
    tracker = setting.tracker(planner)
    tracker.observe_running(())
    return tracker


def _rehearsed_start(setting: Setting, planner: Planner, system: System) -> Plan:
    rehearsal = Rehearsal(system, seed=setting.seed)
    rehearsal.prepare(setting.known, (), system.route())
    replanner = Replanner(planner, period=PERIOD, switch=system.switch, check=rehearsal)
    replanner.step(setting.known, ())
    plan = replanner.plan
    assert plan is not None
    return plan


def _restarts(setting: Setting) -> SwitchCost:
    planner = setting.planner()
    return switch_cost(_request(setting, planner))
