"""Serving on the devices that a plan borrows.

Invariant: the plan determines the lent engines and their contexts. Serving on their devices determines only the times
at which they may compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from libra.cost.adapters import version_bytes
from libra.cost.engine_memory import BLOCK, held_bytes
from libra.cost.quantization import rollout_quantization
from libra.lend.certificate import Certificate
from libra.lend.gate import Gate, SharingRule
from libra.lend.lent_engine import LentEngine
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.sim.certify import LendingCase
from libra.lend.sim.kv_loan import KVTerms
from libra.lend.sim.lending import Lending
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan
from libra.sim.clock import TICKS, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.messages import Pause
from libra.sim.engine.request import Request
from libra.sim.planned_engines import beside_lent
from libra.sim.workload.requests import RecordedRequest, around


@dataclass(frozen=True, slots=True)
class ServingDevice:
    """A serving device and the terms on which it is shared with a borrower."""

    case: LendingCase
    use: float  # share of `slo.tpot` to which serving may be slowed down
    rule: Callable[[], SharingRule]  # makes a new rule for each run; times are ticks
    share: float  # of the device's time that is expected to be lent
    kv: KVTerms | None = None  # None: the lent engine always has all of its KV memory
    begins: float | None = None  # share of the traffic at which a repeating replay begins; None: one replay, no repeat

    def arrivals(self) -> Iterator[Request]:
        """The requests of the traffic, the same at each call."""
        if self.begins is None:
            return self.case.arrivals(1.0).start()
        return around(self.case.requests, self.begins)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The serving devices of a plan, by the names of the engines that borrow them. A lent engine without an entry in
    `devices` shares its device with nothing, and starts `start` seconds after it was requested."""

    devices: Mapping[str, ServingDevice]
    start: float = 0.0
    weights: float = 0.0  # seconds to send a version to all lent engines
    watched: bool = False  # keep the history of each device, step by step, for display

    def service(self, cluster: SimCluster, load: Pause, *, exact: bool) -> Lending:
        return Lending(self, cluster, load, exact=exact)

    def __post_init__(self) -> None:
        for name in ("start", "weights"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g} s; give 0 or more")


@dataclass(frozen=True, slots=True)
class TenantEngine:
    """The serving engine on each device of a pool; every device gets this traffic."""

    spec: EngineSpec
    model: str
    hardware: str  # of an engine, such as "2 x A100"
    traffic: str  # its source
    requests: tuple[RecordedRequest, ...]
    parameters: int | None = None  # of the model; None: unknown


def tenancy_of(
    plan: Plan, serving: Mapping[str, TenantEngine], recall: RecallPolicy, *, quota: bool = False
) -> Tenancy:
    """Make the tenancy of a plan. A gate, inside its certificate's envelope, shares each borrowed device. `serving` has
    the serving engine of each pool, by name. The traffic of the devices begins at evenly spaced moments of the log.
    Sending a version takes the time of a whole version on the pool's network. With `quota` a lent engine has the KV
    memory that serving currently cedes, up to the plan's amount; without `quota` it always has the plan's amount.

    Raises ValueError if a serving engine is not the certified one, or `serving` lacks a pool.
    """
    lent, request = beside_lent(plan), plan.of_cluster
    version = version_bytes(request.recipe, request.model)
    devices, weights = {}, 0.0
    for number, (name, engine) in enumerate(sorted(lent.items())):
        assert isinstance(engine, LentEngine)
        pool, certificate = engine.lender.pool, engine.certificate
        if pool not in serving:
            raise ValueError(f"the plan borrows from {pool}: give the serving engine of this pool and its traffic")
        here = serving[pool]
        other = certificate.mismatch(here.model, here.hardware, certificate.slo, here.parameters)
        if other is not None:
            raise ValueError(f"{pool}: {other}: give the engine that was certified")
        slo, grant = certificate.slo, certificate.longest_grant
        case = LendingCase(here.spec, here.model, here.hardware, slo, here.traffic, here.requests, grant)
        rule = partial(_watched, certificate, recall)
        kv = _kv_terms(request, engine, here.spec) if quota else None
        devices[name] = ServingDevice(case, certificate.use, rule, engine.share, kv, number / len(lent))
        weights = max(weights, version / request.lending_nodes(engine.lender).inter_bandwidth)
    return Tenancy(devices, weights=weights)


def _kv_terms(request: ClusterRequest, lent: LentEngine, serving: EngineSpec) -> KVTerms:
    """The KV memory of both engines. The serving engine has the memory of its description, with all its KV blocks.
    Raises ValueError if the rest of the device has no room for the rollout engine's weights."""
    model, recipe, tp = request.model, request.recipe, lent.lender.devices
    quantization = rollout_quantization(recipe)
    gpu, batched = request.lending_nodes(lent.lender).gpu, serving.config.max_num_batched_tokens
    held = held_bytes(
        *(model, tp), batched_tokens=lent.batched_tokens, quantization=quantization, switched=gpu.switched
    )
    serves = held_bytes(lent.lender.model, tp, batched_tokens=batched, switched=gpu.switched)
    block = int(serving.kv_bytes * serving.config.block_size)
    memory = gpu.usable * recipe.gpu_memory_utilization
    beside = int(tp * (memory - serves - held)) - serving.config.kv_blocks * block
    if beside < 0:
        raise ValueError(
            f"{lent.lender.pool}: the serving engine leaves {-beside / 1e9:.1f} GB too little for the weights of"
            f" {model.name} beside it: lower its gpu_memory_utilization, or its kv_blocks"
        )
    return KVTerms(
        block, int(quantization.kv_bytes_per_token(model, tp, context=recipe.max_length) * tp * BLOCK), beside
    )


def _watched(certificate: Certificate, recall: RecallPolicy) -> SharingRule:
    gate = Gate(ticks(certificate.longest_grant), 1)
    return WatchedRule(gate, certificate.envelope, Recall(recall), float(TICKS))
