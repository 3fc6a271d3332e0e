"""Simulated latencies on idle engines, which are tighter lower bounds than those from prices.

Assumption: other requests make a request no faster than it is alone, up to `SLACK`. A cached prefix does make a request
faster, so the simulation of a request has only the tokens that no cache has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from libra.cost.grid import Array
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.objective import Metric
from libra.serving.question import SizingQuestion
from libra.serving.request_work import RequestWork
from libra.serving.trial import latencies
from libra.serving.verdict import statistic
from libra.sim.clock import ticks
from libra.sim.workload.requests import RecordedRequest

SLACK = 0.01
_APART = 10.0  # seconds to the next arrival per token of a request, more than any engine needs


@dataclass(frozen=True, slots=True)
class IdleLatency:
    """[requests] seconds on an idle engine; 0 for requests that were not simulated."""

    ttft: Array
    tpot: Array


@dataclass(slots=True)
class IdleEngines:
    """Simulates the few requests of a question that decide its percentiles, each request alone."""

    question: SizingQuestion
    _known: dict[EngineSetup, IdleLatency] = field(init=False, default_factory=dict)

    def of(self, shape: EngineSetup, work: RequestWork) -> IdleLatency:
        """Latencies on an engine of this shape. Groups of ranks and engines with drafts are not simulated: drafts
        depend on a request's number."""
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
        """Number of requests that decide a percentile: one more than the number that may exceed it; 0 for a mean."""
        allowed = statistic(self.question, metric).allowed(count)
        return 0 if allowed is None else allowed + 1
