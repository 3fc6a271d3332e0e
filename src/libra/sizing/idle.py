"""Latencies on idle engines, in simulation: tighter than what prices prove.

Assumption: a request is served no faster beside others than alone, but for `SLACK`. Requests without prefixes count, as
a cached prefix makes a request faster: of each request only the tokens that no cache has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from libra.cost.grid import Array
from libra.sim.clock import ticks
from libra.sim.workload.requests import RecordedRequest
from libra.sizing.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.sizing.objective import Metric
from libra.sizing.question import SizingQuestion
from libra.sizing.request_work import RequestWork
from libra.sizing.trial import latencies, statistic

SLACK = 0.01
_APART = 10.0  # seconds between two requests for each token of the first: no engine is so slow


@dataclass(frozen=True, slots=True)
class IdleLatency:
    """[requests] seconds on an idle engine; 0 of those that were not simulated."""

    ttft: Array
    tpot: Array


@dataclass(slots=True)
class IdleEngines:
    """Of the requests of one question, the few that decide its percentiles are simulated, each by itself."""

    question: SizingQuestion
    _known: dict[EngineSetup, IdleLatency] = field(init=False, default_factory=dict)

    def of(self, shape: EngineSetup, work: RequestWork) -> IdleLatency:
        """Groups of ranks, and engines with drafts, which depend on a request's number, are not simulated."""
        if shape not in self._known:
            self._known[shape] = self._simulated(replace(shape, kv_tiers=()), work)
        return self._known[shape]

    def _simulated(self, shape: EngineSetup, work: RequestWork) -> IdleLatency:
        size = len(work)
        ttft, tpot = np.zeros(size), np.zeros(size)
        if shape.drafts is not None or shape.ranks > 1 or shape.apart is not None:
            return IdleLatency(ttft, tpot)
        longest = np.argsort(work.new, kind="stable")[::-1]
        several = np.flatnonzero(work.decoded)
        widest = several[np.argsort((work.new + work.decoded / 2)[several], kind="stable")[::-1]]
        places = np.union1d(longest[: self._few("ttft", size)], widest[: self._few("tpot", len(several))])
        if not len(places):
            return IdleLatency(ttft, tpot)
        requests, at = [], 0.0
        for place in places.tolist():
            prompt, output = int(work.new[place]), int(work.output[place])
            requests.append(RecordedRequest(ticks(at), prompt, output))
            at += _APART * (prompt + output)
        alone = ServingCandidate((EnginePool("colocated", shape, 1),))
        taken = latencies(self.question, alone, tuple(requests))
        ttft[places] = taken["ttft"]
        tpot[places[work.decoded[places] > 0]] = taken["tpot"]
        return IdleLatency((1 - SLACK) * ttft, (1 - SLACK) * tpot)

    def _few(self, metric: Metric, count: int) -> int:
        """Requests that decide a percentile: those that may exceed it, and one; none decides a mean."""
        allowed = statistic(self.question, metric).allowed(count)
        return 0 if allowed is None else allowed + 1
