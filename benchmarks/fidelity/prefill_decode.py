"""A prefill and a decode engine on one clock, with a network between them: simulated, and two of vLLM's schedulers.

Invariant: both sides have the same costs of a step and the same network, and every decision is the scheduler's. At a
tick transfers and steps end, requests are cancelled, requests arrive, the next steps are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from benchmarks.fidelity.drafts import with_drafts
from benchmarks.fidelity.pulls import alarms_of
from benchmarks.fidelity.random_workloads import async_case, random_case
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


def random_pair(seed: int, *, ahead: bool = False, drafts: bool = False) -> tuple[Pair, tuple[Request, ...]]:
    """The random case of a seed on two engines like its own, which differ in blocks; a link that is quick, or not. With
    `ahead` both schedule asynchronously, or one of them."""
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
    return Pair(prefill, config, step, per_token, KVNetwork(TICKS / block_ticks)), requests


@dataclass(slots=True)
class _Side:
    """One of vLLM's schedulers on the common clock."""

    engine: VllmEngine
    steps: list[Step] = field(default_factory=list)
    began: int = 0
    end: int | None = None  # of the step under way
    after: list[int] = field(default_factory=list)  # ticks of those that are scheduled and have not begun
    given_up: list[int] = field(default_factory=list)  # since the step began: seen when it has ended
    done: dict[str, None] = field(default_factory=dict)  # transfers that ended since it was heard last, in order

    def cancel(self) -> None:
        if self.end is None:
            for number in self.given_up:
                self.engine.cancel(number)
            self.given_up = []


def vllm_pair(pair: Pair, requests: Sequence[Request]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of the prefill engine, and of the decode engine."""
    sides = (
        _Side(VllmEngine(pair.prefill, kv_role="kv_producer")),
        _Side(VllmEngine(pair.decode, kv_role="kv_consumer")),
    )
    prefill, decode = sides
    whole = {request.number: request for request in requests}
    where: dict[int, _Side] = {}
    waiting: set[int] = set()  # on the decode engine, until their pull begins
    network, out, into = Network(), link(pair.transfer.bandwidth), link(pair.transfer.bandwidth)
    alarms = alarms_of(requests)
    while alarms or len(network) or any(side.end is not None for side in sides):
        ends = [tick for tick in (network.next_end(), prefill.end, decode.end) if tick is not None]
        now = min([*[tick for tick, *_ in alarms[:1]], *ends])
        for key in network.ended(now):
            assert isinstance(key, int)
            decode.done[name_of(key)] = None
            prefill.done[name_of(key)] = None
        handed: list[int] = []
        for side in sides:
            handed += _end(side, prefill, now)
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
            if side.end is None and side.done:
                _hear(side, prefill)
        for side in sides:
            _begin(side, pair, now)
            if side is decode:
                for number in side.engine.started_pulls():
                    waiting.remove(number)
                    size = side.engine.pulled_blocks(number) * pair.decode.block_size
                    network.begin(number, out, into, size, now)
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


def _end(side: _Side, prefill: _Side, now: int) -> list[int]:
    """End the step under way if it ends now. Returns the requests whose prompts are computed, to be handed over."""
    if side.end != now:
        return []
    step = side.engine.end_oldest(side.began, _transfers(side, prefill))
    side.end = None
    side.steps.append(replace(step, finished=()))
    return list(step.finished) if side is prefill else []


def _hear(side: _Side, prefill: _Side) -> None:
    side.engine.hear(_transfers(side, prefill))


def _transfers(side: _Side, prefill: _Side) -> KVConnectorOutput:
    """vLLM lets go of blocks as it goes through a set, in no order that means anything: here in that of the ends."""
    done: Any = list(side.done)
    side.done = {}
    return KVConnectorOutput(finished_sending=done) if side is prefill else KVConnectorOutput(finished_recving=done)


def _begin(side: _Side, pair: Pair, now: int) -> None:
    """Begin the step that is scheduled already, and schedule as many more as the engine does: while one is under way it
    waits for that one's end."""
    engine = side.engine
    if side.end is not None:
        return
    while True:
        if side.end is None and side.after:
            ticks = side.after.pop(0)
            side.began = now
            if ticks:
                side.end = now + ticks
            else:
                _end_empty(side, now)
                continue
        if engine.full or not engine.unfinished:
            return
        engine.schedule()
        side.after.append(pair.step + pair.per_token * engine.scheduled_tokens if engine.scheduled_something else 0)
        if side.end is None and side.after == [0]:
            side.after.clear()
            if not _end_empty(side, now):
                return


def _end_empty(side: _Side, now: int) -> bool:
    """End a step that schedules nothing. Returns whether it preempts; then it is told."""
    step = side.engine.end_oldest(now)
    if step.preempted:
        side.steps.append(replace(step, finished=()))
    return bool(step.preempted)
