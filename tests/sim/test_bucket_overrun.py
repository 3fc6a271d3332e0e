"""Turns that a policy asked to hear of while they run: what it is told, and with which token, when they have moved.

A policy counts from the start of the turn that it placed, an engine from the start of a request, and a turn that moves
is several of those.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic import Places

from libra.cost.transfer import Fabric
from libra.route.baselines import LeastLoaded
from libra.route.bucket import AttainedService
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.handover import KVMoves
from libra.sim.kv_network import KVNetwork
from libra.sim.outcome.metrics import Ending, endings
from libra.sim.outcome.result import result_of
from libra.sim.workload.replay import Replay
from libra.trajectory import Trajectory, Turn

TEN = AffineCost(10)  # ticks for any iteration


def spec_of(name: str, bucket: int = 0, longest: int = 128) -> EngineSpec:
    return EngineSpec(name, EngineConfig(longest, longest // 4, 4, 4, longest), TEN, bucket)


def generating(tokens: int, context: int) -> Replay:
    """One trajectory of one turn."""
    return Replay([Trajectory("0", "p", "t", context, (Turn(tokens, None, None, 0),), None, 0, True)])


class Attained(AttainedService):
    """It remembers what it was asked: context at the turn's start, and tokens generated since."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int]] = []

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.asked.append(("place", request.context_tokens, 0))
        return super().place(request, fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        self.asked.append(("bucket_overrun", request.context_tokens, generated_tokens))
        return super().bucket_overrun(request, generated_tokens, fleet)


@pytest.mark.parametrize("exact", [False, True])
def test_a_turn_moves_with_the_first_token_beyond_each_bucket(exact: bool) -> None:
    limits = (128, 256, 512, 1024)
    policy = Attained()
    cluster = SimCluster(
        [spec_of(name, bucket, 1024) for bucket, name in enumerate("abcd")],
        generating(700, 20),
        policy,
        limits=limits,
        exact=exact,
    )
    cluster.run()
    # 20 + 109 = 129, 129 + 128 = 257, 257 + 256 = 513, and 109 + 128 + 256 + 207 = 700.
    assert [(it.engine, it.prompt_tokens, it.generated, it.status) for it in cluster.requests] == [
        (0, 20, 109, "interrupted"),
        (1, 129, 128, "interrupted"),
        (2, 257, 256, "interrupted"),
        (3, 513, 207, "finished"),
    ]
    stopped = Ending("interrupted", "the policy stopped it; the rest continued elsewhere", 3)
    assert endings(result_of(cluster).requests) == (stopped,)
    overruns = [("bucket_overrun", 20, tokens) for tokens in (109, 237, 493)]
    assert policy.asked == [("place", 20, 0), *overruns]


@pytest.mark.parametrize("exact", [False, True])
def test_a_turn_leaves_the_pair_whose_bucket_it_overruns(exact: bool) -> None:
    """The policy knows the pair by its engine for prompts; the turn is stopped on the other one."""
    policy = Attained()
    cluster = SimCluster(
        [
            replace(spec_of("a", 0, 1024), role=PREFILL),
            replace(spec_of("b", 0, 1024), role=DECODE, kv_bytes=1.0),
            spec_of("c", 1, 1024),
        ],
        generating(700, 20),
        policy,
        limits=(128, 1024),
        exact=exact,
        kv_transfer=KVNetwork(bandwidth=float(TICKS)),
        decode_route=LeastLoaded(),
    )
    cluster.run()
    assert [(it.engine, it.prompt_tokens, it.generated, it.status) for it in cluster.requests] == [
        (1, 20, 109, "interrupted"),
        (2, 129, 591, "finished"),
    ]
    assert policy.asked == [("place", 20, 0), ("bucket_overrun", 20, 109)]


@pytest.mark.parametrize(
    ("close", "generated"),
    [
        (33, 4),  # less than the 19 tokens after which the policy then asks,
        (193, 20),  # and more than the 3
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_turn_whose_engine_closed_is_counted_from_where_it_was_placed_anew(
    close: int, generated: int, exact: bool
) -> None:
    policy = Attained()
    cluster = SimCluster(
        [spec_of("a"), spec_of("b"), spec_of("c", 1), spec_of("d", 2)],
        generating(80, 10),
        policy,
        limits=(32, 64, 128),
        exact=exact,
    )
    cluster.at(close, lambda _: cluster.close("a"))
    cluster.run()
    anew = 10 + generated
    assert [(it.engine, it.prompt_tokens, it.generated, it.status) for it in cluster.requests] == [
        (0, 10, generated, "interrupted"),
        (1, anew, 33 - anew, "interrupted"),
        (2, 33, 32, "interrupted"),
        (3, 65, 25, "finished"),
    ]
    assert policy.asked == [
        ("place", 10, 0),
        ("place", anew, 0),
        ("bucket_overrun", anew, 33 - anew),
        ("bucket_overrun", anew, 65 - anew),
    ]


class EveryFive(Places):
    """It asks after every fifth token, and moves the turn along its list when asked the second time, and the fourth."""

    def __init__(self, places: list[str]) -> None:
        super().__init__({"0": places})
        self.asked: list[tuple[int, int]] = []

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        placement = super().place(request, fleet)
        assert placement is not None
        self.asked.append((request.context_tokens, 0))
        return self._asking(placement.instance, 5)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        self.asked.append((request.context_tokens, generated_tokens))
        moves = generated_tokens in (10, 20) and super().place(request, fleet) is not None
        return self._asking(self._latest["0"], generated_tokens + 5, moves)

    def _asking(self, instance: str, tokens: int, moves: bool = False) -> Placement:
        return Placement(instance, 0, moves, "as listed", ask_again=tokens)


@pytest.mark.parametrize("exact", [False, True])
def test_questions_go_on_where_a_turn_stays_that_moved_before(exact: bool) -> None:
    policy = EveryFive(["a", "b", "c", "a", "b"])
    cluster = SimCluster([spec_of(name) for name in "abc"], generating(40, 8), policy, exact=exact)
    cluster.at(235, lambda _: cluster.close("c"))  # with the 24th token
    cluster.run()
    assert [(it.engine, it.prompt_tokens, it.generated) for it in cluster.requests] == [
        (0, 8, 10),
        (1, 18, 10),
        (2, 28, 4),
        (0, 32, 10),
        (1, 42, 6),
    ]
    assert policy.asked == [
        *((8, generated) for generated in (0, 5, 10, 15, 20)),
        *((32, generated) for generated in (0, 5, 10, 15)),
    ]


class AskingOnce(Places):
    """It wants to hear of the first placement of a later turn, and of no other."""

    def __init__(self, places: list[str]) -> None:
        super().__init__({"0": places})
        self.asked: list[int] = []

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        placement = super().tool_returned(request, returned, fleet)
        assert placement is not None
        return Placement(placement.instance, 0, True, "asks", ask_again=5)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        self.asked.append(generated_tokens)
        return None


@pytest.mark.parametrize(("closes", "asked"), [(False, [5]), (True, [])])
def test_a_question_is_void_with_its_placement(closes: bool, asked: list[int]) -> None:
    """The KV is on its way to `b` when that closes, so the turn is placed again, on `a`."""
    turns = (Turn(8, "search", "ok", 8, 1e-10), Turn(20, None, None, 0))
    policy = AskingOnce(["a", "b", "a"])
    cluster = SimCluster(
        [spec_of("a"), spec_of("b")],
        Replay([Trajectory("0", "p", "t", 40, turns, None, 0, True)]),
        policy,
        kv_moves=KVMoves(
            1.0, Fabric(gpus=8, link=1e15, network=1e15, link_latency=5e-12)
        ),  # a few ticks for what takes an iteration
    )
    if closes:
        # The first turn ends at 80, and its tool returns 100 ticks later.
        cluster.at(182, lambda _: cluster.close("b"))
    cluster.run()
    assert [it.engine for it in cluster.requests] == [0, 0 if closes else 1]
    assert cluster.requests[1].generated == 20
    assert policy.asked == asked
