"""Cells of `routing_real`: what tool returns of real agents say of the rest, and what the router makes of it.

Invariant: nothing that is predicted or routed was learned: prompts, or samples, that are judged are left out of what
teaches. All predictors are judged at the same tool returns, all routers on the same trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.evaluation.agent_logs import halves, read_log, without_waits
from benchmarks.evaluation.engines import a800_nodes, profiles_of
from benchmarks.evaluation.estimates import Array, bootstrap
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.plan.planner import Planner
from libra.route.catalogue import policy_named
from libra.route.hierarchy import Hierarchy
from libra.route.policy import TurnRequest
from libra.route.published import CausalTree
from libra.route.tool_state import ToolState, payload_class, state_of
from libra.sim.of_plan import simulate_plan
from libra.sim.outcome.metrics import metrics_of
from libra.sim.training_run.episodes import Resampled
from libra.trajectory import Trajectory

OURS, THEIRS, ATTAINED = "cmlfq", "cmlfq-published", "attained service"
PREDICTORS = (OURS, THEIRS, ATTAINED)
MEASURES = ("R^2", "rank correlation")
FOLDS = 10  # of prompts, where there are more than `EACH`
EACH = 30  # prompts up to which each is a fold of its own

MODEL = "Qwen/Qwen3-14B"
NODES = 6  # of eight A800
BATCH, SAMPLES = 512, 16
LONGEST: Mapping[str, int] = {"airline": 8192, "claude-code": 40_960}  # tokens that a trajectory is cut at

Predict = Callable[[Trajectory], list[float]]  # tokens that remain after each tool return


def predictions(log: str, unseen: str, seed: int) -> dict[str, Any]:
    """`MEASURES` of each predictor of remaining tokens at all tool returns, and how much more `cmlfq` has than the
    others: [value, low, high] by a bootstrap that draws whole prompts. `unseen` are prompts or samples."""
    trajectories = read_log(log)
    truth: list[float] = []
    predicted: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    prompts: list[str] = []
    for known, judged in folds(trajectories, unseen):
        predictors = (_ours(known), _theirs(known), _attained(known))
        for trajectory in judged:
            remainders = [remaining for remaining, _, _, _ in returns(trajectory)]
            truth += remainders
            prompts += [trajectory.prompt_id] * len(remainders)
            for name, predict in zip(PREDICTORS, predictors, strict=True):
                predicted[name] += predict(trajectory)
    columns = {name: np.array(values) for name, values in predicted.items()}
    return {
        "returns": len(truth),
        "prompts": len(set(prompts)),
        "trajectories": len(trajectories),
        **compared(np.array(truth), columns, prompts, seed),
    }


def compared(truth: Array, predicted: Mapping[str, Array], prompts: Sequence[str], seed: int) -> dict[str, Any]:
    """`MEASURES` of each predictor, and of `cmlfq` less each other one: [value, low, high]."""
    units, unit_of = np.unique(np.array(prompts), return_inverse=True)
    true, ranked = Ranked(truth), {name: Ranked(values) for name, values in predicted.items()}
    squares = {name: (truth - values) ** 2 for name, values in predicted.items()}

    def measure(which: str, name: str, drawn: Array) -> float:
        weights = np.bincount(drawn.astype(np.int64), minlength=len(units))[unit_of].astype(np.float64)
        if which == "R^2":
            return explained(truth, squares[name], weights)
        return rank_correlation(true, ranked[name], weights)

    def interval(which: str, name: str, other: str | None = None) -> list[float]:
        def statistic(drawn: Array) -> float:
            value = measure(which, name, drawn)
            return value if other is None else value - measure(which, other, drawn)

        found = bootstrap(statistic, np.arange(len(units)), seed)
        assert found.ends is not None
        return [found.value, *found.ends]

    return {
        which: {name: interval(which, name) for name in predicted}
        | {f"{OURS} - {name}": interval(which, OURS, name) for name in predicted if name != OURS}
        for which in MEASURES
    }


def folds(
    trajectories: Sequence[Trajectory], unseen: str
) -> Iterator[tuple[Sequence[Trajectory], Sequence[Trajectory]]]:
    """Pairs of trajectories that teach and trajectories that are judged; each is judged once. With `unseen` prompts,
    each prompt is a fold; more than `EACH` share `FOLDS` folds. With samples, each sample is a fold."""
    if unseen == "samples":
        fold_of = list(range(len(trajectories)))
    elif unseen == "prompts":
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(it.prompt_id for it in trajectories))}
        count = len(numbers) if len(numbers) <= EACH else FOLDS
        fold_of = [numbers[it.prompt_id] % count for it in trajectories]
    else:
        raise ValueError(f"unseen is {unseen!r}; give prompts or samples")
    for fold in range(max(fold_of) + 1):
        pairs = list(zip(trajectories, fold_of, strict=True))
        yield [it for it, its in pairs if its != fold], [it for it, its in pairs if its == fold]


def returns(trajectory: Trajectory) -> Iterator[tuple[int, int, int, list[ToolState]]]:
    """After each tool return: tokens generated and returned from then on, and until then, the context, and the states
    of all returns so far (one list, which grows)."""
    total = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
    attained, states = 0, list[ToolState]()
    starts = trajectory.contexts()
    for number, turn in enumerate(trajectory.turns, start=1):
        attained += turn.generated_tokens + turn.returned_tokens
        if turn.tool is None or turn.status is None or number == len(starts):
            continue
        states.append(state_of(turn.tool, payload_class(turn.returned_tokens), turn.status))
        yield total - attained, attained, starts[number], states


def _ours(known: Sequence[Trajectory]) -> Predict:
    hierarchy = Hierarchy()
    for trajectory in known:
        hierarchy.learn(trajectory)

    def predict(trajectory: Trajectory) -> list[float]:
        means = []
        for _, _, context, states in returns(trajectory):
            request = TurnRequest(
                trajectory.id, trajectory.prompt_id, trajectory.prompt_tokens, context, trajectory.task
            )
            remaining = hierarchy.predict(request, states)
            assert remaining is not None  # something was learned
            means.append(remaining.mean)
        return means

    return predict


def _theirs(known: Sequence[Trajectory]) -> Predict:
    tree = CausalTree()
    for trajectory in known:
        tree.add(trajectory)

    def predict(trajectory: Trajectory) -> list[float]:
        means = []
        for _, _, _, states in returns(trajectory):
            estimate = tree.estimate(trajectory.prompt_id, states)
            assert estimate is not None  # something was added
            means.append(estimate.mean)
        return means

    return predict


def _attained(known: Sequence[Trajectory]) -> Predict:
    """A line through what remained against what was generated and returned, by least squares."""
    seen = np.array([(attained, remaining) for it in known for remaining, attained, _, _ in returns(it)], dtype=float)
    slope, level = np.polyfit(seen[:, 0], seen[:, 1], 1).tolist()

    def predict(trajectory: Trajectory) -> list[float]:
        return [level + slope * attained for _, attained, _, _ in returns(trajectory)]

    return predict


def makespan(log: str, waits: bool, seed: int, routes: Sequence[str]) -> dict[str, Any]:
    """Seconds of one step's rollout by each router: 512 trajectories that start together, 16 samples of a prompt.

    They are drawn from half of the log's prompts (`Resampled`). Of the other half the plan is made, for 48 A800 with
    two buckets at most, and that half the router knows. Unless `waits`, a person answers as a tool does whose time was
    not recorded.
    """
    longest = LONGEST[log]
    trajectories = read_log(log) if waits else tuple(without_waits(it) for it in read_log(log))
    known, judged = halves(trajectories, seed)
    recipe = Recipe(batch=BATCH, samples_per_prompt=SAMPLES, max_length=longest, max_buckets=2)
    model, cluster = load_model(MODEL), a800_nodes(NODES)
    planner = Planner(cluster, model, recipe, profiles_of(cluster, model, recipe))
    before, step = _step(known, longest, seed), _step(judged, longest, seed)
    plan = planner.plan(planner.tracker(before))
    found: dict[str, Any] = {"plan": [[it.shape, it.engines, it.up_to] for it in plan.allocation.buckets]}
    for route in routes:
        metrics = metrics_of(simulate_plan(plan, step, policy_named(route, seed=seed), learned=before, seed=seed))
        if metrics.trajectories_completed != BATCH:
            raise RuntimeError(f"{route}: {metrics.trajectories_completed} of {BATCH} trajectories finished; all must")
        latency = metrics.trajectory_latency
        found[route] = {"seconds": metrics.makespan, "mean": None if latency is None else latency.mean}
    return found


def _step(log: Sequence[Trajectory], longest: int, seed: int) -> list[Trajectory]:
    episodes = Resampled(tuple(log), SAMPLES, longest, seed)
    return [trajectory for number in range(BATCH // SAMPLES) for trajectory in episodes.group(number, 0)]


# Agreement of predictions with what they predict. A sample of whole weight n counts as n samples that are alike.


def explained(truth: Array, squared_errors: Array, weights: Array) -> float:
    """R^2: 1 less the squared error as a share of the variance; below 0 where the mean would be the better prediction.

    Raises ValueError where the truth does not vary.
    """
    centred = truth - _sum(weights * truth) / _sum(weights)
    spread = _sum(weights * centred * centred)
    if not spread > 0:
        raise ValueError("what is predicted does not vary, so there is nothing to explain; give more trajectories")
    return 1 - _sum(weights * squared_errors) / spread


class Ranked:
    """Values whose weighted ranks are asked for again and again: they are sorted once."""

    __slots__ = ("_group", "_groups")

    def __init__(self, values: Array) -> None:
        distinct, self._group = np.unique(values, return_inverse=True)
        self._groups = len(distinct)

    def ranks(self, weights: Array) -> Array:
        """Weight below, and half of the weight that is equal: average ranks, up to a constant."""
        equal = np.bincount(self._group, weights, self._groups)
        ranks: Array = (equal.cumsum() - equal / 2)[self._group]
        return ranks


def rank_correlation(one: Ranked, other: Ranked, weights: Array) -> float:
    """Spearman's: Pearson's correlation of average ranks; 0 where either does not vary, and so orders nothing."""
    x, y = one.ranks(weights), other.ranks(weights)
    total = _sum(weights)
    x, y = x - _sum(weights * x) / total, y - _sum(weights * y) / total
    spread = _sum(weights * x * x) * _sum(weights * y * y)
    # Ranks are halves of whole numbers up to `total`: what is left of equal ones is rounding.
    return _sum(weights * x * y) / math.sqrt(spread) if spread > 1e-12 * total**4 else 0.0


def _sum(values: Array) -> float:
    """In an order that does not depend on how many threads there are, unlike that of a product of vectors."""
    return float(values.sum())
