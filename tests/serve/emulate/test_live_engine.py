"""What happens to live requests is what the simulator says of requests that arrive at the same ticks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from virtual_time import run

from libra.serve.emulate.live_engine import LiveEngine, WallClock
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Chain, Request

CONFIG = EngineConfig(
    max_model_len=400, kv_blocks=60, block_size=8, max_num_seqs=4, max_num_batched_tokens=64, policy="priority"
)
COST = AffineCost(2 * 10**9, 10**8, 10**4, 10**7)  # 2 ms, and so on: whole multiples of 10 ns
SPEC = EngineSpec("e", CONFIG, COST)


@dataclass(frozen=True)
class Turn:
    arrival: float  # seconds
    prompt: int
    output: int
    priority: int
    cancelled_after: float | None


_turns = st.lists(
    st.builds(
        Turn,
        # Few different instants, so that many come at once, and just as an iteration ends.
        st.integers(0, 60).map(lambda it: it * 3e-3),
        st.integers(1, 200),
        st.integers(1, 150),
        st.integers(0, 2),
        st.none() | st.integers(0, 40).map(lambda it: it * 5e-3 + 1.005e-6),  # never just as an iteration ends
    ),
    min_size=1,
    max_size=12,
).map(lambda turns: sorted(turns, key=lambda it: it.arrival))


def outcome(request: Request) -> tuple[object, ...]:
    return request.status, request.finish, request.first_token, request.generated, request.preemptions


async def live(spec: EngineSpec, turns: list[Turn], speed: float = 1.0) -> tuple[list[Request], list[float | None]]:
    """The requests, and when those who waited to the end were told."""
    loop = asyncio.get_running_loop()
    engine = LiveEngine(spec, WallClock(loop, speed))

    async def one(turn: Turn) -> tuple[Request, float | None]:
        await asyncio.sleep(turn.arrival / speed)
        request = engine.submit(Chain("c"), turn.prompt, turn.output, turn.priority)
        wait = None if turn.cancelled_after is None else turn.cancelled_after / speed
        try:
            await asyncio.wait_for(engine.finished(request), wait)
        except TimeoutError:
            engine.cancel(request)
            return request, None
        return request, loop.time()

    told = await asyncio.gather(*map(one, turns))
    await asyncio.sleep(60)  # whoever was cancelled has left
    return [request for request, _ in told], [at for _, at in told]


def simulated(spec: EngineSpec, requests: list[Request], cancelled: dict[int, int]) -> list[Request]:
    """The same requests on an engine that is driven from event to event, with every iteration visited."""
    engine = SimEngine(spec.config, spec.cost, exact=True)
    copies = [
        Request(it.number, it.arrival, it.prompt_tokens, it.output_tokens, chain=Chain("c"), priority=it.priority)
        for it in sorted(requests, key=lambda it: it.number)
    ]
    orders = sorted(
        [(it.arrival, 1, it.number) for it in copies] + [(tick, 0, number) for number, tick in cancelled.items()]
    )
    while orders or engine.busy:
        now = min([engine.end] * engine.busy + [tick for tick, _, _ in orders[:1]])
        ended = engine.busy and engine.end == now
        if ended:
            engine.commit()
        came = False
        while orders and orders[0][0] == now:
            _, kind, number = orders.pop(0)
            if kind:
                engine.submit(copies[number], now)
            elif copies[number].status in ("waiting", "running"):
                engine.cancel(copies[number], now)
            else:
                continue  # nobody cancels what has ended, and that is no occasion to plan
            came = True
        if ended or (came and (not engine.busy or engine.open)):
            engine.plan(now)
    return copies


# While nothing runs in one of the stages, a request that was preempted waits, and another's deadline passes that has
# finished.
_PREEMPTED = [
    Turn(0.0, 199, 137, 2, None),
    Turn(0.072, 64, 32, 0, 0.115001005),
    Turn(0.093, 1, 15, 0, None),
    Turn(0.111, 82, 32, 0, None),
    Turn(0.111, 71, 32, 0, None),
    Turn(0.18, 64, 1, 0, None),
]


@settings(deadline=None, max_examples=60)
@example(_PREEMPTED, 2, 0.5)
@given(_turns, st.sampled_from([1, 2]), st.sampled_from([0.5, 1.0, 4.0]))
def test_it_is_the_simulators_engine(turns: list[Turn], stages: int, speed: float) -> None:
    spec = replace(SPEC, config=replace(CONFIG, pipeline_parallel_size=stages))
    requests, told = run(live(spec, turns, speed))
    ticks = {
        request.number: round((turn.arrival + turn.cancelled_after) * 1e12)
        for turn, request in zip(turns, requests, strict=True)
        if turn.cancelled_after is not None
    }
    found = simulated(spec, requests, ticks)
    by_number = {it.number: it for it in requests}
    assert all(it.status in ("finished", "cancelled") for it in requests)
    for copy in found:
        assert outcome(by_number[copy.number])[:2] == outcome(copy)[:2]
        if copy.status == "finished":
            assert outcome(by_number[copy.number]) == outcome(copy)
    for request, at in zip(requests, told, strict=True):
        if at is not None:
            assert request.finish is not None
            assert at * speed == pytest.approx(request.finish / 1e12, abs=1e-6)


class Deaf(WallClock):
    """Whoever wants to be called is not."""

    def soon(self, call: Callable[[], None]) -> asyncio.Handle:
        return self.at(0, call)

    def at(self, tick: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(1e9, lambda: None)


def test_a_late_event_loop_delays_nothing_that_happens() -> None:
    turns = [Turn(0.0, 50, 40, 0, None), Turn(0.01, 30, 60, 0, None), Turn(0.02, 90, 20, 0, None)]

    async def late() -> list[Request]:
        engine = LiveEngine(SPEC, Deaf(asyncio.get_running_loop()))
        requests = []
        for before, after in pairwise([*turns, replace(turns[-1], arrival=9.0)]):
            requests.append(engine.submit(Chain("c"), before.prompt, before.output))
            await asyncio.sleep(after.arrival - before.arrival)
        assert (engine.running, engine.waiting) == (0, 0)  # the first time that it looks
        return requests

    on_time, _ = run(live(SPEC, turns))
    assert [outcome(it) for it in run(late())] == [outcome(it) for it in on_time]


def test_a_stream_tells_of_the_first_token_at_once_and_of_all_in_the_end() -> None:
    async def stream() -> tuple[Request, list[tuple[int, float]]]:
        loop = asyncio.get_running_loop()
        engine = LiveEngine(SPEC, WallClock(loop))
        request = engine.submit(Chain("c"), 60, 100)
        return request, [(tokens, loop.time()) async for tokens in engine.progress(request)]

    request, told = run(stream())
    assert request.first_token is not None and request.finish is not None
    assert told[0] == (1, pytest.approx(request.first_token / 1e12, abs=1e-6))
    assert told[-1] == (100, pytest.approx(request.finish / 1e12, abs=1e-6))
    assert [tokens for tokens, _ in told] == sorted({tokens for tokens, _ in told})
    assert all(after - before < 0.0201 for (_, before), (_, after) in pairwise(told))
    per_token = (request.finish - request.first_token) / 99 / 1e12
    for tokens, at in told:
        assert tokens == pytest.approx(1 + (at - told[0][1]) / per_token, abs=1.5)


def test_a_reader_that_leaves_before_the_first_token_disturbs_nobody() -> None:
    broken: list[dict[str, object]] = []

    async def leave() -> list[Request]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        engine = LiveEngine(SPEC, WallClock(asyncio.get_running_loop()))
        requests = [engine.submit(Chain("c"), 60, 20) for _ in range(2)]

        async def read(request: Request) -> None:
            async for _ in engine.progress(request):
                pass

        readers = [asyncio.create_task(read(request)) for request in requests]
        await asyncio.sleep(1e-4)
        readers[0].cancel()
        await asyncio.sleep(1.0)  # its first token comes, before anybody cancels the request
        assert requests[0].first_token is not None
        engine.cancel(requests[0])
        await readers[1]
        return requests

    assert [it.status for it in run(leave())] == ["finished", "finished"]
    assert not broken


def test_what_no_engine_can_hold_is_refused() -> None:
    async def refuse() -> None:
        LiveEngine(SPEC, WallClock(asyncio.get_running_loop())).submit(Chain("c"), 400, 1)

    with pytest.raises(ValueError, match="leaves no room to generate within max_model_len 400"):
        run(refuse())


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_time_goes_forward(speed: float) -> None:
    async def clock() -> None:
        WallClock(asyncio.get_running_loop(), speed)

    with pytest.raises(ValueError, match=r"speed is .*; give a number above 0"):
        run(clock())


def test_a_closed_engine_tells_waiters_nothing_more() -> None:
    async def main() -> None:
        engine = LiveEngine(SPEC, WallClock(asyncio.get_running_loop()))
        requests = [engine.submit(Chain(f"{number}"), 20, 5) for number in range(2)]
        waiting = [asyncio.ensure_future(anext(engine.progress(it))) for it in requests]
        await asyncio.sleep(0)
        engine.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(it, asyncio.CancelledError) for it in ends)
        await asyncio.sleep(1.0)
        assert engine.running + engine.waiting == 0  # all tokens were due
        for request in requests:
            engine.cancel(request)

    run(main())
