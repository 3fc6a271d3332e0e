"""A prefill and a decode engine on one clock, with a network between them: simulated, and two of vLLM's schedulers.

Invariant: both sides have the same costs of a step and the same network, and every decision is the scheduler's. At a
tick transfers and steps end, requests are cancelled, requests arrive, the next steps are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.fidelity.clocked import ClockedEngine, TierWorker
from benchmarks.fidelity.drafts import with_drafts
from benchmarks.fidelity.pulls import alarms_of
from benchmarks.fidelity.random_workloads import async_case, random_case
from benchmarks.fidelity.tiered import with_tier
from benchmarks.fidelity.vllm_schedule import Step, VllmEngine, name_of
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.engine.state import Iteration
from libra.sim.kv_network import KVNetwork
from libra.sim.link import Network, link
from libra.sim.workload.requests import Requests


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


def random_pair(
    seed: int, *, ahead: bool = False, drafts: bool = False, tier: bool = False
) -> tuple[Pair, tuple[Request, ...]]:
    """The random case of a seed on two engines like its own, which differ in blocks; a link that is quick, or not. With
    `ahead` both schedule asynchronously, or one of them; with `tier` the prefill engine has one."""
    config, requests = async_case(seed) if ahead else random_case(seed)
    if drafts:
        config = with_drafts(config, seed)
    random = Random(seed)
    step, per_token = random.randint(1, 50), random.randint(0, 5)
    if drafts:
        per_token = 0  # a row that the budget cuts costs the simulator as much as a whole one
    for request in requests:
        request.arrival *= step
        if request.cancel_at is not None:
            request.cancel_at *= step
    prefill = replace(config, kv_blocks=config.kv_blocks * random.choice((1, 2)))
    block_ticks = random.choice((1, step, 5 * step))  # that the blocks of a token take
    if ahead:
        both = random.choice(((True, True), (True, True), (True, False), (False, True)))
        prefill, config = (replace(it, async_scheduling=its) for it, its in zip((prefill, config), both, strict=True))
    store = load = 0
    if tier:
        prefill, store, load = with_tier(prefill, Random(f"tier {seed}"), step)
    return Pair(prefill, config, step, per_token, KVNetwork(TICKS / block_ticks), store, load), requests


def vllm_pair(pair: Pair, requests: Sequence[Request]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of the prefill engine, and of the decode engine."""
    worker = TierWorker(pair.store, pair.load) if pair.prefill.kv_tiers else None
    prefill = ClockedEngine(
        VllmEngine(pair.prefill, kv_role="kv_producer"), pair.step, pair.per_token, worker=worker, sends=True
    )
    decode = ClockedEngine(VllmEngine(pair.decode, kv_role="kv_consumer"), pair.step, pair.per_token)
    sides = (prefill, decode)
    whole = {request.number: request for request in requests}
    where: dict[int, ClockedEngine] = {}
    waiting: set[int] = set()  # on the decode engine, until their pull begins
    network, out, into = Network(), link(pair.transfer.bandwidth), link(pair.transfer.bandwidth)
    alarms = alarms_of(requests)
    while alarms or len(network) or any(side.ticks for side in sides):
        coming = [tick for tick in (network.next_end(), *prefill.ticks, *decode.ticks) if tick is not None]
        now = min([*[tick for tick, *_ in alarms[:1]], *coming])
        for key in network.ended(now):
            assert isinstance(key, int)
            decode.done[name_of(key)] = None
            prefill.done[name_of(key)] = None
        handed = prefill.end_step(now)
        decode.end_step(now)
        for number in handed:
            if number in prefill.given_up:
                prefill.done[name_of(number)] = None
                continue
            where[number] = decode
            waiting.add(number)
            decode.engine.add(replace_pull(whole[number]))
        for side in sides:
            side.cancel()
        while alarms and alarms[0][0] <= now:
            _, arrives, number, request = alarms.pop(0)
            if arrives:
                where[number] = prefill
                prefill.engine.add(
                    Request(number, request.arrival, request.prompt_tokens, 1, chain=request.chain,
                            priority=request.priority, keeps=True)
                )  # fmt: skip
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
    return tuple(prefill.steps), tuple(decode.steps)


def simulated_pair(
    pair: Pair, requests: Sequence[Request], *, exact: bool = False
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The same of the simulator."""
    iterations: list[Iteration] = []
    cost = AffineCost(pair.step, per_sequence=pair.per_token, per_new_token=pair.per_token)
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    specs = [
        EngineSpec("prefill", pair.prefill, cost, role=PREFILL),
        EngineSpec("decode", pair.decode, cost, role=DECODE, kv_bytes=1.0),
    ]
    SimCluster(
        specs,
        Requests(lambda: ordered, {}),
        kv_transfer=pair.transfer,
        exact=exact,
        trace=iterations.append,
    ).run()
    told = [
        tuple(
            Step(it.start, it.scheduled, it.preempted, it.cached, (), it.free_blocks)
            for it in iterations
            if it.engine == index
        )
        for index in range(2)
    ]
    return told[0], told[1]


def replace_pull(request: Request) -> Request:
    request.pull = True
    return request
