"""Workloads that an engine on a GPU served, for the simulator.

Invariant: of what was measured the simulator knows only the arrivals that nothing in the workload brings about:
those of an open loop, and the first of a closed one. Sharing is that of the workload, not that of the cached tokens.

Requests of a group have one prompt. Turns of a session extend the prompt of the turn before, not what was generated;
sessions share what all their first prompts had cached. A session's next turn comes when the one before has ended, and
where a session ends the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.fidelity.gpu_data import CaseRequest
from benchmarks.fidelity.summary import Outcome, outcomes
from libra.route.baselines import LeastLoaded
from libra.sim.clock import ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.group_cost import GroupCost, GroupSpec
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.requests import Requests


def measured_outcomes(case: Sequence[CaseRequest]) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(number, 0, ticks(it.arrival), ticks(it.first), ticks(it.end), it.prompt, it.output, it.cached, 0)
        for number, it in enumerate(case)
    )


def predicted_outcomes(
    case: Sequence[CaseRequest], config: EngineConfig, cost: IterationCost, ranks: tuple[int, GroupCost] | None = None
) -> tuple[Outcome, ...]:
    """Outcomes of the requests at these prices. `ranks` is a number of ranks and their group's cost: they begin their
    iterations together, and a request goes to the least loaded rank."""
    sessions = any(it.session is not None for it in case)
    workload = Sessions(case) if sessions else Requests(lambda: _by_arrival(requests(case)), {})
    if ranks is None:
        cluster = SimCluster([EngineSpec("engine", config, cost)], workload)
    else:
        group = GroupSpec("ranks", ranks[1])
        specs = [EngineSpec(f"rank {place}", config, cost, group=group) for place in range(ranks[0])]
        cluster = SimCluster(specs, workload, LeastLoaded())
    cluster.run()
    found = outcomes(cluster.requests)
    if not isinstance(workload, Sessions):
        return found
    # They were there when they came, though the engine began with all of them.
    return tuple(
        replace(it, arrival=ticks(case[it.number].arrival)) if it.number in workload.first else it for it in found
    )


def requests(case: Sequence[CaseRequest]) -> list[Request]:
    """The requests in their order, each on a chain that begins as those do with which it shares a prompt."""
    shared = Chain("shared")
    common = min((it.cached for it in case if it.session is not None and it.turn == 0 and it.cached), default=0)
    prompts: dict[object, tuple[Chain, int]] = {}  # of a group or a session: the last prompt, and its tokens
    found = []
    for number, it in enumerate(case):
        chain: Chain | None = None
        if it.group is not None:
            whole, _ = prompts.setdefault(it.group, (Chain(f"group {it.group}"), it.prompt))
            chain = Chain(f"{whole.name}, {number}", whole, it.prompt)
        elif it.session is not None:
            before, fork = prompts.get(it.session, (shared, min(common, it.prompt)))
            chain = Chain(f"{it.session}, turn {it.turn}", before, fork)
            prompts[it.session] = (chain, it.prompt)
        found.append(Request(number, ticks(it.arrival), it.prompt, it.output, chain=chain))
    return found


class Sessions:
    """`Workload` of sessions. The number that run at a time is that of sessions begun before the first one ended."""

    def __init__(self, case: Sequence[CaseRequest]) -> None:
        self._case = case
        turns: dict[str, list[int]] = {}
        for number, it in sorted(enumerate(case), key=lambda entry: entry[1].arrival):
            assert it.session is not None
            turns.setdefault(it.session, []).append(number)
        self._turns = list(turns.values())
        ended = min(case[numbers[-1]].end for numbers in self._turns)
        self._together = sum(case[numbers[0]].arrival < ended for numbers in self._turns)
        self.first = frozenset(numbers[0] for numbers in self._turns[: self._together])
        self._follows = {before: after for numbers in self._turns for before, after in pairwise(numbers)}

    def start(self) -> Iterator[Request]:
        self._requests = requests(self._case)
        self._begun = self._together
        opening = [self._requests[number] for number in sorted(self.first)]
        at = max(request.arrival for request in opening)  # the engine begins once all of them are there
        for request in opening:
            request.arrival = at
        return iter(opening)

    def finished(self, request: Request, now: int) -> Request | None:
        number = self._follows.get(request.number)
        if number is None:
            if self._begun == len(self._turns):
                return None
            number = self._turns[self._begun][0]
            self._begun += 1
        follower = self._requests[number]
        follower.arrival = now
        return follower

    def describe(self) -> dict[str, Any]:
        return {"name": "sessions", "sessions": len(self._turns), "together": self._together}


def _by_arrival(found: list[Request]) -> list[Request]:
    return sorted(found, key=lambda request: (request.arrival, request.number))
