"""KV that is pushed: the order of events, who waits for what, and what becomes of requests when it goes wrong.

That nothing is lost by engines of every kind, and that visiting every iteration makes no difference, is asked in
`test_conservation`, where every other network pushes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from libra.route.catalogue import policy_named
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec, FailurePolicy
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Chain, Request
from libra.sim.kv_network import KVNetwork
from libra.sim.workload.requests import Requests

TEN = AffineCost(10)  # ticks for any iteration
CONFIG = EngineConfig(max_model_len=64, kv_blocks=32, block_size=4, max_num_seqs=4)
SMALL = replace(CONFIG, max_num_batched_tokens=16)
RESERVING = replace(CONFIG, num_reserved_decode_tokens=8)
PUSH = KVNetwork(bandwidth=float(TICKS), push=True)  # a byte a tick
Deed = tuple[int, Callable[[SimCluster], object]]


class Told(Requests):
    """An open loop that counts how often it was told of each end."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(lambda: requests, {})
        self.ends: Counter[int] = Counter()

    def finished(self, request: Request, now: int) -> None:
        self.ends[request.number] += 1


def pushed(
    requests: Sequence[Request],
    *at: Deed,
    decode: EngineConfig = RESERVING,
    prefill: EngineConfig = CONFIG,
    prefills: int = 1,
    decodes: int = 1,
    transfer: KVNetwork = PUSH,
) -> tuple[SimCluster, list[Iteration]]:
    """Engines P0.. that compute prompts, D0.. that go on, and what is done to them at some ticks."""
    specs = [EngineSpec(f"P{number}", prefill, TEN, role=PREFILL) for number in range(prefills)]
    specs += [EngineSpec(f"D{number}", decode, TEN, role=DECODE, kv_bytes=1.0) for number in range(decodes)]
    iterations: list[Iteration] = []
    workload = Told(requests)
    cluster = SimCluster(
        specs,
        workload,
        policy_named("round-robin"),
        kv_transfer=transfer,
        decode_route=policy_named("round-robin"),
        trace=iterations.append,
    )
    for tick, deed in at:
        cluster.at(tick, lambda _, deed=deed: deed(cluster))  # type: ignore[misc]
    cluster.run()
    stopped = sum(request.status == "interrupted" for request in cluster.requests)
    assert set(workload.ends.values()) <= {1} and len(workload.ends) == len(cluster.requests) - stopped
    assert cluster.pairs is not None and cluster.pairs.idle
    for engine in cluster.engines:
        assert engine.closed or engine.pool.held == engine.load_tokens == 0
    return cluster, iterations


def breaks(name: str) -> Callable[[SimCluster], object]:
    def deed(cluster: SimCluster) -> None:
        engine = next(it.engine for it in cluster.instances if it.id == name)
        assert cluster.pairs is not None
        cluster.pairs.fail(cluster.engines[engine.index], cluster.now)

    return deed


def told(it: Iteration) -> str:
    words = " ".join(f"{number}+{tokens}" for number, tokens in it.scheduled)
    return f"{'PD'[it.engine]} {it.start}-{it.end} {words} free {it.free_blocks}"


def test_a_trace_to_follow() -> None:
    """Blocks are reserved at once; with the KV of 8 tokens the first one comes, at 26 for both share the links."""
    requests = [Request(0, 0, 8, 3), Request(1, 0, 8, 1), Request(2, 30, 20, 2)]
    cluster, iterations = pushed(requests)
    assert [told(it) for it in sorted(iterations, key=lambda it: (it.start, -it.engine))] == [
        "P 0-10 0+8 1+8 free 28",
        "D 26-36 0+1 free 29",  # of 1, whose only token came with its KV, nothing is left
        "D 36-46 0+1 free 24",  # 2 came at 30, and has its blocks from here on
        "P 36-46 2+20 free 27",
        "D 66-76 2+1 free 26",  # 20 bytes after 46
    ]
    assert [(it.scheduled, it.prefill_end, it.first_token, it.finish) for it in requests] == [
        (0, 10, 26, 46),
        (0, 10, 26, 26),
        (36, 46, 66, 76),
    ]
    pairs = cluster.pairs
    assert pairs is not None
    assert [(it.reserved, it.computed, it.begun, it.came, it.released) for it in pairs.handed_over] == [
        (0, 10, 10, 26, 26),
        (0, 10, 10, 26, 26),
        (36, 46, 46, 66, 66),
    ]


def test_a_prompt_waits_for_blocks_before_it_is_computed() -> None:
    """Of 16 blocks 0 reserves 10, and 4 more are left free for its tokens and those of 1, which needs 5. It comes when
    0 has generated three tokens and gone, at 70."""
    requests = [Request(0, 0, 40, 3), Request(1, 0, 20, 3)]
    decode = replace(RESERVING, kv_blocks=18)
    cluster, iterations = pushed(requests, decode=decode)
    assert [(it.start, it.scheduled) for it in iterations if it.engine == 0] == [(0, ((0, 40),)), (70, ((1, 20),))]
    assert requests[0].finish == 70
    pairs = cluster.pairs
    assert pairs is not None and [it.reserved for it in pairs.handed_over] == [0, 70]


def test_what_the_decode_engine_has_is_not_sent() -> None:
    prompt = Chain("prompt")
    requests = [Request(number, 100 * number, 8, 2, chain=Chain(f"s{number}", prompt, 8)) for number in range(2)]
    cluster, _ = pushed(requests)
    assert cluster.pairs is not None and cluster.pairs.transferred_bytes == 8 + 4  # the last block always is


def test_what_came_with_an_only_token_is_found_by_others() -> None:
    prompt = Chain("prompt")
    requests = [Request(0, 0, 8, 1, chain=Chain("a", prompt, 8)), Request(1, 100, 9, 1, chain=Chain("b", prompt, 8))]
    cluster, _ = pushed(requests)
    assert cluster.pairs is not None and cluster.pairs.transferred_bytes == 8 + 4


@pytest.mark.parametrize(
    ("cancel_at", "scheduled", "sent"),
    [
        (5, 1, 0),  # its prompt is being computed: it is to the end of the iteration, and not sent
        (15, 1, 32),  # it is being sent: it is to the end
        (60, 2, 32),  # it generates
    ],
)
def test_who_is_given_up_leaves_nothing(cancel_at: int, scheduled: int, sent: int) -> None:
    request = Request(0, 0, 32, 9, cancel_at=cancel_at)
    cluster, iterations = pushed([request])
    assert request.status == "cancelled"
    assert len({it.engine for it in iterations}) == scheduled
    assert cluster.pairs is not None and cluster.pairs.moved_bytes == (sent, sent)


def test_who_is_given_up_while_it_waits_for_blocks_is_never_computed() -> None:
    requests = [Request(0, 0, 40, 9), Request(1, 0, 20, 3, cancel_at=30)]
    _, iterations = pushed(requests, decode=replace(RESERVING, kv_blocks=18))
    assert [request.status for request in requests] == ["finished", "cancelled"]
    assert all(number == 0 for it in iterations for number, _ in it.scheduled)


def test_a_prompt_starts_anew_where_its_engine_closes() -> None:
    """0 waits at P0 behind the first part of a long prompt; what is left of both, all of it, comes to P1."""
    requests = [Request(0, 0, 60, 3), Request(1, 1, 4, 3), Request(2, 1, 32, 3)]
    cluster, iterations = pushed(requests, (7, lambda it: it.close("P0")), prefills=2, prefill=SMALL)
    assert [it.status for it in cluster.requests] == ["interrupted", "finished", "interrupted", "finished", "finished"]
    assert {it.engine for it in iterations if it.start > 7} == {1, 2}
    assert [it.generated for it in cluster.requests] == [0, 3, 0, 3, 3]


def test_a_prompt_starts_anew_where_its_engine_closes_before_there_are_blocks() -> None:
    requests = [Request(0, 0, 40, 3), Request(1, 0, 20, 3)]
    cluster, iterations = pushed(
        requests, (30, lambda it: it.close("P1")), prefills=2, decode=replace(RESERVING, kv_blocks=18)
    )
    assert [it.status for it in cluster.requests] == ["finished", "interrupted", "finished"]
    assert {it.engine for it in iterations} == {0, 2}


def test_a_prompt_starts_anew_where_the_engine_that_would_go_on_closes() -> None:
    request = Request(0, 0, 32, 3)
    cluster, _ = pushed([request], (20, lambda it: it.close("D0")), decodes=2)
    assert [it.status for it in cluster.requests] == ["interrupted", "finished"]
    assert cluster.pairs is not None
    assert [(it.target, it.sent, it.came) for it in cluster.pairs.handed_over] == [(1, 20, -1), (2, 62, 62)]


@pytest.mark.parametrize("tick", [5, 20])
@pytest.mark.parametrize(("policy", "status"), [("fail", "failed"), ("recompute", "finished")])
def test_an_engine_that_nothing_comes_from(policy: FailurePolicy, status: str, tick: int) -> None:
    """Its prompt is computed, and is not sent; or no further."""
    request = Request(0, 0, 32, 3)
    decode = replace(RESERVING, kv_load_failure_policy=policy)
    _, iterations = pushed([request], (tick, breaks("P0")), decode=decode)
    assert request.status == status
    if policy == "fail":
        assert (request.reason, request.finish) == ("nothing comes from P0", max(10, tick))
    else:
        assert next(it.scheduled for it in iterations if it.engine == 1) == ((0, 32),)


def test_a_policy_is_asked_from_the_second_token_on() -> None:
    """The first one is not of the engine that would be stopped to ask."""
    request = Request(0, 0, 8, 5, ask_at=1)
    cluster, _ = pushed([request])
    assert request.status == "finished" and cluster.engines[1].iterations == 4


def refused(specs: Sequence[EngineSpec], transfer: KVNetwork = PUSH) -> str:
    with pytest.raises(ValueError) as error:
        SimCluster(specs, Requests(lambda: [], {}), kv_transfer=transfer)
    return str(error.value)


def test_engines_that_would_fill_up_are_refused() -> None:
    prefill = EngineSpec("P", CONFIG, TEN, role=PREFILL)
    decode = EngineSpec("D", RESERVING, TEN, role=DECODE, kv_bytes=1.0)
    assert "num_reserved_decode_tokens of D is 0" in refused([prefill, replace(decode, config=CONFIG)])
    assert "accepted only with 2 blocks free for num_reserved_decode_tokens" in refused(
        [prefill, replace(decode, config=replace(RESERVING, kv_blocks=17))]
    )
    with pytest.raises(ValueError, match="num_reserved_decode_tokens is -1"):
        replace(CONFIG, num_reserved_decode_tokens=-1)


def test_a_prompt_that_no_engine_computes_is_refused() -> None:
    request = Request(0, 0, 64, 1)
    pushed([request])
    assert request.status == "refused" and request.reason is not None
