"""The sums over requests that generate, against each request counted by itself."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from libra.sim.engine.generation import Even
from libra.sim.engine.request import Request

SIZE = 4  # tokens of a block


@dataclass
class Counted:
    tokens: int  # that have KV
    generated: int = 0


@given(st.data())
def test_the_sums_are_those_of_the_requests(data: st.DataObject) -> None:
    """Requests come, sit out an iteration, leave, also one that sits out, and all others go on."""
    generation, here = Even(SIZE), dict[Request, Counted]()
    for number in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            request = Request(number, 0, data.draw(st.integers(1, 9)), 100)
            request.target, request.admission = request.prompt_tokens, number
            generation.add(request, request.target)
            here[request] = Counted(request.prompt_tokens)
        some = st.sets(st.sampled_from([*here]), max_size=2) if here else st.just(set())
        assert generation.demand() == sum(counted.tokens % SIZE == 0 for counted in here.values())
        waits, leaves = data.draw(some), data.draw(some)
        generation.stall(set(waits), {})
        for request in leaves:
            # Who sits out has its place in the iteration counted by whoever takes it out.
            tokens = here.pop(request).tokens - (request in waits)
            assert generation.remove(request) == (tokens, tokens)
        generation.advance(1)
        for request, counted in here.items():
            if request not in waits:
                counted.tokens, counted.generated = counted.tokens + 1, counted.generated + 1
            assert generation.computed(request) == counted.tokens
            assert generation.generated(request) == counted.generated
        assert generation.count == len(here)
        assert generation.context == sum(counted.tokens + 1 for counted in here.values())
