"""A prefill and a decode engine on one clock, with a network between them: simulated, and two of vLLM's schedulers.

Invariant: both sides have the same costs of a step and the same network, and every decision is the scheduler's. At a
tick transfers and steps end, requests are cancelled, requests arrive, the next steps are scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from random import Random

from libra.sim.clock import TICKS, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.kv_network import KVNetwork
from libra.sim.link import Network, link
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.clocked import ClockedEngine, TierWorker, alarms_of, simulated_steps
from tests.oracles.fidelity.variants import drawn_case, stretch, with_tier
from tests.oracles.fidelity.vllm_schedule import Step, VllmEngine, name_of


@dataclass(frozen=True, slots=True)
class Pair:
    """A step takes `step + per_token * tokens` ticks."""

    prefill: EngineConfig
    decode: EngineConfig
    step: int
    per_token: int
    transfer: KVNetwork
    store: int = 0  # ticks of a block, where the prefill engine has a tier
    load: int = 0
    fails: Mapping[int, int] = field(default_factory=dict)  # ticks after its begin that a pull is lost, if it goes on


def random_pair(
    seed: int, *, ahead: bool = False, drafts: bool = False, tier: bool = False, fails: bool = False
) -> tuple[Pair, tuple[Request, ...]]:
    """The random case of a seed on two engines like its own, which differ in blocks; a link that is quick, or not. With
    `ahead` both schedule asynchronously, or one of them; with `tier` the prefill engine has one; with `fails` some
    pulls are lost on their way, and the lease on KV that is not read ends soon."""
    config, requests = drawn_case(seed, ahead=ahead, drafts=drafts)
    random = Random(seed)
    step, per_token = random.randint(1, 50), random.randint(0, 5)
    if drafts:
        per_token = 0  # a row that the budget cuts costs the simulator as much as a whole one
    stretch(requests, step)
    prefill = replace(config, kv_blocks=config.kv_blocks * random.choice((1, 2)))
    block_ticks = random.choice((1, step, 5 * step))  # that the blocks of a token take
    if ahead:
        both = random.choice(((True, True), (True, True), (True, False), (False, True)))
        prefill, config = (replace(it, async_scheduling=its) for it, its in zip((prefill, config), both, strict=True))
    store = load = 0
    if tier:
        prefill, store, load = with_tier(prefill, Random(f"tier {seed}"), step)
    transfer, lost = KVNetwork(TICKS / block_ticks), {}
    if fails:
        random = Random(f"fails {seed}")
        config = replace(config, kv_load_failure_policy=random.choice(("fail", "recompute")))
        transfer = replace(transfer, lease=random.choice((20, 200)) * step / TICKS)
        share = random.choice((0.1, 0.3, 1.0))
        lost = {
            request.number: random.randint(1, block_ticks * request.prompt_tokens)
            for request in requests
            if random.random() < share
        }
    return Pair(prefill, config, step, per_token, transfer, store, load, lost), requests


def vllm_pair(pair: Pair, requests: Sequence[Request]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of the prefill engine, and of the decode engine."""
    worker = TierWorker(pair.store, pair.load) if pair.prefill.kv_tiers else None
    producer, consumer = VllmEngine(pair.prefill, kv_role="kv_producer"), VllmEngine(pair.decode, kv_role="kv_consumer")
    prefill = ClockedEngine(producer, pair.step, pair.per_token, worker=worker, sends=True)
    sides = prefill, decode = (prefill, ClockedEngine(consumer, pair.step, pair.per_token))
    whole = {request.number: request for request in requests}
    where: dict[int, ClockedEngine] = {}
    waiting: set[int] = set()  # on the decode engine, until their pull begins
    network, out, into = Network(), link(pair.transfer.bandwidth), link(pair.transfer.bandwidth)
    known: dict[int, int] = {}  # tick since which the decode engine says that it needs a prompt's KV
    failing: list[tuple[int, int]] = []  # (tick, request): pulls that are lost then, if they go on
    leases: list[tuple[int, int, int]] = []  # (tick, when it was lost, request): unread KV is released then
    alarms = alarms_of(requests)
    while alarms or leases or len(network) or any(side.ticks for side in sides):
        coming = [tick for tick in (network.next_end(), *prefill.ticks, *decode.ticks) if tick is not None]
        coming += [it[0] for its in (alarms, leases, failing) for it in its[:1]]
        now = min(coming)
        for key in network.ended(now):
            assert isinstance(key, int)
            decode.done[name_of(key)] = prefill.done[name_of(key)] = None
        while leases and leases[0][0] <= now:
            prefill.done[name_of(heappop(leases)[-1])] = None
        while failing and failing[0][0] <= now:
            _, number = heappop(failing)
            if number in network:
                network.drop(number, now)
                decode.done[name_of(number)] = None
                decode.fails |= {name_of(number)}
                heappush(leases, (_lease_end(pair.transfer, known[number], now), now, number))
        handed = prefill.end_step(now)
        decode.end_step(now)
        for number in handed:
            if number in prefill.given_up:
                prefill.done[name_of(number)] = None
                continue
            where[number], known[number], whole[number].pull = decode, now, True
            waiting.add(number)
            decode.engine.add(whole[number])
        for side in sides:
            side.cancel()
        while alarms and alarms[0][0] <= now:
            _, arrives, number, request = alarms.pop(0)
            if arrives:
                where[number], prompt = prefill, (number, request.arrival, request.prompt_tokens)
                prefill.engine.add(Request(*prompt, 1, chain=request.chain, priority=request.priority, keeps=True))
            else:
                where[number].given_up.append(number)
                where[number].cancel()
                if where[number] is decode and number in waiting:
                    waiting.remove(number)
                    prefill.done[name_of(number)] = None
        for side in sides:
            side.hear(now)
            side.begin(now)
        for number in decode.engine.started_pulls():
            waiting.remove(number)
            network.begin(number, out, into, decode.engine.pulled_blocks(number) * pair.decode.block_size, now)
            if number in pair.fails:
                heappush(failing, (now + pair.fails[number], number))
    return tuple(prefill.steps), tuple(decode.steps)


def _lease_end(transfer: KVNetwork, known: int, lost: int) -> int:
    """Tick at which the lease ends on KV that an engine needs from tick `known` until `lost`. It is renewed six times
    in a lease; after a renewal it lasts at least two thirds of a lease."""
    lease = ticks(transfer.lease)
    end = known + lease
    for beat in range(known, lost + 1, lease // 6):
        end = max(end, beat + lease * 2 // 3)
    return end


def simulated_pair(pair: Pair, requests: Sequence[Request]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of both engines in the simulator."""
    iterations: list[Iteration] = []
    cost = AffineCost(pair.step, per_sequence=pair.per_token, per_new_token=pair.per_token)
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    specs = [
        EngineSpec("prefill", pair.prefill, cost, role=PREFILL),
        EngineSpec("decode", pair.decode, cost, role=DECODE, kv_bytes=1.0),
    ]

    def look(engine: SimEngine, now: int) -> None:
        """A pull that begins may be lost on its way: at a tick after all others have ended."""
        for request, _ in engine.pulls:
            if request.number in pair.fails:
                cluster.at(now + pair.fails[request.number], partial(lose, request))

    def lose(request: Request, now: int) -> None:
        assert cluster.pairs is not None
        cluster.at(now, partial(cluster.pairs.fail_pull, request))

    workload, watch = Requests(lambda: ordered, {}), look if pair.fails else None
    cluster = SimCluster(specs, workload, kv_transfer=pair.transfer, trace=iterations.append, watch=watch)
    cluster.run()
    return simulated_steps(iterations, 0), simulated_steps(iterations, 1)
