"""Engines that lend, read from a cluster file, from the files that it names, and from options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from libra.cli.output import tell_note, tell_notes
from libra.config.yaml_file import ConfigError, refusal
from libra.hardware.cluster import Cluster, ServingPool
from libra.hardware.model_file import load_model
from libra.lend.certificate import load_certificate
from libra.lend.lender import Lender, make_lender
from libra.lend.loan_terms import LoanTerms, TrafficLog
from libra.lend.recall import RecallPolicy
from libra.lend.sim.tenancy import Tenancy, TenantEngine, tenancy_of
from libra.lend.traffic.forecast import forecast_from
from libra.plan.plan import Plan
from libra.sim.clock import seconds
from libra.sim.engines_file import load_lender
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import RecordedRequest


def load_lenders(path: Path, cluster: Cluster) -> tuple[Lender, ...]:
    """The lenders of the cluster that was read from `path`. Raises `ConfigError` naming the key under `serving`."""
    return tuple(
        _lender(path, f"serving.{index}.lends", pool, pool.lends)
        for index, pool in enumerate(cluster.serving)
        if isinstance(pool.lends, LoanTerms)
    )


def read_traffic(path: Path) -> tuple[RecordedRequest, ...]:
    """Read the requests that `--traffic` names. Raises ValueError."""
    try:
        return read_requests(path, tell_note)
    except ValueError as error:
        raise ValueError(f"--traffic: {error}") from None


def _lender(path: Path, key: str, pool: ServingPool, terms: LoanTerms) -> Lender:
    try:
        model = load_model(terms.model)
    except ConfigError as error:
        raise refusal(path, f"{key}.model: {error}") from None
    try:
        certificates = [(name, load_certificate(path.parent / name)) for name in terms.certificates]
    except ConfigError as error:
        raise refusal(path, f"{key}.certificates: {error}") from None
    rates, period = _rates(path, key, terms)
    try:
        return make_lender(pool, model, certificates, rates, period)
    except ValueError as error:
        raise refusal(path, f"{key}.{error}") from None


def _rates(path: Path, key: str, terms: LoanTerms) -> tuple[tuple[float, ...], float]:
    """Requests/s of the whole pool that are possible in the coming period, and its seconds."""
    ahead = terms.traffic
    if not isinstance(ahead, TrafficLog):
        return ahead.rates, ahead.seconds
    try:
        arrivals = [seconds(request.arrival) for request in read_requests(path.parent / ahead.requests, tell_note)]
    except ValueError as error:
        raise refusal(path, f"{key}.traffic.requests: {error}") from None
    try:
        return forecast_from(arrivals, ahead.bin, ahead.season_bins).cases, ahead.bin
    except ValueError as error:
        raise refusal(path, f"{key}.traffic: {error}") from None


def described_tenancy(
    plan: Plan, lenders: Sequence[Path], traffic: Sequence[Path], kv_quota: bool, watched: bool
) -> Tenancy:
    """Serving engines on the devices that the plan borrows, as `--lender` describes them. Raises ValueError."""
    if len(lenders) != len(traffic):
        raise ValueError(
            f"--lender is given {len(lenders)} times and --traffic {len(traffic)} times: give one --traffic for each"
            " --lender"
        )
    if not plan.loans:
        raise ValueError("--lender is for a plan with loans, but this plan has none: leave it out")
    engines = []
    for file, log in zip(lenders, traffic, strict=True):
        spec, model, hardware = load_lender(file, lambda note: tell_notes([note], err=True))
        engines.append(TenantEngine(spec, model.name, hardware, log.name, read_traffic(log), model.parameters))
    serving = {}
    for lender in plan.of_cluster.lenders:
        assert isinstance(lender, Lender)
        wanted = lender.certificates[0]
        found = [it for it in engines if (it.model, it.hardware) == (wanted.model, wanted.hardware)]
        if len(found) == 1:
            serving[lender.pool] = found[0]
        elif any(loan.pool == lender.pool for loan in plan.loans):
            raise ValueError(
                f"--lender: {len(found)} files describe {wanted.model} on {wanted.hardware}, the engine of pool"
                f" {lender.pool}: give one"
            )
    return replace(tenancy_of(plan, serving, RecallPolicy(), quota=kv_quota), watched=watched)
