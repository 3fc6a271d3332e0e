"""A handle, with the test at the worker's end of its socket: every caller gets one answer, or one error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from far_end import PATIENCE, FarEnd, connect, turn, turns

from libra.exec.handles import EngineHandle, Handle, WorkerFailedError, WorkerLostError
from libra.exec.messages import (
    Abort,
    Done,
    Failure,
    Generate,
    Loaded,
    LoadWeights,
    Message,
    Publish,
    Published,
    Ready,
    SaveCheckpoint,
    StartTrainer,
    Stop,
)

START = StartTrainer("/models/tiny", 0, 1e-3, (0.8, 1.28), "tokens", 1.0, 64, 0, 0.45, (0,))


def request(id: str, tokens: int = 3) -> Generate:
    return Generate(id, [5] * tokens, 16, 1.0, 9, 0)


def engine(scenario: Callable[[EngineHandle, FarEnd, list[str]], Awaitable[None]]) -> None:
    """Run a scenario with an engine's handle, its far end, and the names of the workers that were reported lost."""

    async def run() -> None:
        lost: list[str] = []
        handle, far = await connect(EngineHandle, lambda name, why: lost.append(name), "engine")
        try:
            await asyncio.wait_for(scenario(handle, far, lost), PATIENCE)
        finally:
            handle.close()
            far.close()

    asyncio.run(run())


async def rounds(count: int = 5) -> None:
    """Let everything run that can run now."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- orders with one answer ----------------------------------------------------------------------------------------


def test_an_order_gets_its_answer() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        asked = asyncio.create_task(handle.ask(Publish(4, 0), Published))
        assert await far.receive() == Publish(4, 0)
        far.send(Published(4, 77))
        assert await asked == Published(4, 77)

    engine(scenario)


def test_starting_is_an_order_that_ends_in_readiness() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        started = asyncio.create_task(handle.start(START))
        assert await far.receive() == START
        far.send(Ready(1.5))
        assert await started == Ready(1.5)

    engine(scenario)


def test_orders_are_given_one_after_the_other() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        first = asyncio.create_task(handle.ask(Publish(1, 1), Published))
        second = asyncio.create_task(handle.ask(SaveCheckpoint("/x", True), Done))
        assert await far.receive() == Publish(1, 1)
        await rounds()
        assert far.nothing_waits()
        far.send(Published(1, 5))
        assert await first == Published(1, 5)
        assert await far.receive() == SaveCheckpoint("/x", True)
        far.send(Done())
        assert await second == Done()

    engine(scenario)


ANSWERS: list[tuple[Message, type[Exception], str]] = [
    (Done(), TypeError, "worker engine answered Publish with Done"),
    (Failure("the disk is full"), WorkerFailedError, "worker engine: the disk is full"),
    (Failure("gone", peer_lost=True), WorkerFailedError, "worker engine: gone"),
]


@pytest.mark.parametrize(("answer", "error", "message"), ANSWERS)
def test_an_answer_that_is_none(answer: Message, error: type[Exception], message: str) -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        asked = asyncio.create_task(handle.ask(Publish(4, 0), Published))
        await far.receive()
        far.send(answer)
        with pytest.raises(error, match=message) as raised:
            await asked
        if isinstance(answer, Failure) and isinstance(raised.value, WorkerFailedError):
            assert raised.value.peer_lost is answer.peer_lost
        # The worker is alive: the next order is an order like any other.
        again = asyncio.create_task(handle.ask(Publish(5, 1), Published))
        await far.receive()
        far.send(Published(5, 6))
        assert await again == Published(5, 6)
        assert (handle.lost, lost) == (False, [])

    engine(scenario)


def test_no_answer_by_the_deadline() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        with pytest.raises(TimeoutError):
            await handle.ask(Publish(4, 0), Published, deadline=0.0)

    engine(scenario)


# --- generation ----------------------------------------------------------------------------------------------------


def test_generate_resolves_to_its_own_turn() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        first = asyncio.create_task(handle.generate(request("a", tokens=4)))
        second = asyncio.create_task(handle.generate(request("b", tokens=6)))
        assert [await far.receive(), await far.receive()] == [request("a", tokens=4), request("b", tokens=6)]
        assert (handle.running, handle.load_tokens) == (2, 10)
        far.send(turns(turn("b", 7, 9), busy=0.5, iterations=3, generated=2, prefilled=10))
        assert await second == turn("b", 7, 9)
        assert (handle.running, handle.load_tokens) == (1, 4)
        far.send(turns(turn("a", 9), turn("unknown", 1), busy=0.75, iterations=5, generated=4, prefilled=10))
        assert await first == turn("a", 9)
        assert (handle.running, handle.load_tokens) == (0, 0)
        # Counters are the engine's own sums, not added up here; finished turns are counted as they come.
        assert (handle.busy_seconds, handle.iterations) == (0.75, 5)
        assert (handle.generated_tokens, handle.prefilled_tokens, handle.finished_turns) == (4, 10, 3)

    engine(scenario)


def test_a_turn_may_finish_between_an_order_and_its_answer() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        generated = asyncio.create_task(handle.generate(request("a")))
        loaded = asyncio.create_task(handle.load(LoadWeights(3, 1, 99)))
        await far.receive()
        await far.receive()
        far.send(turns(turn("a", 9)))
        far.send(Loaded(3, 0.25))
        assert await generated == turn("a", 9)
        assert await loaded == 0.25
        assert handle.version == 3

    engine(scenario)


def test_a_generation_that_nobody_waits_for_is_aborted() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        generated = asyncio.create_task(handle.generate(request("a")))
        await far.receive()
        generated.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generated
        assert await far.receive() == Abort("a")
        assert (handle.running, handle.load_tokens) == (0, 0)
        far.send(turns(turn("a", 9), iterations=1))  # it had finished already
        other = asyncio.create_task(handle.generate(request("b")))
        await far.receive()
        far.send(turns(turn("b", 9), iterations=2))
        assert await other == turn("b", 9)

    engine(scenario)


def test_drained() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        assert await handle.drained(0.0)
        generated = asyncio.create_task(handle.generate(request("a")))
        await far.receive()
        assert not await handle.drained(0.0)
        draining = asyncio.create_task(handle.drained(PATIENCE))
        far.send(turns(turn("a", 9)))
        assert await draining
        assert await generated == turn("a", 9)

    engine(scenario)


# --- loss and end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "last_words",
    [b"", b"\0\0\0\x10{", b"\0\0\0\x02{}", b"\0\0\0\x04null", b"\0\0\0\x01?", b"\xff\xff\xff\xff"],
    ids=["none", "half a frame", "no message", "null", "not JSON", "an endless frame"],
)
def test_a_lost_worker_fails_everyone_who_waits_for_it(last_words: bytes) -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        first = asyncio.create_task(handle.generate(request("a")))
        second = asyncio.create_task(handle.generate(request("b")))
        asked = asyncio.create_task(handle.ask(Publish(1, 1), Published))
        queued = asyncio.create_task(handle.ask(Publish(2, 0), Published))
        for _ in range(3):
            await far.receive()
        far.send_bytes(last_words)
        if last_words in (b"", b"\0\0\0\x10{"):
            far.close()
        outcomes = await asyncio.gather(first, second, asked, queued, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerLostError] * 4
        assert (handle.lost, handle.running, handle.load_tokens) == (True, 0, 0)
        for late in (handle.generate(request("c")), handle.ask(Publish(3, 1), Published)):
            with pytest.raises(WorkerLostError, match="engine is gone"):
                await late
        await handle.stop()
        await rounds()
        assert lost == ["engine"]

    engine(scenario)


def test_a_lost_worker_is_reported_before_its_waiters_go_on() -> None:
    """Or they would be sent to the lost worker once more, again and again."""

    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        async def reported_when_told() -> list[str]:
            try:
                await handle.generate(request("a"))
            except WorkerLostError:
                pass
            return list(lost)

        waiting = asyncio.create_task(reported_when_told())
        await far.receive()
        far.close()
        assert await waiting == ["engine"]

    engine(scenario)


def test_stopping_is_no_loss() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        stopped = asyncio.create_task(handle.stop())
        assert await far.receive() == Stop()
        far.send(Done())
        far.close()
        await stopped
        await rounds()
        assert (handle.lost, lost) == (True, [])

    engine(scenario)


def test_a_worker_that_goes_away_while_it_is_stopped_is_no_loss() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        stopped = asyncio.create_task(handle.stop())
        await far.receive()
        far.close()
        await stopped
        await rounds()
        assert (handle.lost, lost) == (True, [])

    engine(scenario)


def test_a_turn_that_runs_when_its_engine_is_stopped_is_not_waited_for() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        generated = asyncio.create_task(handle.generate(request("a")))
        await far.receive()
        stopped = asyncio.create_task(handle.stop())
        assert await far.receive() == Stop()
        far.send(Done())
        await stopped
        with pytest.raises(WorkerLostError):
            await generated
        assert lost == []

    engine(scenario)


def test_a_plain_handle_has_answers_only() -> None:
    async def run() -> None:
        handle, far = await connect(Handle, lambda name, why: None, "core-0")
        asked = asyncio.create_task(handle.ask(Publish(1, 1), Published))
        await far.receive()
        far.send(turns(turn("a", 9)))
        with pytest.raises(TypeError, match="worker core-0 answered Publish with Turns"):
            await asked
        handle.close()
        far.close()

    asyncio.run(run())


def test_an_answer_that_is_too_late_is_a_loss_and_not_the_next_orders() -> None:
    async def scenario(handle: EngineHandle, far: FarEnd, lost: list[str]) -> None:
        with pytest.raises(TimeoutError):
            await handle.ask(Publish(1, 1), Published, deadline=0.01)
        assert len(lost) == 1
        with pytest.raises(WorkerLostError):
            await handle.ask(Publish(2, 0), Published)

    engine(scenario)
