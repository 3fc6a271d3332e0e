"""A fleet that keeps its loads against one that looks at all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.route.loads import IndexedFleet, instance_of, loads_of
from libra.route.policy import InstanceView, View

LIMITS = (100, 400)
CAPACITIES = (100, 400, 900)


@dataclass(eq=False)
class Engine:
    """A `WatchedInstance`."""

    id: str
    bucket: int
    capacity_tokens: int
    borrowed: bool
    pace_class: int
    load_tokens: int = 0
    token_seconds: float | None = None
    recall_rate: float = 0.0
    prompt_wait_seconds: float = 0.0
    changed: Callable[[], object] = lambda: None

    def watch(self, changed: Callable[[], object]) -> bool:
        if not self.borrowed:
            self.changed = changed
        return not self.borrowed

    def seen(self) -> InstanceView:
        load, pace = self.load_tokens, self.pace_class
        return InstanceView(
            self.id, self.bucket, self.capacity_tokens, load, recall_rate=self.recall_rate, pace_class=pace
        )


ENGINES = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.sampled_from(CAPACITIES), st.booleans(), st.sampled_from([0, 1])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(ENGINES, st.data())
def test_kept_loads_are_those_of_a_look_at_all(kinds: list[tuple[int, int, bool, int]], data: st.DataObject) -> None:
    engines = [Engine(str(number), *kind) for number, kind in enumerate(kinds)]
    fleet = IndexedFleet(tuple(engines), LIMITS, 10)
    for _ in range(data.draw(st.integers(1, 40))):
        engine = data.draw(st.sampled_from(engines))
        engine.load_tokens = data.draw(st.integers(0, 5))  # few, so that there are ties
        engine.changed()
        if engine.borrowed:
            engine.recall_rate = data.draw(st.sampled_from([0.0, 0.1]))
        if data.draw(st.integers(0, 2)):
            continue  # several change between two questions
        needed = data.draw(st.sampled_from([0, 100, 101, 900, 901]))
        found, wanted = fleet.loads(needed), loads_of(View(tuple(it.seen() for it in engines), LIMITS, 10), needed)
        assert (found.instances, found.tokens) == (wanted.instances, wanted.tokens)
        assert {kind: (load, it.id) for kind, (load, it) in found.least.items()} == {
            kind: (load, it.id) for kind, (load, it) in wanted.least.items()
        }
        for bucket in (0, 1):
            theirs = [it for it in engines if it.bucket == bucket and it.capacity_tokens >= needed]
            its = [(it.load_tokens, it.id) for it in theirs if it.recall_rate == 0]
            least = found.least_in(bucket)
            assert (None if least is None else (least[0], least[1].id)) == min(its, default=None)
        assert instance_of(fleet, engine.id) is engine


def test_a_fleet_knows_who_is_not_there() -> None:
    assert instance_of(IndexedFleet((Engine("a", 0, 100, False, 0),), LIMITS, 10), "b") is None
    assert loads_of(IndexedFleet((), LIMITS, 10), 0).instances == 0
