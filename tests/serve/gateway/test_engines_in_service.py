"""The engines in service as a policy sees them: what an index of their loads says, a look at all of them says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra.route.loads import IndexedFleet, loads_of
from libra.route.policy import View
from libra.serve.gateway.config import UpstreamSection
from libra.serve.gateway.upstreams import Upstream, Upstreams

LIMITS = (100, 1000)


def section(number: int) -> UpstreamSection:
    length = LIMITS[number % 2]
    return UpstreamSection(name=f"e{number}", url=f"http://e{number}:1", bucket=number % 2, max_model_len=length)


_steps = st.lists(st.tuples(st.sampled_from(["load", "mark", "join", "leave"]), st.integers(0, 9), st.integers(0, 500)))


@given(_steps, st.integers(1, 1200))
def test_the_least_loaded_engines_are_known_after_any_change(steps: list[tuple[str, int, int]], need: int) -> None:
    upstreams = Upstreams([section(number) for number in range(4)], LIMITS)
    for kind, number, amount in steps:
        engine: Upstream | None = upstreams.all.get(f"e{number}")
        if kind == "join" and engine is None:
            upstreams.join(section(number))
        elif engine is not None and kind == "load":
            engine.load_tokens = amount
        elif engine is not None and kind == "mark":
            if amount % 2:
                upstreams.mark_lost(engine, "it is silent")
            else:
                upstreams.mark_healthy(engine)
        elif engine is not None and kind == "leave":
            upstreams.leave(engine)
        fleet = upstreams.fleet(10)
        assert isinstance(fleet, IndexedFleet) and fleet.turn_tokens == 10
        found, all_of_them = loads_of(fleet, need), loads_of(View((), LIMITS, 10), need)
        for each in upstreams.instances:
            assert each.healthy
            if each.capacity_tokens >= need:
                all_of_them.instances += 1
                all_of_them.tokens += each.load_tokens
                all_of_them.offer((each.bucket, each.pace_class, False), each.load_tokens, each)
        assert found == all_of_them


def test_a_turn_avoids_engines_that_refused_it() -> None:
    upstreams = Upstreams([section(number) for number in range(4)], LIMITS)
    engines = list(upstreams.all.values())
    for engine in engines:
        upstreams.mark_healthy(engine)
    left = upstreams.fleet(10, without=engines[:3])
    assert list(left.instances) == engines[3:] and left.limits == LIMITS and left.turn_tokens == 10
    assert list(upstreams.fleet(10).instances) == engines
