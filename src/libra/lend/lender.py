"""Serving engines that lend: their certificates, and the expected traffic.

Invariant: every certificate is for the engines' model and hardware, and for an SLO at least as strict as theirs, so all
figures are proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from libra.config.recipe import Recipe
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import NodeClass, ServingPool
from libra.hardware.model import ModelSpec
from libra.lend.certificate import Certificate
from libra.lend.gate import Slo
from libra.lend.lent_engine import LentEngine, lent_options
from libra.lend.loan_terms import LoanTerms
from libra.lend.traffic.forecast import RateForecast
from libra.lengths import TrajectoryClass
from libra.plan.options.menu import Rejected
from libra.plan.problem import EngineOption


@dataclass(frozen=True, slots=True)
class Lender:
    """The engines of one serving pool; its traffic is spread evenly over them. Raises ValueError."""

    pool: str
    model: ModelSpec  # that they serve
    devices: int  # of one engine
    certificates: tuple[Certificate, ...]  # by rising `use`
    rates: tuple[float, ...]  # requests/s that may arrive at one engine in the coming period, equally probable
    period: float  # seconds

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate < math.inf for rate in self.rates):
            raise ValueError(f"rates of {self.pool} are {self.rates}; give one or more rates, 0 or more and finite")
        if self.devices < 1 or not 0 < self.period < math.inf:
            raise ValueError(
                f"{self.pool} has engines of {self.devices} devices and a period of {self.period:g} s; give at least 1"
                " device and a positive period"
            )
        uses = [it.use for it in self.certificates]
        if not uses or any(low >= high for low, high in pairwise(uses)):
            raise ValueError(f"certificates of {self.pool} have use {uses}; give one for each use, in rising order")

    def expecting(self, forecast: RateForecast) -> Lender:
        """The same engines, with a forecast of the request rate of one engine in the coming period."""
        return replace(self, rates=forecast.cases)

    def share(self, certificate: Certificate) -> float:
        """Share of an engine's time that is lent while lending is possible: the harmonic mean over the expected rates,
        since rollout takes 1 / share times as long. 0 if nothing is lent at any rate.
        """
        lent = [share for rate in self.rates if (share := certificate.share_at(rate)) > 0]
        return len(lent) / math.fsum(1 / share for share in lent) if lent else 0.0

    def away(self, certificate: Certificate) -> float:
        """Probability that nothing is lent in the period."""
        return sum(certificate.share_at(rate) == 0 for rate in self.rates) / len(self.rates)

    def recalls(self, certificate: Certificate) -> float:
        """Recalls per second, for independent periods: one for each period that lends before one that does not."""
        away = self.away(certificate)
        return (1 - away) * away / self.period

    def options(
        self,
        model: ModelSpec,
        nodes: NodeClass,
        recipe: Recipe,
        classes: Sequence[TrajectoryClass],
        profile: EngineProfile,
        factors: BatchFactors = BATCH,
    ) -> tuple[tuple[EngineOption, ...], tuple[LentEngine, ...], tuple[Rejected, ...]]:
        """Options of every certificate, the engines of these options, and certificates that lend nothing."""
        return lent_options(model, self, nodes, recipe, classes, profile, factors)


def make_lender(
    pool: ServingPool,
    model: ModelSpec,
    certificates: Sequence[tuple[str, Certificate]],
    rates: Sequence[float],
    period: float,
) -> Lender:
    """Make the lender of a serving pool from its terms. `certificates` are (file name, certificate); `rates` are totals
    over the pool's engines. Raises ValueError that names the key under `lends`.
    """
    terms = pool.lends
    if not isinstance(terms, LoanTerms):
        raise ValueError(f"pool {pool.name} has no lends; add its model and certificates")
    refused = model.tp_refusal(terms.tensor_parallel_size)
    if refused is not None:
        raise ValueError(f"tensor_parallel_size: {model.name}: {refused}")
    hardware = f"{terms.tensor_parallel_size} x {pool.nodes.gpu.name}"
    for name, certificate in certificates:
        mismatch = certificate.mismatch(model.name, hardware, Slo(terms.ttft, terms.tpot), model.parameters)
        if mismatch is not None:
            raise ValueError(f"certificates: {name}: {mismatch}: certify this pool with `libra lend check`")
    ordered = sorted((certificate for _, certificate in certificates), key=lambda it: it.use)
    for low, high in pairwise(ordered):
        if low.use == high.use:
            raise ValueError(f"certificates: two have use {low.use:g}; keep the certificate with the later traffic")
    engines = pool.nodes.devices // terms.tensor_parallel_size
    return Lender(
        pool.name,
        model,
        terms.tensor_parallel_size,
        tuple(ordered),
        tuple(sorted(rate / engines for rate in rates)),
        period,
    )
