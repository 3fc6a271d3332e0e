"""Systems that never change their plan: what each leaves open, and the system that a choice of it makes.

Invariant: a system is rebuilt from its setting, its name and the choice alone. All choices of a baseline are judged by
simulations of the same trajectories: those that were known before the first step (`hindsight`: those of the whole
drift). Layout, micro-batches and memory are the best that the planner's own menu has for the number of GPUs that train;
only the choices that a baseline stands for are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

from benchmarks.evaluation.setting import STEPS, Setting
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.options.price import infeasibility, solution
from libra.plan.plan import Plan, answer
from libra.plan.problem import TrainingOption
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.sim.training_run.episodes import Episodes, Resampled
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import System
from libra.sim.training_run.trainer import TrainingPrice


def uniform_plan(request: ClusterRequest, menu: Menu, training: TrainingOption, shape: str) -> Plan | None:
    """The GPUs that do not train, as engines of one shape in one bucket; None where that does not fit.

    In colocated training engines are on all GPUs.
    """
    problem = menu.problem
    pool, devices, _ = problem.footprint(shape)
    free = problem.pool(pool).devices - (training.devices if training.pool == pool and not problem.colocated else 0)
    if free < devices:
        return None
    bucket = Bucket(shape, free // devices, 0, problem.longest_context)
    allocation = Allocation(training.replicas, (bucket,), training.layout)
    if infeasibility(problem, allocation) is not None:
        return None
    return answer(request, menu, solution(problem, allocation))


def uniform_plans(request: ClusterRequest, devices: Sequence[int]) -> Iterator[Plan]:
    """Plans for every shape of engine and each of these numbers of training GPUs.

    Where no layout uses exactly that number of GPUs, the largest smaller number that a layout uses is taken.
    """
    menu, size = request.menu(), attrgetter("devices")
    trained = menu.problem.training
    options = {max((it for it in trained if it.devices <= most), key=size, default=None) for most in devices}
    for training in sorted(filter(None, options), key=size):
        plans = (uniform_plan(request, menu, training, shape) for shape in menu.problem.shapes)
        yield from filter(None, plans)


# colocated: all GPUs generate, then all train (verl). Free: tp.
# even: half of the GPUs train. Free: tp, concurrency.
# greedy: GPUs to whichever side is behind, until both take equally long by throughput alone, and the smallest engines
#   that hold the longest context: it sees neither the longest trajectory nor what engines lose by waiting.
#   Free: concurrency.
# static: Free: split, tp, concurrency, for what is known at the start (AReaL, as the paper has it).
# hindsight: the same for the whole drift, which is unknown at the start.
NAMES = ("colocated", "even", "greedy", "static", "hindsight")
SPLITS = 12  # of the cluster, in whole halves of a node, that are told apart
SEARCH_STEPS = 4  # that a choice is judged by first, after those that fill the pipeline
FINAL_STEPS = 30  # that the best few are judged by then
HINDSIGHT_STEPS = 10  # over the whole drift
_BATCHING = 0.1  # of the seconds of training, granted for batches that come together otherwise; assumed


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of the settings that a baseline leaves open."""

    training: int  # GPUs that train
    shape: str  # of every engine
    concurrency: int | None  # trajectories generated at the same time; None: as many as staleness admits


def router(setting: Setting, name: str) -> Callable[[], Policy]:
    """A policy that has learned from what is known."""

    def make() -> Policy:
        policy = policy_named(name)
        teach(policy, setting.known)
        return policy

    return make


def choices(setting: Setting, name: str) -> tuple[Choice, ...]:
    """All that a baseline may choose from, those that are predicted to be fastest first. Raises ValueError for a name
    not in `NAMES`."""
    plans = [(plan, limit) for limit in _limits(setting, name) for plan in _plans(name, _request(setting, name, limit))]
    plans.sort(key=lambda found: found[0].predicted.step)
    return tuple(Choice(_training(plan), plan.allocation.buckets[0].shape, limit) for plan, limit in plans)


def judged(setting: Setting, name: str, choice: Choice) -> float:
    """Tokens per second with this choice, in the short simulation that it is judged by first."""
    episodes, steps = _judging(setting, name)
    return simulate_posttraining(system(setting, name, choice), episodes, steps).throughput


def judged_at_length(setting: Setting, name: str, choice: Choice) -> float:
    """Tokens per second of the few that did best: in a few steps it is luck which of them waits for a very long
    trajectory. In hindsight it is a whole run, of `STEPS` steps."""
    if name == "hindsight":
        episodes, steps = replace(setting, steps=STEPS).episodes, STEPS
    else:
        episodes, steps = _judging(setting, name)[0], FINAL_STEPS
    return simulate_posttraining(system(setting, name, choice), episodes, steps).throughput


def at_most(setting: Setting, name: str, choice: Choice) -> float:
    """Tokens per second that it is not expected to be judged to exceed: those of its trainers, if they never waited.

    How trajectories come together in batches depends on the run, and so does what training takes; `_BATCHING` is
    granted for that.
    """
    return _of_trainers(setting, name, choice.training)


@cache
def _of_trainers(setting: Setting, name: str, training: int) -> float:
    episodes, steps = _judging(setting, name)
    request = _request(setting, name, None)
    layout = next(plan.layout for plan in uniform_plans(request, [training]) if _training(plan) == training)
    assert layout is not None
    price = TrainingPrice(request.model, request.recipe, request.cluster.nodes[0])
    seconds, tokens, prompts = 0.0, 0, request.recipe.prompts
    for step in range(steps):
        groups = (episodes.group(number, 0) for number in range(step * prompts, (step + 1) * prompts))
        batch = [trajectory for group in groups for trajectory in group]
        seconds += price.seconds([trajectory.final_context for trajectory in batch], layout)
        tokens += sum(trajectory.generated_tokens for trajectory in batch)
    return (1 + _BATCHING) * tokens / seconds


def _judging(setting: Setting, name: str) -> tuple[Episodes, int]:
    """Trajectories and steps that choices are judged by."""
    if name == "hindsight":
        return replace(setting, steps=HINDSIGHT_STEPS).episodes, HINDSIGHT_STEPS
    recipe = _request(setting, name, None).recipe
    episodes = Resampled(setting.known, recipe.samples_per_prompt, recipe.max_length, setting.seed)
    return episodes, 1 + recipe.staleness + SEARCH_STEPS


def system(setting: Setting, name: str, choice: Choice) -> System:
    """Raises ValueError for a name not in `NAMES`, and where the choice has no plan in this setting."""
    request = _request(setting, name, choice.concurrency)
    for plan in uniform_plans(request, [choice.training]):
        if (_training(plan), plan.allocation.buckets[0].shape) == (choice.training, choice.shape):
            return System(name, plan, router(setting, "least-loaded"))
    raise ValueError(f"system {name}: {choice} has no plan on {setting.nodes} nodes; choose one of `choices`")


@cache
def _request(setting: Setting, name: str, concurrency: int | None) -> ClusterRequest:
    if name not in NAMES:
        raise ValueError(f"system is {name!r}; choose one of {', '.join(NAMES)}")
    apart = {"mode": "colocated", "staleness": 0} if name == "colocated" else {}
    planner = setting.planner(concurrency=concurrency, **apart)
    return planner.request(setting.tracker(planner))


def _limits(setting: Setting, name: str) -> tuple[int | None, ...]:
    """No limit, and one or two batches where staleness admits more."""
    if name == "colocated":
        return (None,)
    return (None, *(batches * setting.recipe().batch for batches in (1, 2) if batches < 1 + setting.staleness))


def _plans(name: str, request: ClusterRequest) -> Sequence[Plan]:
    total = request.cluster.devices
    if name == "colocated":
        return list(uniform_plans(request, [total]))
    if name == "even":
        return list(uniform_plans(request, [total // 2]))
    step = 4 * -(-total // (4 * SPLITS))
    plans = list(uniform_plans(request, range(step, total, step)))
    if name != "greedy":
        return plans
    smallest = min(map(_tp, plans))
    least = [plan for plan in plans if _tp(plan) == smallest]
    return [min(least, key=lambda plan: max(plan.predicted.training, plan.predicted.rollout))]


def _training(plan: Plan) -> int:
    assert plan.layout is not None
    return plan.layout.devices


def _tp(plan: Plan) -> int:
    return max(group.devices for group in plan.placement if group.role == "generate")
