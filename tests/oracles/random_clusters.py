"""Random clusters and distributions of trajectories: cases that are planned, and simulated beside their price.

Invariant: family and seed alone determine a case; no family is both fitted and tested. The planner, and the router of a
whole run, know only the case's observed trajectories, and none that is simulated afterwards. Engines, trainers,
staleness and times are the plan's. The router of a single rollout knows every length, so a difference from the price
comes from effects that the price leaves out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from libra import (
    ModelSpec,
    Planner,
    Recipe,
    Replay,
    System,
    engine_profiles,
    load_model,
    simulate_posttraining,
)
from libra.choose.recall import with_recall
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.plan import Plan, answer
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.clock import seconds
from libra.sim.cluster import SimCluster
from libra.sim.of_plan import teach
from libra.sim.planned_engines import planned_engines
from libra.sim.workload.distributions import Constant, LogNormal, LongTail, Uniform
from libra.sim.workload.generated import Agent, Tool, agent_trajectories
from libra.trajectory import Trajectory
from tests.oracles.oracle_policy import Oracle

# Trajectories behind each plan. Samples of a prompt are similar, so few prompts would not show how frequent the longest
# trajectories are, which is not an error of the price.
OBSERVED = 16_384
OBSERVED_NUMBER = 1_000  # number of their draw; batches have higher numbers

_ETHERNET = (12.5e9, 25e9, 50e9)  # bytes/s of a node
MODELS = (
    *(f"Qwen/Qwen3-{size}" for size in ("4B", "8B", "14B", "32B", "30B-A3B")),
    "meta-llama/Llama-3.1-8B",
)
GPU_KINDS = ("A800", "H800", "H100", "H200")
SAMPLES = (4, 8, 16)  # of one prompt

Agents = list[tuple[float, Agent]]  # with the share of prompts that each has
Make = Callable[[int, int, int], tuple[Trajectory, ...]]  # (prompts, seed, samples of each) -> trajectories


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the planner, and the source of the trajectories of a step."""

    name: str
    cluster: Cluster
    model: ModelSpec
    recipe: Recipe
    profiles: tuple[EngineProfile, ...]
    make: Make

    def observed(self) -> tuple[Trajectory, ...]:
        """Trajectories that the planner observes."""
        samples = self.recipe.samples_per_prompt
        return self.make(OBSERVED // samples, OBSERVED_NUMBER, samples)

    def batch(self, number: int) -> tuple[Trajectory, ...]:
        """A new draw of the trajectories of one step."""
        return self.make(self.recipe.prompts, 2_000 + number, self.recipe.samples_per_prompt)


def make_case(
    family: str, seed: int, staleness: int = 0, *, gpus: tuple[str, ...] = GPU_KINDS, samples: tuple[int, ...] = SAMPLES
) -> Case:
    """Make a case: cluster, model, recipe and the family's parameters are drawn from the seed; staleness is given."""
    draw = random.Random(f"{family} {seed}")
    model = load_model(draw.choice(MODELS))
    max_length, samples_per_prompt = draw.choice((8192, 16384, 32768)), draw.choice(samples)
    sizes = {"batch": samples_per_prompt * draw.choice((16, 32, 64)), "samples_per_prompt": samples_per_prompt}
    buckets, mode = draw.choice((1, 2, 4)), "async" if staleness else "sync"
    asked = {**sizes, "max_length": max_length, "mode": mode, "staleness": staleness, "max_buckets": buckets}
    recipe = Recipe.model_validate(asked)
    kinds = draw.sample(gpus, draw.choice((1, 1, 2)))
    nodes = tuple(
        NodeClass(gpu.lower(), draw.choice((2, 4, 6, 8)), 8, GPUS[gpu], GPUS[gpu].link, draw.choice(_ETHERNET))
        for gpu in kinds
    )
    # A recipe may exclude some degrees of parallelism.
    profiles = tuple(_some(profile, draw) for profile in roofline_profiles(Cluster(nodes), model, recipe))
    agents = FAMILIES[family](draw, max_length)

    def make(prompts: int, number: int, samples_per_prompt: int) -> tuple[Trajectory, ...]:
        return _mixed(agents, prompts, seed * 10_000 + number, samples_per_prompt)

    name = f"{family} {seed}" + (f", staleness {staleness}" if staleness else "")
    return Case(name, Cluster(nodes), model, recipe, profiles, make)


def roofline_profiles(cluster: Cluster, model: ModelSpec, recipe: Recipe) -> tuple[EngineProfile, ...]:
    """Kernel times from the data sheet, which no random case lacks, with the overhead of vLLM's process."""
    return engine_profiles(cluster, model, recipe, "roofline", host="default")


def _some(profile: EngineProfile, draw: random.Random) -> EngineProfile:
    largest = profile.engines[-1]
    return replace(profile, engines=tuple(g for g in profile.engines if g is largest or draw.random() < 0.7))


def _mixed(agents: Agents, prompts: int, seed: int, samples: int) -> tuple[Trajectory, ...]:
    """Prompts divided among several agents by their shares, in random order."""
    draw = random.Random(seed)
    counts = [0] * len(agents)
    for which in draw.choices(range(len(agents)), [share for share, _ in agents], k=prompts):
        counts[which] += 1
    groups: list[tuple[Trajectory, ...]] = []
    for which, ((_, agent), count) in enumerate(zip(agents, counts, strict=True)):
        if count:
            made = agent_trajectories(agent, count, seed * 10 + which, samples_per_prompt=samples)
            named = [replace(t, id=f"{which}:{t.id}", prompt_id=f"{which}:{t.prompt_id}") for t in made]
            groups += [tuple(named[k : k + samples]) for k in range(0, len(named), samples)]
    draw.shuffle(groups)
    return tuple(trajectory for group in groups for trajectory in group)


def _log(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


_NO_TOOL = Tool("none", 1.0, Constant(1), 1.0, 0.0)


def _geometric(draw: random.Random, longest: int) -> Agents:
    """Log-normal turns and tools, a geometric number of them."""
    turns = _log(draw, 2, 16)
    room = longest / turns
    returned = LogNormal(room * _log(draw, 0.05, 0.3), 0.8, longest)
    tool = Tool("shell", 1.0, returned, _log(draw, 0.3, 10), draw.uniform(0.2, 1.0))
    prompt = LogNormal(_log(draw, 200, 2000), 0.4, longest // 4)
    turn = LogNormal(room * _log(draw, 0.05, 0.3), draw.uniform(0.3, 0.9), longest)
    return [(1.0, Agent(prompt, turn, turns, (tool,), longest))]


def _reasoning(draw: random.Random, longest: int) -> Agents:
    """One log-normal answer."""
    prompt = LogNormal(_log(draw, 80, 600), 0.5, longest // 4)
    answer = LogNormal(longest * _log(draw, 0.08, 0.35), draw.uniform(0.4, 1.1), longest)
    return [(1.0, Agent(prompt, answer, 1.0, (_NO_TOOL,), longest))]


def _search(draw: random.Random, longest: int) -> Agents:
    """Few turns, long returns, slow tools."""
    turns = _log(draw, 3, 8)
    room = longest / turns
    tool = Tool("search", 1.0, LogNormal(room * _log(draw, 0.2, 0.6), 0.5, longest), _log(draw, 1, 6), 0.5)
    prompt = LogNormal(_log(draw, 100, 500), 0.3, longest // 4)
    return [(1.0, Agent(prompt, LogNormal(room * _log(draw, 0.03, 0.15), 0.6, longest), turns, (tool,), longest))]


def _proof(draw: random.Random, longest: int) -> Agents:
    """One answer with a Pareto tail."""
    median, sigma, share = longest * _log(draw, 0.06, 0.25), draw.uniform(0.3, 0.6), draw.uniform(0.02, 0.1)
    answer = LongTail(median, sigma, share, longest * 0.4, draw.uniform(1.5, 2.5), longest)
    return [(1.0, Agent(Uniform(100, 700), answer, 1.0, (_NO_TOOL,), longest))]


def _terminal(draw: random.Random, longest: int) -> Agents:
    """Uniform turns; two tools, one quick and one slow."""
    turns = _log(draw, 3, 12)
    room = longest / turns
    quick = Tool("read", 0.8, Uniform(20, max(40, int(room * 0.4))), _log(draw, 0.1, 1), 0.4)
    slow = Tool("test", 0.2, Uniform(20, max(40, int(room * 0.3))), _log(draw, 3, 20), 0.6)
    turn = Uniform(10, max(20, int(room * draw.uniform(0.1, 0.6))))
    return [(1.0, Agent(Uniform(300, 2000), turn, turns, (quick, slow), longest))]


def _blend(draw: random.Random, longest: int) -> Agents:
    """Tasks of two kinds: short answers, and long agents with heavy-tailed turns."""
    short = Agent(Uniform(50, 400), Uniform(100, max(200, longest // 10)), 1.0, (_NO_TOOL,), longest)
    turns = _log(draw, 4, 12)
    room = longest / turns
    tool = Tool("python", 1.0, Uniform(20, max(40, int(room * 0.3))), _log(draw, 0.5, 5), 0.5)
    long = Agent(
        Uniform(200, 1500), LongTail(room * 0.12, 0.5, 0.05, room * 0.4, 2.0, longest), turns, (tool,), longest
    )
    share = draw.uniform(0.3, 0.7)
    return [(share, short), (1 - share, long)]


FITTED, TESTED = ("geometric", "reasoning", "search"), ("proof", "terminal", "blend")
FAMILIES: dict[str, Callable[[random.Random, int], Agents]] = dict(
    zip((*FITTED, *TESTED), (_geometric, _reasoning, _search, _proof, _terminal, _blend), strict=True)
)


# Their plans

_REPLAYED = 4_096  # observed trajectories that a router learns from, or is measured on


def request_of(case: Case) -> ClusterRequest:
    """The planner's request for a case, from all of its observed trajectories."""
    planner = Planner(case.cluster, case.model, case.recipe, case.profiles)
    tracker = planner.tracker(case.observed(), half_life_steps=1e6)  # all trajectories count
    return planner.request(tracker)


def plan_case(case: Case, factors: BatchFactors = BATCH) -> tuple[Plan, Menu]:
    """(the best plan, its menu). Raises `InfeasiblePlanError`."""
    request = request_of(case)
    menu = request.menu(factors)
    return answer(request, menu, solve(menu.problem)), menu


def routed_case(case: Case) -> tuple[Plan, Menu]:
    """As `plan_case`, with the recall of the recipe's router on observed trajectories, as `libra plan` does."""
    request, menu, best = with_recall(request_of(case), _replayed(case), policy_named(case.recipe.router, seed=0))
    return answer(request, menu, best), menu


def taught_router(case: Case) -> Policy:
    """The recipe's router, after it has learned from observed trajectories."""
    router = policy_named(case.recipe.router, seed=0)
    teach(router, _replayed(case))
    return router


def _replayed(case: Case) -> tuple[Trajectory, ...]:
    return case.observed()[:_REPLAYED]


# Simulated

# The first batches, one more than the staleness, start together. `_PERIODS` times this number of steps are measured, at
# least `_LEAST`, so that each phase of a repeating pattern occurs equally often. As many steps follow, so that engines
# have as much work in the last measured steps as before.
_PERIODS, _LEAST = 6, 12


@dataclass(frozen=True, slots=True)
class Steps:
    """Outcome of the measured steps."""

    seconds: float  # of a step, mean
    each: tuple[float, ...]  # seconds of the steps, one by one
    training: float  # seconds of a step in which the trainer computes, mean


@dataclass(slots=True)
class CaseEpisodes:
    """The case's batches as groups, one batch after the other from `first` on, without drift."""

    case: Case
    first: int = 0
    _batches: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)

    @property
    def samples_per_prompt(self) -> int:
        return self.case.recipe.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.case.recipe.max_length

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        batch, position = divmod(number, self.case.recipe.prompts)
        if batch not in self._batches:
            self._batches[batch] = self.case.batch(self.first + batch)
        size = self.samples_per_prompt
        drawn = self._batches[batch][position * size : (position + 1) * size]
        return tuple(
            replace(trajectory, id=f"{number}/{sample}", prompt_id=str(number), policy_version=version)
            for sample, trajectory in enumerate(drawn)
        )


def roll_out(plan: Plan, batch: tuple[Trajectory, ...]) -> float:
    """Seconds until the last trajectory of the batch is finished. All trajectories begin at once, on empty engines that
    have their weights."""
    workload, limits = Replay(batch), tuple(bucket.up_to for bucket in plan.allocation.buckets)
    cluster = SimCluster(planned_engines(plan), workload, Oracle({it.id: it for it in batch}), limits=limits)
    cluster.run()
    if workload.completed != len(batch):
        raise RuntimeError(f"{len(batch) - workload.completed} trajectories did not finish: {workload.unfinished}")
    return max(seconds(request.finish or 0) for request in cluster.requests)


def measured_steps(staleness: int) -> tuple[int, int]:
    """(number of steps left out at the beginning, which start together; number of steps measured after them)."""
    ahead = 1 + staleness
    return ahead, max(_LEAST, _PERIODS * ahead)


def simulate_steps(case: Case, plan: Plan, measured: int | None = None, first: int = 0) -> Steps:
    """Mean seconds of a step under the plan, without the first steps. `measured` is the number of steps that count, by
    default that of `measured_steps`. Batches are those of the case, from number `first` on."""
    episodes = CaseEpisodes(case, first)
    system = System(case.recipe.router, plan, lambda: taught_router(case))
    ahead, usual = measured_steps(case.recipe.staleness)
    count = usual if measured is None else measured
    steps = simulate_posttraining(system, episodes, ahead + count + ahead).steps[ahead - 1 : ahead + count]
    each = tuple(step.ended - before.ended for before, step in pairwise(steps))
    return Steps(sum(each) / count, each, sum(step.training for step in steps[1:]) / count)
