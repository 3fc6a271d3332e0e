"""Worth of lent GPUs to a plan: with the split of one's own GPUs kept, and planned together with them.

Invariant: every row prices the same trajectories; a lent engine has the memory that serving leaves, steps that fit into
a grant, and the certified share of the time, and never the longest contexts.

    python -m benchmarks.lending plan [--share 0.75] [--simulate STEPS] [--lifted] [--json FILE]

Own GPUs are A800 in nodes of eight that train and generate with Qwen3-14B, four versions stale. Lenders are A800, too:
engines of one GPU that serve Qwen3-8B, or of four that serve Qwen3-32B, as the borrowing engine has as many GPUs as the
one beside it. Either holds 86 requests with 105,000 tokens of context at most, which Azure's conversation hour reaches
at half its rate where its tokens take 120 ms. `--simulate` makes whole runs of the plans, `--lifted` plans the
first case again with one restriction of a loan, or of the recipe, lifted at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.command import command_line
from benchmarks.evaluation.setting import Setting
from benchmarks.rows import Row, report
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import Cluster, ServingPool
from libra.hardware.model_file import load_model
from libra.lend.certificate import Certificate, Harvest
from libra.lend.gate import Slo
from libra.lend.lender import Lender
from libra.lend.traffic.envelope import Envelope
from libra.plan.model.solve import solve
from libra.plan.options.price import own_training
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.sim.of_plan import simulate_run

_MODEL = "Qwen/Qwen3-14B"
_SERVED = {1: "Qwen/Qwen3-8B", 4: "Qwen/Qwen3-32B"}  # by GPUs of an engine
_OVER_NONE, _OVER_KEPT = 1.2, 1.1  # of 16 GPUs at 75 % beside 48, on Search-R1
_NODE = 8  # GPUs


@dataclass(frozen=True, slots=True)
class _Case:
    workload: str
    own: int  # nodes
    lent: int

    @property
    def name(self) -> str:
        return f"{self.workload}, {_NODE * self.own} + {_NODE * self.lent}"


@dataclass(frozen=True, slots=True)
class _Terms:
    """Terms of a loan."""

    share: float  # of a lender's time
    grant: float = 0.05  # seconds, the longest
    served: str | None = None  # None: as large a model as the engines are
    context: int = 105_000  # tokens that serving holds


_MAIN = _Case("search_r1", 6, 2)
_TINY = "Qwen/Qwen3-0.6B"
_WORKLOADS = ("search_r1", "dapo_math", "r2e_gym")
_LENT = {6: (2, 4, 8), 3: (4,)}  # nodes, by own ones


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("lending plan", __doc__)
    parser.add_argument("--share", type=float, default=0.75, help="of a lender's time (default: 0.75)")
    parser.add_argument("--simulate", type=int, default=0, metavar="STEPS", help="simulate whole runs of STEPS steps")
    parser.add_argument("--lifted", action="store_true", help="what each restriction costs, too")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 1:
        parser.error(f"--share is {options.share:g}; a share of the time is above 0 and at most 1")
    rows = [
        row for workload in _WORKLOADS for own in _LENT for row in _rows(workload, own, options.share, options.simulate)
    ]
    if options.lifted:
        rows += _lifted(options.share)
    report(rows, options.json)
    return 0


def _rows(workload: str, own: int, share: float, steps: int) -> Iterator[Row]:
    setting = Setting(_MODEL, workload, nodes=own)
    planner = setting.planner()
    tracker = setting.tracker(planner)
    alone = planner.plan(tracker)
    train = own_training(alone.request.menu().problem, alone.allocation)
    named = f"{workload}, {_NODE * own} alone"
    yield Row(named, f"{alone.predicted.bottleneck}-bound step", alone.predicted.step, "s")
    yield Row(named, "GPUs that train", train.devices, "")
    every = min(it.seconds for it in alone.request.menu().problem.training)
    yield Row(named, "over it, did all of them train and rollout take no time", alone.predicted.step / every, "x")
    alone_seconds = cache(lambda: _simulated(setting, alone, steps))
    for lent in _LENT[own]:
        case = _Case(workload, own, lent)
        owned = Setting(_MODEL, workload, nodes=own + lent).planner().plan(tracker).predicted.step
        yield Row(case.name, "over none, were all one's own", alone.predicted.step / owned, "x")
        for devices in _SERVED:
            name, main = f"{case.name}, engines of {devices}", case == _MAIN and share == 0.75
            together = _lending(planner, lent, devices, _Terms(share)).plan(tracker)
            problem = together.request.menu().problem
            kept = solve(replace(problem, training=(train,))).predicted.step
            over_none, over_kept = alone.predicted.step / together.predicted.step, kept / together.predicted.step
            engines = sum(loan.engines for loan in together.loans)
            yield Row(name, "engines borrowed", engines, f"of {_NODE * lent // devices}")
            yield Row(name, "GPUs that train", own_training(problem, together.allocation).devices, "")
            yield _judged(Row(name, "over none", over_none, "x"), _OVER_NONE if main else None)
            yield _judged(Row(name, "over the split kept", over_kept, "x"), _OVER_KEPT if main else None)
            if steps and together.loans:
                ratio = alone_seconds() / _simulated(setting, together, steps)
                yield Row(name, f"over none, simulated for {steps} steps", ratio, "x")


def _judged(row: Row, least: float | None) -> Row:
    return row if least is None else replace(row, goal=f">= {least:g}", met=row.value >= least)


def _lifted(share: float) -> Iterator[Row]:
    """Rows of the first case with one restriction lifted at a time."""
    setting = Setting(_MODEL, _MAIN.workload, nodes=_MAIN.own)
    asked: list[tuple[str, _Terms, dict[str, Any]]] = [
        ("as it is", _Terms(share), {}),
        ("the whole of the time", _Terms(1.0), {}),
        ("the whole of the memory", _Terms(share, served=_TINY, context=1), {}),
        ("grants without an end", _Terms(share, grant=10.0), {}),
        ("gradients added up as groups come", _Terms(share), {"early_gradients": True}),
        ("5 versions stale", _Terms(share), {"staleness": 5}),
        ("6 versions stale", _Terms(share), {"staleness": 6}),
        ("8 versions stale", _Terms(share), {"staleness": 8}),
    ]
    for name, terms, recipe in asked:
        planner = setting.planner(**recipe)
        tracker = setting.tracker(planner)
        alone = planner.plan(tracker).predicted.step
        for devices in _SERVED:
            together = _lending(planner, _MAIN.lent, devices, terms).plan(tracker)
            case = f"{_MAIN.name}, engines of {devices}, {name}"
            train = own_training(together.request.menu().problem, together.allocation)
            yield Row(case, "over none", alone / together.predicted.step, "x")
            yield Row(case, "GPUs that train", train.devices, "")


def _lending(planner: Planner, nodes: int, devices: int, terms: _Terms) -> Planner:
    own, served = planner.cluster.nodes[0], terms.served or _SERVED[devices]
    pool = replace(own, name="chat", count=nodes)
    certificate = Certificate(
        model=served,
        hardware=f"{devices} x A800",
        slo=Slo(ttft=0.5, tpot=0.15),
        use=0.8,
        longest_grant=terms.grant,
        longest_step=0.06,
        envelope=Envelope(rate=4.0, queued=min(8192, terms.context), live=86, context=terms.context, window=60.0),
        harvest=(Harvest(rate=2.7, share=terms.share),),
        traffic="assumed",
        requests=1,
        missed_alone=0,
    )
    lender = Lender("chat", load_model(served), devices, (certificate,), rates=(2.7,), period=300.0)
    return replace(
        planner,
        cluster=Cluster((own,), (ServingPool(pool),)),
        lenders=(lender,),
        lent_profiles=engine_profiles(Cluster((pool,)), planner.model, planner.recipe, "tables"),
    )


def _simulated(setting: Setting, plan: Plan, steps: int) -> float:
    """Seconds of a step of a whole run on the trajectories that were planned for, lent engines at their share."""
    return simulate_run(plan, setting.known, steps, learned=setting.known, seed=setting.seed).step_seconds


if __name__ == "__main__":
    sys.exit(main())
