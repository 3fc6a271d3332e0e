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
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog

from benchmarks.command import command_line
from benchmarks.rollout_price_simulation import roll_out
from benchmarks.rows import Row, report
from benchmarks.simulation import SESSIONS
from benchmarks.workloads import definition
from libra import read_trajectories
from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model_file import load_model
from libra.lengths.tracker import LengthTracker
from libra.plan.decision import ROLE_CHANGE
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
MODEL, LONGEST = load_model("Qwen/Qwen3-8B"), 40960  # tokens of context
LONGEST_TOOL = 5.0  # seconds: longer calls waited for people
GROUPS = 64  # of 16, that are planned with
H20 = load_cluster(EXAMPLES / "cluster_prefill_decode.yaml").nodes[1].gpu
MIXES = (("H100", "H100"), ("H100", "A800"), ("A800", "L40S"), ("H100", "H20"))
SHARES = (0.2, 0.33, 0.5, 0.67, 0.8)  # of the GPUs that are of the first kind
SIZES = ((2, 2), (3, 4), (4, 8), (8, 8))  # nodes of H100 and of H20
ENGINES, REQUESTS, TOGETHER = 16, 2000, 512  # requests of each kind, and in flight
NETWORK = 45e9  # bytes/s of a GPU: 400 Gb/s each, as nodes of H800 have
LONG_PROMPTS, LONG_ANSWERS = (8192, 64), (256, 2048)  # tokens of prompt and answer

Logs = dict[str, tuple[Trajectory, ...]]


def workloads(sessions: Path) -> Logs:
    """Agents that search, those that write code, and sessions of coding, which are told much and say little."""
    episodes = definition.read("r2e_gym").episodes("strong")
    found = {"search_agent": tuple(read_trajectories(EXAMPLES / "search_agent.jsonl"))}
    found["r2e_gym"] = tuple(it for number in range(GROUPS) for it in episodes.group(number, 0))
    if sessions.exists():
        found["coding sessions"] = tuple(read_trajectories(sessions))
    return {
        name: tuple(_cut(truncate(it, LONGEST)) for it in log if it.finished and it.prompt_tokens <= LONGEST)
        for name, log in found.items()
    }


def _cut(trajectory: Trajectory) -> Trajectory:
    limits = ((it, it.tool_seconds and min(LONGEST_TOOL, it.tool_seconds)) for it in trajectory.turns)
    return replace(trajectory, turns=tuple(replace(turn, tool_seconds=tool) for turn, tool in limits))


def recipe(pairs: bool) -> Recipe:
    return Recipe(batch=1024, samples_per_prompt=16, max_length=LONGEST, prefill_decode=pairs)


def planner(kinds: dict[str, int], log: Sequence[Trajectory], *, pairs: bool) -> tuple[Planner, LengthTracker]:
    """A planner for these nodes of eight GPUs, and lengths as the log has them."""
    gpus = {name: GPUS.get(name, H20) for name in kinds}
    cluster = Cluster(tuple(NodeClass(it.lower(), kinds[it], 8, gpu, gpu.link, 50e9) for it, gpu in gpus.items()))
    found = Planner(cluster, MODEL, recipe(pairs), engine_profiles(cluster, MODEL, recipe(False), host="default"))
    return found, found.tracker(log)


def bound_rows(logs: Logs) -> Iterator[Row]:
    """The most that pairs could gain."""
    for (name, log), mix in product(logs.items(), MIXES):
        one, tracker = planner(dict.fromkeys(mix, 8), log, pairs=True)
        problem, pools = one.problem(tracker), [gpu.lower() for gpu in dict.fromkeys(mix)]
        gains = [_gain(problem, dict(zip(pools, (share, 1 - share), strict=False))) for share in SHARES]
        yield Row(f"{name}, {mix[0]} and {mix[1]}", "most that rollout gains, times", max(gains), "")


def _gain(problem: Problem, gpus: dict[str, float]) -> float:
    """Rate of all engines with pairs over the rate without; `gpus` has the number of GPUs of each kind."""
    alone = {
        it.shape: ("alone", it.pool, it.devices * max(map(sum, it.work))) for it in problem.engines if not it.prefill
    }
    halves: dict[tuple[str, str], tuple[str, str, float]] = {}
    for it in problem.engines:
        if it.prefill is not None:
            first, then = (half.split()[1] for half in it.shape.split(" > "))
            halves["prefill", first] = "prefill", it.prefill[0], it.prefill[1] * sum(it.work[0])
            halves["decode", then] = "decode", it.pool, it.devices * max(map(sum, it.work[2:]))
    return _rate([*alone.values(), *halves.values()], gpus) / _rate([*alone.values()], gpus)


def _rate(engines: Sequence[tuple[str, str, float]], gpus: dict[str, float]) -> float:
    """Steps/s, by a linear program, of engines by role, pool and the GPU seconds that they take a step. Its variables:
    GPUs of each engine, and the steps/s that go through pairs."""
    cost = [-1 / each if role == "alone" else 0.0 for role, _, each in engines] + [-1.0]
    rows = [[-1 / each if role == half else 0.0 for role, _, each in engines] + [1.0] for half in ("prefill", "decode")]
    rows += [[float(pool == kind) for _, pool, _ in engines] + [0.0] for kind in gpus]
    return float(-linprog(cost, A_ub=np.array(rows), b_ub=[0.0, 0.0, *gpus.values()]).fun)


def plan_rows(logs: Logs, steps: int) -> Iterator[Row]:
    for (name, log), (h100, h20) in product(logs.items(), SIZES):
        asked = [planner({"H100": h100, "H20": h20}, log, pairs=pairs) for pairs in (False, True)]
        plans = [one.plan(tracker) for one, tracker in asked]
        case, (without, paired) = f"{name}, {8 * h100} H100 and {8 * h20} H20", (it.predicted.step for it in plans)
        yield Row(case, "step without pairs", without, "s")
        yield Row(case, "gain by pairs, planned, times", without / paired, "")
        if not any(it.role == "prefill" for it in plans[1].placement) or without / paired <= 1.005:
            continue
        batch = tuple(draw(log, recipe(True).batch, 0, same_prompts=True))
        for what, word, took in (
            ("step", "simulated", [simulate_run(plan, log, steps, learned=log).step_seconds for plan in plans]),
            ("rollout", "by an oracle", [roll_out(plan, batch).seconds for plan in plans]),
        ):
            yield Row(case, f"{what} without pairs, {word}", took[0], "s")
            yield Row(case, f"gain by pairs, {word}, times", took[0] / took[1], "")


def makespan(prefill: int, later: int | None = None, drain: bool = True) -> float:
    """Seconds with `prefill` engines for prompts and the others for answers; 0: all are for both. Where `later` is
    given, that number stays for prompts once the last long prompt is in flight."""
    work = [LONG_PROMPTS] * REQUESTS + [LONG_ANSWERS] * REQUESTS
    log = [
        Trajectory(str(number), str(number), "t", prompt, (Turn(answer, None, None, 0),), None, 0, True)
        for number, (prompt, answer) in enumerate(work)
    ]
    halves: dict[str, Any] = {"kv_transfer": KVNetwork(NETWORK), "decode_route": LeastLoaded()} if prefill else {}
    roles = [(PREFILL if it < prefill else DECODE) if prefill else COLOCATED for it in range(ENGINES)]
    specs = [_spec(*it) for it in enumerate(roles)]
    cluster = SimCluster(specs, Replay(log, concurrency=TOGETHER), LeastLoaded(), patient=True, **halves)

    def look(now: int) -> None:
        if len(cluster.requests) < REQUESTS:
            cluster.at(now + ticks(1.0), look)
            return
        for number in range(later or 0, prefill):
            begin = partial(_begin, cluster, _spec(number, DECODE))
            if drain:
                cluster.drain(specs[number].name, begin)
            else:
                cluster.close(specs[number].name)
                begin(now)

    if later is not None:
        cluster.at(0, look)
    cluster.run()
    return seconds(cluster.now)


def _begin(cluster: SimCluster, spec: EngineSpec, now: int) -> None:
    def ready(_: int) -> None:
        cluster.add(spec)

    cluster.at(now + ticks(ROLE_CHANGE), ready)


def _spec(number: int, role: EngineRole) -> EngineSpec:
    return EngineSpec(f"e{number}", *_h800(), 0, "", 1, role, MODEL.kv_bytes_per_token(2))


@cache
def _h800() -> tuple[EngineConfig, GridCost]:
    config = EngineConfig(16384, 25_000, max_num_seqs=256, kv_load_failure_policy="recompute")
    there = Cluster((NodeClass("h800", 2, 8, GPUS["H800"], 200e9, 50e9),))
    return config, GridCost(engine_profiles(there, MODEL, recipe(False))[0].grid(1), config)


def role_rows() -> Iterator[Row]:
    case = f"{ENGINES} H800, from long prompts to long answers"
    still = {prefill: makespan(prefill) for prefill in (2, 4, 8, 12, 14)}
    first = min((12, 14), key=lambda it: still[it])
    for prefill, took in still.items():
        yield Row(case, f"{prefill} prefill engines throughout", took, "s")
    for drain, word in ((True, "drained"), (False, "dropped")):
        took, later = min((makespan(first, later, drain), later) for later in (1, 2, 4))
        yield Row(case, f"{first} prefill engines, then {later}, {word}", took, "s")
        yield Row(case, f"that over {first} throughout, times", took / still[first], "")
        yield Row(case, "that over the best throughout, times", took / min(still.values()), "")
    yield Row(case, "colocated", makespan(0), "s")
    yield Row(case, "published: makespan with reconfiguration, times", 0.49, "")
    yield Row(case, "published: a switch", ROLE_CHANGE, "s")


def main() -> None:
    parser = command_line("rollout_pairs", __doc__)
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="of a simulated run (6)")
    parser.add_argument("--sessions", type=Path, default=SESSIONS, metavar="FILE", help="a log of coding sessions")
    parser.add_argument("--only", choices=("bound", "plan", "roles"))
    options = parser.parse_args()
    logs = {} if options.only == "roles" else workloads(options.sessions)
    only, rows = options.only, list[Row]()
    rows += bound_rows(logs) if only in (None, "bound") else ()
    rows += plan_rows(logs, options.steps) if only in (None, "plan") else ()
    rows += role_rows() if only in (None, "roles") else ()
    report(rows, options.json)


if __name__ == "__main__":
    main()
