"""Whether prefill/decode pairs pay in agentic post-training, and what it is worth to change the roles of engines.

Invariant: a gain is reported next to its bound, and a published number next to ours, whether they agree or not.

    python -m benchmarks.rollout_pairs [--steps N] [--sessions FILE] [--only PART] [--json FILE]

"bound" has no plans: by the planner's prices of work alone (no links, caches, longest trajectories, training), the most
that rollout gains where all mixes of pairs are allowed, whatever share of the GPUs is of which kind. "plan" plans with
and without pairs, and simulates both runs, and one batch of each with an oracle for a router. "roles" has 16 H800 whose
work turns from long prompts to long answers, as Frontier (arXiv 2605.21312) has 16 H800, and changes roles between; its
workload is ours, not Frontier's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

from benchmarks.command import command_line
from benchmarks.rollout_price_simulation import roll_out
from benchmarks.rows import Row, report
from benchmarks.simulation import SESSIONS
from benchmarks.workloads import definition
from libra import read_trajectories
from libra.config.recipe import Recipe
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model_file import load_model
from libra.plan.decision import ROLE_CHANGE
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.problem import Problem
from libra.route.baselines import LeastLoaded
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import COLOCATED, DECODE, PREFILL, EngineConfig, EngineRole, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.kv_network import KVNetwork
from libra.sim.of_plan import simulate_run
from libra.sim.workload.replay import Replay, draw
from libra.trajectory import Trajectory, Turn, truncate

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL = load_model("Qwen/Qwen3-8B")
LONGEST = 40960  # tokens of context
LONGEST_TOOL = 5.0  # seconds: longer calls waited for people
GROUPS = 64  # of 16, that are planned with
H20 = load_cluster(EXAMPLES / "cluster_prefill_decode.yaml").nodes[1].gpu
KINDS = {name: GPUS.get(name, H20) for name in ("H100", "A800", "L40S", "H20")}
MIXES = (("H100", "H100"), ("H100", "A800"), ("A800", "L40S"), ("H100", "H20"))
SHARES = (0.2, 0.33, 0.5, 0.67, 0.8)  # of the GPUs that are of the first kind


def nodes(gpu: str, count: int) -> NodeClass:
    return NodeClass(gpu.lower(), count, 8, KINDS[gpu], KINDS[gpu].link, 50e9)


def workloads(sessions: Path) -> dict[str, tuple[Trajectory, ...]]:
    """Agents that search, those that write code, and sessions of coding, which are told much and say little."""
    found = {"search_agent": tuple(read_trajectories(EXAMPLES / "search_agent.jsonl"))}
    episodes = definition.read("r2e_gym").episodes("strong")
    found["r2e_gym"] = tuple(it for number in range(GROUPS) for it in episodes.group(number, 0))
    if sessions.exists():
        found["coding sessions"] = tuple(read_trajectories(sessions))
    return {
        name: tuple(_cut(truncate(it, LONGEST)) for it in log if it.finished and it.prompt_tokens <= LONGEST)
        for name, log in found.items()
    }


def _cut(trajectory: Trajectory) -> Trajectory:
    turns = (
        turn if turn.tool_seconds is None else replace(turn, tool_seconds=min(LONGEST_TOOL, turn.tool_seconds))
        for turn in trajectory.turns
    )
    return replace(trajectory, turns=tuple(turns))


def recipe(*, pairs: bool) -> Recipe:
    return Recipe(batch=1024, samples_per_prompt=16, max_length=LONGEST, prefill_decode=pairs)


def profiles_of(cluster: Cluster) -> tuple[EngineProfile, ...]:
    return engine_profiles(cluster, MODEL, recipe(pairs=False), host="default")


def planner(cluster: Cluster, *, pairs: bool) -> Planner:
    return Planner(cluster, MODEL, recipe(pairs=pairs), profiles_of(cluster))


# What pairs could gain at most


def bound_rows(logs: dict[str, tuple[Trajectory, ...]]) -> Iterator[Row]:
    for name, log in logs.items():
        for first, second in MIXES:
            kinds = (nodes(first, 8),) if first == second else (nodes(first, 8), nodes(second, 8))
            one = planner(Cluster(kinds), pairs=True)
            tracker = one.tracker()
            for trajectory in log:
                tracker.observe(trajectory)
            problem = one.problem(tracker)
            pools = [it.name for it in kinds]
            gains = [_gain(problem, dict(zip(pools, (share, 1 - share), strict=False))) for share in SHARES]
            yield Row(f"{name}, {first} and {second}", "most that rollout gains, times", max(gains), "")


def _gain(problem: Problem, gpus: dict[str, float]) -> float:
    """Rate of all engines with pairs over the rate without; `gpus` has the number of GPUs of each kind."""
    alone = {it.shape: (it.pool, it.devices * max(map(sum, it.work))) for it in problem.engines if it.prefill is None}
    halves: dict[tuple[str, str], tuple[str, float]] = {}
    for it in problem.engines:
        if it.prefill is not None:
            first, then = (half.split()[1] for half in it.shape.split(" > "))
            halves["prefill", first] = it.prefill[0], it.prefill[1] * sum(it.work[0])
            halves["decode", then] = it.pool, it.devices * max(map(sum, it.work[2:]))
    return _rate(alone, halves, gpus) / _rate(alone, {}, gpus)


def _rate(
    alone: dict[str, tuple[str, float]], halves: dict[tuple[str, str], tuple[str, float]], gpus: dict[str, float]
) -> float:
    """Steps/s, by a linear program. Its variables: GPUs of each engine, given the GPU seconds that it takes a step, and
    the steps/s that go through pairs."""
    engines = [("alone", *it) for it in alone.values()] + [(role, *it) for (role, _), it in halves.items()]
    cost = [-1 / each if role == "alone" else 0.0 for role, _, each in engines] + [-1.0]
    rows = [[-1 / each if role == half else 0.0 for role, _, each in engines] + [1.0] for half in ("prefill", "decode")]
    rows += [[float(pool == kind) for _, pool, _ in engines] + [0.0] for kind in gpus]
    return float(-linprog(cost, A_ub=np.array(rows), b_ub=[0.0, 0.0, *gpus.values()]).fun)


# What plans gain


def plan_rows(logs: dict[str, tuple[Trajectory, ...]], steps: int) -> Iterator[Row]:
    for name, log in logs.items():
        for h100, h20 in ((2, 2), (3, 4), (4, 8), (8, 8)):
            cluster = Cluster((nodes("H100", h100), nodes("H20", h20)))
            plans = [_planned(planner(cluster, pairs=pairs), log) for pairs in (False, True)]
            case = f"{name}, {8 * h100} H100 and {8 * h20} H20"
            without, with_pairs = (plan.predicted.step for plan in plans)
            yield Row(case, "step without pairs", without, "s")
            yield Row(case, "gain by pairs, planned, times", without / with_pairs, "")
            if any(it.role == "prefill" for it in plans[1].placement) and without / with_pairs > 1.005:
                runs = [simulate_run(plan, log, steps, learned=log).step_seconds for plan in plans]
                yield Row(case, "step without pairs, simulated", runs[0], "s")
                yield Row(case, "gain by pairs, simulated, times", runs[0] / runs[1], "")
                batch = tuple(draw(log, recipe(pairs=True).batch, 0, same_prompts=True))
                rollouts = [roll_out(plan, batch).seconds for plan in plans]
                yield Row(case, "rollout without pairs, by an oracle", rollouts[0], "s")
                yield Row(case, "gain by pairs, by an oracle, times", rollouts[0] / rollouts[1], "")


def _planned(one: Planner, log: Sequence[Trajectory]) -> Plan:
    tracker = one.tracker()
    for trajectory in log:
        tracker.observe(trajectory)
    return one.plan(tracker)


# What a change of roles is worth

ENGINES = 16
REQUESTS = 2000  # of each kind
TOGETHER = 512
NETWORK = 45e9  # bytes/s of a GPU: 400 Gb/s each, as nodes of H800 have
LONG_PROMPTS, LONG_ANSWERS = (8192, 64), (256, 2048)  # tokens of prompt and answer


@dataclass(slots=True)
class Turning:
    """Engines in two roles whose work turns from long prompts to long answers, and which then may be divided anew."""

    prefill: int  # engines, at first
    later: int | None  # and afterwards; None: as before
    drain: bool = True

    def makespan(self) -> float:
        if not self.prefill:
            return self._run(self._cluster([_spec(number, COLOCATED) for number in range(ENGINES)], None))
        specs = [_spec(number, PREFILL if number < self.prefill else DECODE) for number in range(ENGINES)]
        cluster = self._cluster(specs, KVNetwork(NETWORK))
        if self.later is not None:
            cluster.at(0, partial(self._look, cluster))
        return self._run(cluster)

    def _cluster(self, specs: Sequence[EngineSpec], network: KVNetwork | None) -> SimCluster:
        kinds = [LONG_PROMPTS] * REQUESTS + [LONG_ANSWERS] * REQUESTS
        log = [
            Trajectory(str(number), str(number), "t", prompt, (Turn(answer, None, None, 0),), None, 0, True)
            for number, (prompt, answer) in enumerate(kinds)
        ]
        decode = None if network is None else LeastLoaded()
        work = Replay(log, concurrency=TOGETHER)
        return SimCluster(specs, work, LeastLoaded(), kv_transfer=network, decode_route=decode, patient=True)

    def _run(self, cluster: SimCluster) -> float:
        cluster.run()
        return seconds(cluster.now)

    def _look(self, cluster: SimCluster, now: int) -> None:
        """Once a second, until the last of the first kind is in flight."""
        if len(cluster.requests) < REQUESTS:
            cluster.at(now + ticks(1.0), partial(self._look, cluster))
            return
        assert self.later is not None
        for number in range(self.later, self.prefill):
            name, changed = _spec(number, PREFILL).name, _spec(number, DECODE)
            back = partial(self._back, cluster, changed)
            if self.drain:
                cluster.drain(name, back)
            else:
                cluster.close(name)
                back(now)

    @staticmethod
    def _back(cluster: SimCluster, spec: EngineSpec, now: int) -> None:
        def ready(_: int) -> None:
            cluster.add(spec)

        cluster.at(now + ticks(ROLE_CHANGE), ready)


def _spec(number: int, role: EngineRole) -> EngineSpec:
    config = EngineConfig(16384, 25_000, max_num_seqs=256, kv_load_failure_policy="recompute")
    grid = engine_profiles(Cluster((NodeClass("h800", 2, 8, GPUS["H800"], 200e9, 50e9),)), MODEL, recipe(pairs=False))[
        0
    ]
    kv_bytes = MODEL.kv_bytes_per_token(2)
    return EngineSpec(f"e{number}", config, _cost(grid, config), 0, "", 1, role, kv_bytes)


_COSTS: dict[EngineConfig, GridCost] = {}


def _cost(profile: EngineProfile, config: EngineConfig) -> GridCost:
    if config not in _COSTS:
        _COSTS[config] = GridCost(profile.grid(1), config)
    return _COSTS[config]


def role_rows() -> Iterator[Row]:
    case = f"{ENGINES} H800, from long prompts to long answers"
    still = {prefill: Turning(prefill, None).makespan() for prefill in (2, 4, 8, 12, 14)}
    first = min((12, 14), key=lambda it: still[it])
    for prefill, took in still.items():
        yield Row(case, f"{prefill} prefill engines throughout", took, "s")
    for drain, word in ((True, "drained"), (False, "dropped")):
        changed = {later: Turning(first, later, drain).makespan() for later in (1, 2, 4)}
        took = min(changed.values())
        yield Row(case, f"{first} prefill engines, then {min(changed, key=changed.__getitem__)}, {word}", took, "s")
        yield Row(case, f"that over {first} throughout, times", took / still[first], "")
        yield Row(case, "that over the best throughout, times", took / min(still.values()), "")
    yield Row(case, "colocated", Turning(0, None).makespan(), "s")
    yield Row(case, "published: makespan with reconfiguration, times", 0.49, "")
    yield Row(case, "published: a switch", ROLE_CHANGE, "s")


def main() -> None:
    parser = command_line("rollout_pairs", __doc__)
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="of a simulated run (6)")
    parser.add_argument("--sessions", type=Path, default=SESSIONS, metavar="FILE", help="a log of coding sessions")
    parser.add_argument("--only", choices=("bound", "plan", "roles"))
    options = parser.parse_args()
    rows: list[Row] = []
    if options.only in (None, "bound"):
        rows += bound_rows(workloads(options.sessions))
    if options.only in (None, "plan"):
        rows += plan_rows(workloads(options.sessions), options.steps)
    if options.only in (None, "roles"):
        rows += role_rows()
    report(rows, options.json)


if __name__ == "__main__":
    main()
