"""Checks that a simulation conserves requests, tokens, blocks, bytes and time, no matter what went wrong in it.

Invariant: everything is counted a second time, from the trace, the reports and the final state. No check uses the
counters that it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Chain, Request
from libra.sim.engine.tier_transfers import TierTransfers
from libra.sim.outcome.metrics import metrics_of
from libra.sim.outcome.result import result_of
from libra.sim.workload.replay import Replay
from oracles.faulty_simulation import FaultyCase, Ran

_NEVER = 1 << 80  # tick
_OUTCOME = [
    *map(attrgetter, ("number", "status", "reason", "engine", "arrival", "scheduled", "prefill_end", "first_token")),
    *map(attrgetter, ("finish", "generated", "output_tokens", "cached_tokens", "preemptions")),
]


def require_conserved(case: FaultyCase) -> bool:
    """Raises AssertionError if anything is lost, or if visiting every iteration makes a difference. Returns False if
    the simulator refuses the case with a reason."""
    jumped, visited = case.run(exact=False), case.run(exact=True)
    if jumped is None or visited is None:
        assert jumped is visited
        return False
    for ran in (jumped, visited):
        _requests(ran)
        _milestones(ran.cluster)
        _blocks(ran.cluster)
        _pulls(ran.cluster)
        _iterations(ran)
        _counted(ran.cluster)
        _tiers(ran.cluster)
    told, wanted = _told(jumped), _told(visited)
    for key in wanted:
        assert told[key] == wanted[key], key
    return True


def _told(ran: Ran) -> dict[str, Any]:
    """All results that must not depend on how often engines were visited."""
    cluster = ran.cluster
    told = {
        "end": (cluster.now, cluster.partial),
        "requests": [[of(it) for of in _OUTCOME] for it in cluster.requests],
        "order": [it.number for it in ran.told.ended],
        "engines": [
            (it.closed, it.load_tokens, it.iterations, it.preemptions, it.busy_ticks, it.paused_ticks)
            for it in cluster.engines
        ],
        "placed": [(it.placements, it.migrations, it.migrated_tokens) for it in cluster.frontend.placers],
        "moved": cluster.moved_tokens,
    }
    if cluster.pairs is not None:
        pairs = cluster.pairs
        told["pulls"] = pairs.transfers, pairs.transferred_bytes, pairs.moved_bytes
    if not cluster.partial:  # of the last iterations under way there is what was decided, not what was done
        told["tiers"] = [_in_tiers(it) for it in cluster.engines]
        told["pools"] = [(it.pool.blank, it.pool.findable, it.pool.shared) for it in cluster.engines]
        told["iterations"] = sorted(ran.iterations, key=lambda it: (it.engine, it.start, it.end))
    return told


def _in_tiers(engine: SimEngine) -> list[object]:
    if engine.tiers is None:
        return []
    return [
        (shelf.loads, shelf.loaded, shelf.stored, shelf.cache.held, shelf.cache.idle, _named(shelf.cache.order()))
        for shelf in engine.tiers.transfers.shelves
    ]


def _named(what: Any) -> Any:
    """`what` with contexts replaced by their names."""
    if isinstance(what, Chain):
        return what.name
    if isinstance(what, Request):
        return what.number
    return tuple(map(_named, what)) if isinstance(what, (tuple, list)) else what


# Requests and tokens


def _requests(ran: Ran) -> None:
    """Each request ends once and is reported once. A stopped request continues with all its tokens."""
    cluster, rests = ran.cluster, ran.rests
    requests = cluster.requests
    assert len({it.number for it in requests}) == len(requests)
    told = Counter(it.number for it in ran.told.ended)
    assert all(times == 1 for times in told.values()), told.most_common(1)
    there = set(requests)
    for request in requests:
        who = f"request {request.number}, {request.status}"
        assert request.status in ("finished", "cancelled", "interrupted", "refused", "failed", "unfinished"), who
        if request.status in ("refused", "failed", "unfinished"):
            assert request.reason, who
        else:
            assert request.reason is None, who
        assert request.status != "unfinished" or cluster.partial, who
        assert told[request.number] == (request.status not in ("interrupted", "unfinished")), who
        assert (request in rests) == (request.status == "interrupted"), who
        following = rests.get(request)
        if following is not None:
            assert following in there, who
            assert following.chain is request.chain and following.stop == request.stop
            assert following.prompt_tokens == request.prompt_tokens + request.generated, who
            assert 0 <= request.generated < request.output_tokens, who
        if request.status == "finished":
            assert request.generated == request.output_tokens, who
        assert 0 <= request.generated <= max(0, request.output_tokens), who
        assert 0 <= request.cached_tokens <= max(0, request.prompt_tokens) and request.preemptions >= 0, who
        if request.engine is not None and request.generated:
            longest = cluster.specs[request.engine].config.max_model_len
            assert request.prompt_tokens + request.generated <= longest, who
    assert not cluster.frontend.again or cluster.partial
    assert not cluster.frontend.unplaced or cluster.partial
    workload = ran.told.workload
    if isinstance(workload, Replay) and not cluster.partial:
        started = {it.owner.trajectory.id for it in requests}  # type: ignore[union-attr]
        assert workload.completed + len(workload.unfinished) == len(started)


def _milestones(cluster: SimCluster) -> None:
    """The milestones of a request are complete and in order."""
    for it in cluster.requests:
        reached = [it.scheduled, it.prefill_end, it.first_token]
        known = [tick for tick in reached if tick is not None]
        assert reached[: len(known)] == known, it.number
        ticks = [0, it.arrival, *known] if known else [0, it.arrival]
        if it.finish is not None:
            ticks.append(it.finish)
        if it.status != "unfinished":
            assert it.finish is not None, it.number
            ticks.append(cluster.now)
        assert all(before <= after for before, after in pairwise(ticks)), (it.number, it.status, ticks)
        if it.status == "finished":
            assert len(known) == 3, it.number
        if it.status == "cancelled":
            assert it.cancel_at is not None and it.finish is not None and it.finish >= it.cancel_at, it.number
        if it.generated:
            assert it.first_token is not None or it.status == "unfinished", (it.number, it.status)


# Blocks


def _blocks(cluster: SimCluster) -> None:
    """A pool has all its blocks, and no request holds blocks at the end."""
    for engine in cluster.engines:
        pool, name = engine.pool, cluster.specs[engine.index].name
        assert pool.blocks == engine.config.kv_blocks, name
        assert min(pool.blank, pool.findable, pool.shared, pool.held) >= 0, name
        assert pool.blank + pool.findable + pool.held == pool.blocks, name
        free = sum(run.high - run.low for run in pool._free)
        assert free == pool.findable, name
        assert all(not run.holders for run in pool._free), name
        if cluster.partial:
            continue
        assert engine.load_tokens == 0 and not engine.unfinished, name
        assert not engine.leaving and not engine.writers and not engine.partials, name
        if engine.closed:  # its KV for other engines is gone, too
            continue
        assert pool.held == pool.shared == 0, name
        assert all(not run.holders for runs in pool._runs.values() for run in runs), name
        assert not pool.copies.own, name
        assert not (engine.arriving or engine.sending or engine.orphans or engine.ready or engine.notices), name


# Bytes


def _pulls(cluster: SimCluster) -> None:
    """Every transfer was requested, and arrived or was aborted."""
    pairs = cluster.pairs
    if pairs is None:
        return
    sent, received = pairs.moved_bytes
    assert sent == received
    begun = [it for it in pairs.handed_over if it.begun >= 0]
    came = sum(it.size for it in begun if it.came >= 0)
    assert pairs.transferred_bytes == sum(it.size for it in begun)
    assert came <= sent <= sum(it.size for it in begun if it.sent >= 0) <= pairs.transferred_bytes
    assert pairs.transfers == sum(it.came >= 0 for it in begun)
    for it in pairs.handed_over:
        way = [it.computed, it.reserved, it.begun, it.sent, it.came]
        if pairs.settings.push:
            way[:2] = reversed(way[:2])
        reached = [tick for tick in way if tick >= 0]
        assert reached == sorted(reached) == way[: len(reached)], (it.request, way)
        assert pairs.settings.push or (it.computed >= 0 and (it.begun < 0 or it.reserved == it.begun))
        assert it.released < 0 or it.released >= max(reached, default=0)
        assert 0 <= it.size <= it.blocks * _block_bytes(cluster, it.target)
        if not cluster.partial:
            assert it.begun < 0 or it.sent >= 0
            assert it.released >= 0 or it.computed < 0
    if not cluster.partial:
        assert pairs.idle


def _block_bytes(cluster: SimCluster, engine: int) -> float:
    spec = cluster.specs[engine]
    return spec.kv_bytes * spec.config.block_size


def _tiers(cluster: SimCluster) -> None:
    """Tiers hold no more than they have room for. After the last transfer, no chunk is being read or written."""
    transfers = [it.tiers.transfers for it in cluster.engines if it.tiers is not None]
    for it in transfers:
        it.pass_time(cluster.now if cluster.partial else _NEVER)
        assert cluster.partial or not (it._ends or it.coming)
    for it in transfers:
        _shelves(it, transfers, ended=not cluster.partial)


def _shelves(transfers: TierTransfers, all_of_them: Sequence[TierTransfers], *, ended: bool) -> None:
    for shelf in transfers.shelves:
        cache, size = shelf.cache, shelf.chunk_bytes
        assert 0 <= cache.idle <= cache.held <= cache.chunks == shelf.tier.chunks
        assert min(shelf.loads, shelf.loaded, shelf.stored) >= 0
        sharing = [one for it in all_of_them for one in it.shelves if one.cache is cache]
        came = sum(it.stored for it in sharing)
        if shelf is transfers.first:  # loads from other tiers pass through the first tier
            came += sum(other.loaded for it in all_of_them if it.first.cache is cache for other in it.others)
        if ended:
            assert cache.idle == cache.held
            assert cache.held * size <= came


# Time, and what was computed in it


def _iterations(ran: Ran) -> None:
    """No iteration exceeds its limits, and each request computes exactly the tokens that it lacks."""
    cluster = ran.cluster
    computed: dict[tuple[int, int], int] = {}
    by_engine: dict[int, list[Iteration]] = {it.index: [] for it in cluster.engines}
    for it in ran.iterations:
        by_engine[it.engine].append(it)
    for index, iterations in by_engine.items():
        config = cluster.specs[index].config
        iterations.sort(key=lambda it: (it.start, it.end))
        for it in iterations:
            _fits(it, config)
            found = dict(it.cached)
            assert len(found) == len(it.cached) and found.keys() <= dict(it.scheduled).keys()
            for number, tokens in it.scheduled:
                computed[index, number] = found.get(number, computed.get((index, number), 0)) + tokens
        if config.pipeline_parallel_size == 1:
            computing = [it for it in iterations if it.scheduled]
            assert all(one.end <= other.start for one, other in pairwise(computing))
    if cluster.partial:
        return
    for request in cluster.requests:
        if request.status == "finished" and request.engine is not None:
            config = cluster.specs[request.engine].config
            wanted = request.prompt_tokens + request.generated - 1
            if request.generated == 1 and _pushed(cluster, request):
                continue  # the request's only token came with its KV
            _is_computed(computed.get((request.engine, request.number), 0), wanted, config)
    if cluster.pairs is not None:
        for record in cluster.pairs.handed_over:
            request = next(it for it in cluster.requests if it.number == record.request)
            config = cluster.specs[record.source].config
            if record.computed >= 0:
                _is_computed(computed.get((record.source, record.request), 0), request.prompt_tokens, config)


def _pushed(cluster: SimCluster, request: Request) -> bool:
    """Whether the prefill engine pushed the KV of the request's prompt, with the first token."""
    pairs = cluster.pairs
    return (
        pairs is not None
        and pairs.settings.push
        and any(it.request == request.number and it.came >= 0 for it in pairs.handed_over)
    )


def _fits(it: Iteration, config: EngineConfig) -> None:
    assert 0 <= it.start <= it.end
    assert 0 <= it.free_blocks <= config.kv_blocks
    assert len({number for number, _ in it.scheduled}) == len(it.scheduled) <= config.max_num_seqs
    assert all(tokens >= 1 for _, tokens in it.scheduled)
    assert sum(tokens for _, tokens in it.scheduled) <= config.max_num_batched_tokens
    assert all(tokens >= 0 for _, tokens in it.cached)


def _is_computed(tokens: int, wanted: int, config: EngineConfig) -> None:
    if config.speculative is not None:
        assert tokens >= wanted  # drafts that were rejected, too
    else:
        assert wanted <= tokens <= wanted + config.async_scheduling  # one row in vain: a token ended it


def _counted(cluster: SimCluster) -> None:
    """The numbers of the result agree with the requests."""
    result = result_of(cluster)
    found = metrics_of(result)
    statuses = Counter(it.status for it in cluster.requests)
    assert found.requests == len(cluster.requests)
    for status in ("finished", "interrupted", "cancelled", "refused", "failed", "unfinished"):
        assert getattr(found, status) == statuses[status]  # type: ignore[index]
    generated = sum(it.generated for it in cluster.requests if it.status in ("finished", "interrupted"))
    assert found.generated_tokens == generated
    for engine in cluster.engines:
        assert 0 <= engine.busy_ticks <= cluster.now and 0 <= engine.paused_ticks <= cluster.now
        assert 0 <= engine.held_ticks <= 2 * engine.config.kv_blocks * cluster.now
        assert engine.seen <= cluster.now and min(engine.events, engine.iterations, engine.preemptions) >= 0
