"""Certificates of a serving engine for lending: the largest load whose replay has no miss caused by lending.

Invariant: every certified load was replayed against a borrower that spends every grant to its end, and compared with
the same arrivals served alone. With the longest queue of an envelope, a first token still meets its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from libra.lend.certificate import Certificate, Harvest, ServerLimits
from libra.lend.gate import Gate, ServingView, Slo, ttft_queue
from libra.lend.sim.shared_device import DeviceOutcome, SharedDevice, SpendsAll
from libra.lend.sim.tenant import EngineServingCost, latencies, misses
from libra.lend.traffic.envelope import Envelope
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.request import Request
from libra.sim.workload.requests import RecordedRequest, Requests, recorded_requests

WINDOW = 60.0  # seconds over which an envelope's rate is counted
_INSTANT = ticks(1e-6)
MISSED_ALONE = 0.01  # share of requests: an engine that misses the SLO alone more often cannot have that SLO


class NothingToLendError(ValueError):
    """No load leaves time to lend under the SLO. The message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class LendingCase:
    """A serving engine, its SLO and its traffic."""

    spec: EngineSpec
    model: str
    hardware: str
    slo: Slo
    traffic: str
    requests: tuple[RecordedRequest, ...]
    longest_grant: float  # seconds
    parameters: int | None = None  # of the model; None: unknown

    def __post_init__(self) -> None:
        if self.requests[-1].arrival - self.requests[0].arrival < _INSTANT:
            raise ValueError(
                f"{self.traffic}: all requests arrive at one time, so the traffic has no rate; give requests at two"
                " times or more"
            )

    @property
    def prompt(self) -> int:
        return max(it.prompt_tokens for it in self.requests)

    def arrivals(self, load: float) -> Requests:
        """The requests, at `load` times their rate, without cancellations."""
        return recorded_requests(
            [it if it.cancel_at is None else replace(it, cancel_at=None) for it in self.requests], rate_scale=load
        )

    def alone(self, load: float) -> Sequence[Request]:
        """The requests as served without lending."""
        cluster = SimCluster([self.spec], self.arrivals(load))
        cluster.run()
        return cluster.requests

    def lent(self, load: float, use: float) -> DeviceOutcome:
        """The outcome with a borrower that spends every grant to its end."""
        gate, pace = Gate(ticks(self.longest_grant), 1), ticks(self.slo.pace(use))
        device = SharedDevice(self.spec, gate, SpendsAll(), pace=pace, prompt=self.prompt)
        return device.run(self.arrivals(load).start())


@dataclass(frozen=True, slots=True)
class LoadTrial:
    """The replay of one load with one `use`."""

    load: float  # times the rate of the traffic
    use: float
    rate: float  # requests/s
    lent: float  # share of the device
    missed: int  # requests that missed the SLO with lending
    missed_alone: int  # requests that missed the SLO without lending
    attributable: int  # requests that missed the SLO only with lending
    longest_step: float  # seconds: bound of a step inside the envelope of this load
    queue: int  # most prompt tokens that may wait at this load if every first token is to meet its bound
    refused: str | None  # reason why this load is not certified
    outcome: DeviceOutcome


def attempt(case: LendingCase, load: float, use: float, alone: Sequence[Request]) -> LoadTrial:
    """Replay a load with lending, and compare it with serving `alone`."""
    outcome = case.lent(load, use)
    missed_alone = misses(alone, case.slo.ttft, case.slo.tpot).any
    missed = misses(outcome.requests, case.slo.ttft, case.slo.tpot).any
    attributable = len(missed - missed_alone)
    cost = EngineServingCost(case.spec.cost, case.spec.config.max_num_batched_tokens, case.prompt)
    view = ServingView(outcome.most_live, 0, 0, context=outcome.most_context)
    longest = seconds(cost.longest_step(view))
    pace = case.slo.pace(use)
    prefill = case.spec.config.max_num_batched_tokens - outcome.most_live
    queue = ttft_queue(case.slo.ttft, case.longest_grant, longest, prefill)
    refused: str | None = None
    if len(missed_alone) > MISSED_ALONE * len(outcome.requests):
        refused = f"serving alone misses the SLO of {len(missed_alone)} of {len(outcome.requests)} requests"
    elif longest > pace:
        too_long = f"a serving step may take {1e3 * longest:.0f} ms, but the pace is {1e3 * pace:.0f} ms a token"
        refused = f"{too_long}: {_budget_that_fits(case, view, pace)}"
    elif queue < 1:
        shortest = case.longest_grant + 2 * longest
        refused = (
            f"a grant and two steps before a first token may take {1e3 * shortest:.0f} ms, but ttft is"
            f" {1e3 * case.slo.ttft:.0f} ms: lower the longest grant or max_num_batched_tokens"
        )
    elif attributable:
        refused = f"{attributable} of {len(outcome.requests)} requests miss the SLO because of lending"
    rate = len(outcome.requests) / seconds(outcome.requests[-1].arrival) if len(outcome.requests) > 1 else 0.0
    return LoadTrial(
        load,
        use,
        rate,
        outcome.lent_share,
        len(missed),
        len(missed_alone),
        attributable,
        longest,
        queue,
        refused,
        outcome,
    )


def _budget_that_fits(case: LendingCase, view: ServingView, pace: float) -> str:
    """The remedy if the longest step is longer than the pace."""
    budget = case.spec.config.max_num_batched_tokens
    while budget > max(view.live, 1) + 1:
        budget = max(budget // 2, view.live + 1)
        if seconds(EngineServingCost(case.spec.cost, budget, case.prompt).longest_step(view)) <= pace:
            return f"lower max_num_batched_tokens to {budget}"
    return "no max_num_batched_tokens makes it short enough; lend less of tpot (use), or nothing"


def certify(
    case: LendingCase,
    uses: Sequence[float],
    loads: Sequence[float],
    progress: Callable[[LoadTrial], None] | None = None,
) -> tuple[Certificate, ...]:
    """Certify, for each `use`, the largest of `loads` up to which no load is refused.

    Raises NothingToLendError, with the reason for refusing the lightest load, if every `use` fails at that load. Raises
    ValueError if serving alone already misses the SLO at the lightest load, so that lending is not to blame.
    """
    if not uses or not loads or min(loads) <= 0:
        raise ValueError("uses and loads: give at least one of each; loads are above 0")
    held: dict[float, list[LoadTrial]] = {use: [] for use in uses}
    trying = list(uses)
    first_refusal: str | None = None
    for load in sorted(loads):
        if not trying:
            break
        alone = case.alone(load)
        if load == min(loads):
            _require_slo(case, load, alone)
        for use in list(trying):
            made = attempt(case, load, use, alone)
            if progress is not None:
                progress(made)
            if made.refused is None:
                held[use].append(made)
            else:
                first_refusal = first_refusal or made.refused
                trying.remove(use)
    found = tuple(_certificate(case, attempts) for attempts in held.values() if attempts)
    if not found:
        raise NothingToLendError(
            f"{case.traffic}: nothing can be lent at {min(loads):g} times its rate: {first_refusal}"
        )
    return found


def _require_slo(case: LendingCase, load: float, alone: Sequence[Request]) -> None:
    """Raises ValueError if serving alone misses the SLO of too many requests."""
    slo, missed = case.slo, misses(alone, case.slo.ttft, case.slo.tpot)
    if len(missed.any) <= MISSED_ALONE * len(alone):
        return
    ttft, tpot = latencies(alone)
    parts = [("ttft", missed.ttft, slo.ttft, ttft), ("tpot", missed.tpot, slo.tpot, tpot)]
    late = " and ".join(
        f"{key} of {objective:g} s for {len(those)} of {len(alone)} requests (99 % have {kept:.2g} s or less)"
        for key, those, objective, kept in parts
        if those
    )
    remedy = " and ".join(key for key, those, *_ in parts if those)
    raise ValueError(f"{case.traffic}: at {load:g} times its rate serving alone misses {late}: raise {remedy}")


def _certificate(case: LendingCase, attempts: Sequence[LoadTrial]) -> Certificate:
    last = attempts[-1]
    outcome, config = last.outcome, case.spec.config
    return Certificate(
        model=case.model,
        hardware=case.hardware,
        slo=case.slo,
        use=last.use,
        longest_grant=case.longest_grant,
        longest_step=last.longest_step,
        envelope=Envelope(
            rate=_most_in_window(outcome.requests) / WINDOW,
            queued=min(outcome.most_queued, last.queue),
            live=outcome.most_live,
            context=outcome.most_context,
            window=WINDOW,
        ),
        harvest=tuple(Harvest(made.rate, made.lent) for made in attempts),
        traffic=case.traffic,
        requests=len(outcome.requests),
        missed_alone=last.missed_alone,
        parameters=case.parameters,
        limits=ServerLimits(config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens),
    )


def _most_in_window(requests: Sequence[Request]) -> int:
    most = first = 0
    for number, request in enumerate(requests):
        while request.arrival - requests[first].arrival >= ticks(WINDOW):
            first += 1
        most = max(most, number - first + 1)
    return most
