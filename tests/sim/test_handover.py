"""KV that follows a trajectory: when it moves, what is moved, and what is found where it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from elastic import Places, following
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.cost.transfer import Fabric, kv_move_seconds
from libra.sim.clock import TICKS, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Chain, Request
from libra.sim.handover import KVMoves
from libra.sim.workload.replay import Replay
from libra.trajectory import Trajectory, Turn

CONFIG = EngineConfig(max_model_len=4096, kv_blocks=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
MS = TICKS // 1000
# A millisecond for an iteration, and for each token of a prompt.
SLOW = AffineCost(MS, per_new_token=MS)
LINKS = Fabric(link=1e6, network=8e5, gpus=8, link_latency=0.001, network_latency=0.01)  # bytes/s


def spec_of(name: str, node: str = "a", devices: int = 1) -> EngineSpec:
    return EngineSpec(name, CONFIG, SLOW, node=node, devices=devices)


def holding(index: int, chain: Chain, tokens: int) -> SimEngine:
    """An engine that has the KV of a chain's beginning."""
    engine = SimEngine(CONFIG, SLOW, index)
    engine.adopt(Request(0, 0, tokens + 1, 1, chain=chain), tokens, 0)
    assert engine.cached_tokens(chain, 0) == tokens
    return engine


@pytest.mark.parametrize(
    ("nodes", "devices", "bytes_per_token", "there", "here", "moved", "milliseconds"),
    [
        # A context of 1,000 tokens: what the source has of it, and the target. It is computed at 1 token/ms, and moves
        # in the node at 1,000 bytes/ms, between nodes at 100; each device has such a link.
        (("a", "a"), (1, 1), 100.0, 800, 0, 800, 1 + 80),
        (("a", "b"), (1, 1), 80.0, 800, 0, 800, 10 + 640),
        (("a", "b"), (2, 2), 80.0, 800, 0, 800, 10 + 320),
        (("a", "b"), (2, 1), 80.0, 800, 0, 800, 10 + 640),  # the one with fewer devices bounds it
        (("a", "a"), (1, 1), 100.0, 800, 320, 800, 1 + 48),  # only what is missing
        (("a", "a"), (1, 1), 100.0, 320, 320, None, 0),
        (("a", "a"), (1, 1), 100.0, 320, 800, None, 0),  # there is more at the target
        (("a", "a"), (1, 1), 100.0, 0, 0, None, 0),
        (("a", "b"), (1, 1), 101.0, 800, 0, None, 0),  # slower than to compute it again
        (("a", "a"), (1, 1), 100.0, 16, 0, 16, 2.6),
        (("a", "b"), (1, 1), 80.0, 16, 0, None, 0),  # the network's latency alone takes as long
    ],
)
def test_kv_moves_where_that_is_quicker(
    nodes: tuple[str, str],
    devices: tuple[int, int],
    bytes_per_token: float,
    there: int,
    here: int,
    moved: int | None,
    milliseconds: float,
) -> None:
    chain = Chain("c")
    found = KVMoves(bytes_per_token, LINKS).quicker(
        holding(0, chain, there),
        spec_of("s", nodes[0], devices[0]),
        holding(1, chain, here),
        spec_of("t", nodes[1], devices[1]),
        Request(1, 0, 1000, 10, chain=chain),
        0,
    )
    if moved is None:
        assert found is None
    else:
        assert found is not None
        assert found == (moved, ticks(milliseconds / 1000))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 100), st.integers(0, 100), st.integers(1, 1700), st.floats(1, 2000), st.booleans(), st.integers(1, 4)
)
def test_it_is_quicker_exactly_when_the_seconds_say_so(
    there: int, here: int, context: int, bytes_per_token: float, same_node: bool, devices: int
) -> None:
    """Against the cost of the iterations that would compute it, one after the other."""
    chain = Chain("c")
    source, target = holding(0, chain, 16 * there), holding(1, chain, 16 * here)
    found = KVMoves(bytes_per_token, LINKS).quicker(
        source,
        spec_of("s", "a", devices),
        target,
        spec_of("t", "a" if same_node else "b", devices),
        Request(1, 0, context, 10, chain=chain),
        0,
    )
    usable = (context - 1) // 16 * 16  # a request computes its last token itself
    begin, end = min(16 * here, usable), min(16 * there, usable)
    if end <= begin:
        assert found is None
        return
    again = sum(MS + min(512, end - at) * MS for at in range(begin, end, 512))
    move = ticks(kv_move_seconds(end - begin, bytes_per_token, LINKS, same_node, devices))
    assert (found is not None) == (move < again)
    if found is not None:
        assert found == (end, move)


# In a cluster


def agent(name: str = "0", *, tokens: int = 40, seconds: float = 0.1) -> Trajectory:
    turns = (Turn(tokens, "search", "ok", 100, seconds), Turn(tokens, None, None, 0))
    return Trajectory(name, name, "t", 400, turns, None, 0, True)


@dataclass(frozen=True)
class Served:
    cluster: SimCluster

    def request(self, number: int) -> Request:
        return next(it for it in self.cluster.requests if it.number == number)


def serve(
    places: Sequence[str],
    *,
    moves: KVMoves | None,
    close: tuple[float, str] | None = None,
    updates: Sequence[WeightUpdate] = (),
    cancel: tuple[int, float] | None = None,
    exact: bool = False,
) -> Served:
    """One trajectory on two engines of one node; its turns go where `places` say. Times are milliseconds."""

    class Cancelling(Replay):
        def finished(self, request: Request, now: int) -> Request | None:
            made = super().finished(request, now)
            if made is not None and cancel is not None and made.number == cancel[0]:
                made.cancel_at = round(cancel[1] * MS)
            return made

    cluster = SimCluster(
        [spec_of("s"), spec_of("t")],
        Cancelling([agent()]),
        Places({"0": list(places)}),
        kv_moves=moves,
        updates=updates,
        exact=exact,
    )
    if close is not None:
        cluster.at(round(close[0] * MS), lambda _: cluster.close(close[1]))
    cluster.run()
    return Served(cluster)


MOVES = KVMoves(100.0, LINKS)
FIRST = 401 + 39  # milliseconds of the first turn
CONTEXT = 400 + 40 + 100
HAD = (400 + 39) // 16 * 16  # found of it where it was, after the first turn
MOVE = 1 + HAD / 10  # milliseconds


@pytest.mark.parametrize("exact", [False, True])
def test_moved_kv_is_found_where_it_arrives(exact: bool) -> None:
    served = serve("st", moves=MOVES, exact=exact)
    second = served.request(1)
    assert (second.engine, second.cached_tokens) == (1, HAD)
    placer = served.cluster.placer
    assert (served.cluster.moved_tokens, placer.migrations, placer.migrated_tokens) == (HAD, 1, CONTEXT)
    arrival = FIRST + 100
    assert second.arrival == arrival * MS
    # It waits for its KV, then computes the rest.
    assert second.scheduled == (arrival + MOVE) * MS
    assert second.first_token == (arrival + MOVE + 2 + CONTEXT - HAD - 1) * MS
    assert second.generated == 40


def test_without_moves_all_is_computed_again() -> None:
    served = serve("st", moves=None)
    second = served.request(1)
    assert (second.engine, second.cached_tokens, served.cluster.moved_tokens) == (1, 0, 0)
    assert second.finish is not None and second.finish > (served_finish(serve("st", moves=MOVES)))
    assert second.generated == 40


def served_finish(served: Served) -> int:
    finish = served.request(1).finish
    assert finish is not None
    return finish


def test_a_turn_that_stays_moves_nothing() -> None:
    served = serve("ss", moves=MOVES)
    assert (served.request(1).cached_tokens, served.cluster.moved_tokens) == (HAD, 0)
    assert served.request(1).scheduled == served.request(1).arrival


def test_nothing_moves_from_an_engine_that_was_closed() -> None:
    served = serve("st", moves=MOVES, close=(FIRST + 50, "s"))
    assert (served.request(1).engine, served.request(1).cached_tokens, served.cluster.moved_tokens) == (1, 0, 0)


def test_kv_on_its_way_from_an_engine_that_closes_arrives() -> None:
    served = serve("st", moves=MOVES, close=(FIRST + 100 + MOVE / 2, "s"))
    assert (served.request(1).engine, served.request(1).cached_tokens, served.cluster.moved_tokens) == (1, HAD, HAD)


def test_where_the_target_closes_on_the_way_it_goes_on_where_it_was() -> None:
    """The policy is asked again, and the source still has all of it."""
    served = serve("sts", moves=MOVES, close=(FIRST + 100 + MOVE / 2, "t"))
    second = served.request(1)
    assert (second.engine, second.cached_tokens, second.status) == (0, HAD, "finished")
    assert second.scheduled == (FIRST + 100 + MOVE) * MS  # when the KV would have arrived
    assert served.cluster.moved_tokens == 0
    assert [it.number for it in served.cluster.requests] == [0, 1]


def test_kv_of_older_weights_is_not_taken() -> None:
    refresh = WeightUpdate(round((FIRST + 100 + MOVE / 2) * MS), 0, refresh=True)
    served = serve("st", moves=MOVES, updates=[refresh])
    assert (served.request(1).cached_tokens, served.cluster.moved_tokens) == (0, 0)
    served = serve("st", moves=MOVES, updates=[replace(refresh, refresh=False)])
    assert (served.request(1).cached_tokens, served.cluster.moved_tokens) == (HAD, HAD)


def test_who_is_given_up_on_the_way_never_arrives() -> None:
    served = serve("st", moves=MOVES, cancel=(1, FIRST + 100 + MOVE / 2))
    second = served.request(1)
    assert (second.status, second.engine, second.generated) == ("cancelled", None, 0)
    assert [it.number for it in served.cluster.requests] == [0, 1]
    assert served.cluster.now == (FIRST + 100 + MOVE) * MS


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.floats(1, 900), st.booleans())
def test_moves_change_no_work_and_save_prefill(seed: int, bytes_per_token: float, refresh: bool) -> None:
    """Many trajectories on three engines, placed at random: each generates all its tokens, with moves or without."""
    works = []
    for moves in (None, KVMoves(bytes_per_token, LINKS), KVMoves(bytes_per_token, LINKS)):
        cluster = SimCluster(
            [spec_of("s"), spec_of("t"), spec_of("u", "b")],
            Replay([agent(str(number), tokens=20 + 7 * number, seconds=0.05 * number) for number in range(8)]),
            following(seed, "stu"),
            kv_moves=moves,
            updates=[WeightUpdate(700 * MS, 20 * MS, refresh)],
            exact=len(works) == 2,
        )
        cluster.run()
        requests = sorted(cluster.requests, key=lambda it: it.number)
        works.append([(it.number, it.engine, it.prompt_tokens, it.generated, it.status) for it in requests])
        if moves is None:
            assert cluster.moved_tokens == 0
        else:
            assert 0 <= cluster.moved_tokens <= cluster.placer.migrated_tokens
            ends = [(it.number, it.finish, it.cached_tokens) for it in requests]
            if len(works) == 2:
                jumping = (ends, cluster.moved_tokens)
            else:
                assert jumping == (ends, cluster.moved_tokens)
    assert works[0] == works[1] == works[2]
