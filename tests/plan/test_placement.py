"""Where groups are placed: what must hold of every placement, and a few that can be looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_problem import problem_of
from tables import by_name

from libra.plan.allocation import Allocation, Bucket
from libra.plan.placement import DeviceGroup, place
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

NODE_SIZES = {8: (1, 2, 4, 8), 6: (1, 2, 6), 12: (1, 2, 4, 12)}
PLACED = settings(max_examples=150, deadline=None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to place on one pool: sizes, by kind."""

    per_node: int
    nodes: int
    replica: int
    replicas: int
    engines: tuple[tuple[int, int], ...]  # (size, how many) of each bucket; the shape's name is its size
    colocated: bool = False

    @property
    def problem(self) -> Problem:
        sizes = sorted({*NODE_SIZES[self.per_node], *(size for size, _ in self.engines)})
        return problem_of(
            pools=(Pool("a", self.nodes, self.per_node),),
            engines=tuple(EngineOption(f"tp{n}", "a", n, 1, 10**6, 0.0, ((1.0,),), (0.0,), (1.0,)) for n in sizes),
            training=(TrainingOption(f"x{self.replica}", "a", self.replica * self.replicas, self.replicas, 1.0, 0.0),),
            peaks=(1,),
            longest_context=10**6,
            colocated=self.colocated,
        )

    @property
    def allocation(self) -> Allocation:
        buckets = tuple(Bucket(f"tp{n}", count, i, i + 1) for i, (n, count) in enumerate(self.engines))
        return Allocation(self.replicas, buckets, f"x{self.replica}")

    def placed(self, current: Sequence[DeviceGroup] = ()) -> tuple[DeviceGroup, ...]:
        return place(self.problem, self.allocation, current)


@st.composite
def fitting(draw: st.DrawFn, per_node: int | None = None, nodes: int | None = None) -> Wanted:
    """Groups that fit by count: sizes that divide each other, and some over several nodes."""
    per_node = draw(st.sampled_from(sorted(NODE_SIZES))) if per_node is None else per_node
    nodes = draw(st.integers(1, 6)) if nodes is None else nodes
    colocated = draw(st.booleans())
    room = per_node * nodes
    whole = [per_node * count for count in range(1, nodes + 1)]
    replica = draw(st.sampled_from([size for size in (*NODE_SIZES[per_node], *whole) if size <= room]))
    replicas = draw(st.integers(1, room // replica))
    left = room if colocated else room - replica * replicas
    engines = []
    while left and len(engines) < 4:
        size = draw(st.sampled_from([size for size in NODE_SIZES[per_node] if size <= left]))
        count = draw(st.integers(1, left // size))
        engines.append((size, count))
        left -= size * count
        if draw(st.booleans()):
            break
    return Wanted(per_node, nodes, replica, replicas, tuple(engines), colocated)


def gpus(groups: Sequence[DeviceGroup]) -> list[tuple[int, int]]:
    return [(node, gpu) for group in groups for node in group.nodes for gpu in group.gpus]


def assert_well_placed(wanted: Wanted, groups: Sequence[DeviceGroup]) -> None:
    # Everything is placed, in the allocation's order.
    assert [(group.role, group.name, group.bucket, group.pool, group.devices) for group in groups] == [
        *[("train", f"x{wanted.replica}", None, "a", wanted.replica)] * wanted.replicas,
        *[
            ("generate", f"tp{size}", bucket, "a", size)
            for bucket, (size, count) in enumerate(wanted.engines)
            for _ in range(count)
        ],
    ]
    # No GPU has two roles at once, and all there are exist.
    for role in ("train", "generate"):
        at_once = gpus([group for group in groups if group.role == role or not wanted.colocated])
        assert not [gpu for gpu, times in Counter(at_once).items() if times > 1]
        assert all(0 <= node < wanted.nodes and 0 <= gpu < wanted.per_node for node, gpu in at_once)
    for group in groups:
        if len(group.nodes) > 1:
            assert group.gpus == tuple(range(wanted.per_node))
            assert group.nodes == tuple(sorted(set(group.nodes)))
        else:
            start = group.gpus[0]
            assert group.gpus == tuple(range(start, start + group.devices))
            assert start % group.devices == 0


@PLACED
@given(fitting())
def test_whatever_fits_by_count_is_placed_on_aligned_gpus_of_its_own(wanted: Wanted) -> None:
    assert_well_placed(wanted, wanted.placed())


@PLACED
@given(fitting(), st.data())
def test_so_it_is_when_something_else_is_there_already(wanted: Wanted, data: st.DataObject) -> None:
    """Whatever ran before, on as many nodes, or more, or fewer, or nodes of another size."""
    before = data.draw(fitting(per_node=data.draw(st.sampled_from([wanted.per_node, 8, 6, 12]))))
    assert_well_placed(wanted, wanted.placed(before.placed()))


@PLACED
@given(fitting())
def test_what_is_placed_stays(wanted: Wanted) -> None:
    groups = wanted.placed()
    assert wanted.placed(groups) == groups
    assert wanted.placed() == groups


@st.composite
def changes(draw: st.DrawFn) -> tuple[Wanted, Wanted]:
    before = draw(fitting())
    after = draw(fitting(before.per_node, before.nodes))
    return before, after


@PLACED
@given(changes())
def test_a_wanted_group_leaves_its_place_only_for_a_larger_one(change: tuple[Wanted, Wanted]) -> None:
    before, after = change
    old = before.placed()
    new = after.placed(old)
    places = Counter((group.kind, group.nodes, group.gpus) for group in new)
    for kind, size in {(group.kind, group.devices) for group in old}:
        there = [group for group in old if (group.kind, group.devices) == (kind, size)]
        count = sum((group.kind, group.devices) == (kind, size) for group in new)
        stayed = sum(places[kind, group.nodes, group.gpus] for group in there)
        # Fewer may stay when larger groups came to where the others were.
        larger = gpus([group for group in new if group.devices > size])
        taken = [group for group in there if set(gpus([group])) & set(larger)]
        if before.colocated == after.colocated:
            assert stayed >= min(count, len(there)) - len(taken)


@PLACED
@given(fitting(), st.data())
def test_stopping_engines_moves_nothing(wanted: Wanted, data: st.DataObject) -> None:
    groups = wanted.placed()
    fewer = tuple((size, data.draw(st.integers(1, count))) for size, count in wanted.engines)
    left = replace(wanted, engines=fewer).placed(groups)
    assert {(group.kind, group.nodes, group.gpus) for group in left} <= {
        (group.kind, group.nodes, group.gpus) for group in groups
    }


# Nodes of eight, two of them, and what is expected to be where: (role, node, GPUs).
LOOKED_AT = [
    (
        "a replica of eight, then engines largest first",
        Wanted(8, 2, 8, 1, ((2, 1), (4, 1), (1, 2))),
        [
            ("train", (0,), (0, 1, 2, 3, 4, 5, 6, 7)),
            ("generate", (1,), (4, 5)),
            ("generate", (1,), (0, 1, 2, 3)),
            ("generate", (1,), (6,)),
            ("generate", (1,), (7,)),
        ],
    ),
    ("a replica of two nodes", Wanted(8, 2, 16, 1, ()), [("train", (0, 1), tuple(range(8)))]),
    ("when colocated both are everywhere", Wanted(6, 1, 6, 1, ((6, 1),), colocated=True),
     [("train", (0,), tuple(range(6))), ("generate", (0,), tuple(range(6)))]),
]  # fmt: skip


@by_name("wanted, places", LOOKED_AT)
def test_placements_to_look_at(wanted: Wanted, places: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
    assert [(group.role, group.nodes, group.gpus) for group in wanted.placed()] == places


def engine(node: int, *gpus: int) -> DeviceGroup:
    return DeviceGroup("generate", f"tp{len(gpus)}", 0, "a", (node,), gpus)


def test_a_larger_group_displaces_as_few_as_it_can() -> None:
    # Three engines on node 0, one on node 1: the replica takes node 1, and that engine moves.
    running = [engine(0, 0), engine(0, 1), engine(0, 2), engine(1, 0)]
    groups = Wanted(8, 2, 8, 1, ((1, 4),)).placed(running)
    assert [(group.nodes, group.gpus) for group in groups] == [
        ((1,), tuple(range(8))),
        ((0,), (0,)),
        ((0,), (1,)),
        ((0,), (2,)),
        ((0,), (3,)),
    ]


def test_engines_move_to_another_bucket_without_moving() -> None:
    before = Wanted(8, 1, 4, 1, ((1, 3),)).placed()
    after = Wanted(8, 1, 4, 1, ((1, 1), (1, 2))).placed(before)
    assert [(group.bucket, group.nodes, group.gpus) for group in after[1:]] == [
        (bucket, group.nodes, group.gpus) for bucket, group in zip((0, 1, 1), before[1:], strict=False)
    ]


def test_groups_of_other_pools_are_not_in_the_way() -> None:
    wanted = Wanted(8, 1, 8, 1, ())
    other = replace(engine(0, 0), pool="b", name="tp1")
    assert wanted.placed([other]) == wanted.placed()


def test_pools_are_placed_apart() -> None:
    base = Wanted(8, 1, 8, 1, ((1, 8),)).problem
    problem = replace(
        base,
        pools=(*base.pools, Pool("b", 1, 2)),
        engines=(EngineOption("b/tp1", "b", 1, 1, 10**6, 0.0, ((1.0,),), (0.0,), (1.0,)),),
    )
    groups = place(problem, Allocation(1, (Bucket("b/tp1", 2, 0, 1),), "x8"))
    assert [(group.pool, group.nodes, group.gpus) for group in groups] == [
        ("a", (0,), tuple(range(8))),
        ("b", (0,), (0,)),
        ("b", (0,), (1,)),
    ]


REFUSED = [
    ("a size that leaves gaps", Wanted(8, 1, 3, 1, ()),
     "x3 takes 3 devices; nodes of a have 8: give sizes that divide a node"),
    ("more than a node, less than two", Wanted(8, 2, 12, 1, ()), "x12 takes 12 devices; nodes of a have 8"),
    ("too many engines", Wanted(8, 1, 4, 1, ((4, 2),)), "pool a has no room for a group of 4; the allocation does not"),
    ("too many nodes", Wanted(8, 1, 16, 1, ()), "pool a has no 2 nodes left; the allocation does not fit"),
]  # fmt: skip


@by_name("wanted, message", REFUSED)
def test_what_cannot_be_placed_is_refused(wanted: Wanted, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wanted.placed()


def test_a_layout_that_is_not_on_the_menu_is_refused() -> None:
    wanted = Wanted(8, 1, 4, 1, ((4, 1),))
    with pytest.raises(ValueError, match="no option trains 2 replicas as 'x4'; plan again"):
        place(wanted.problem, replace(wanted.allocation, replicas=2))
