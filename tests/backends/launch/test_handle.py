"""A handle, with the test at the worker's end of its socket: every caller gets one answer, or one error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.far_end import PATIENCE, FarEnd, connect, generated, piece, whole

import libra.backends.vllm.engine_handle
from libra.backends.grpo.membership import Membership, Patience
from libra.backends.launch.handle import SILENT_LOOKS, Handle
from libra.backends.transport.channel import _frame
from libra.backends.transport.engine_messages import (
    Fetched,
    Generate,
    Interrupt,
    KVTransfer,
    Loaded,
    LoadWeights,
    Piece,
    Save,
    Saved,
)
from libra.backends.transport.messages import Acknowledged, Failure, Message, Ready, Stop
from libra.backends.transport.trainer_messages import Publish, Published, SaveCheckpoint, StartTrainer
from libra.backends.vllm.engine_handle import EngineHandle
from libra.exec.protocols import WorkerFailedError, WorkerLostError

START = StartTrainer("/models/tiny", 1e-3, (0.8, 1.28), "tokens", 1.0, 1.0, 64, "bf16", 0, 0.45, (0,))


def request(id: str, tokens: int = 3) -> Generate:
    return Generate(id, [5] * tokens, 16, 1.0, 9, 0)


Engine = tuple[EngineHandle, FarEnd, list[str]]


@pytest.fixture
@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    """An engine's handle, its far end, and the names of the workers that were reported lost."""
    lost: list[str] = []
    handle, far = await connect(EngineHandle, lambda name, why: lost.append(name), "engine")
    try:
        yield handle, far, lost
    finally:
        handle.close()
        far.close()


def made(handle: EngineHandle, asked: Generate) -> asyncio.Task[list[Piece]]:
    """Have a turn made; its pieces, when it ends."""

    async def run() -> list[Piece]:
        pieces: list[Piece] = []
        await handle.generate(asked, pieces.append)
        return pieces

    return asyncio.create_task(run())


def published(handle: Handle, version: int, buffer: int) -> asyncio.Task[Published]:
    """Have a version published."""
    return asyncio.create_task(handle.ask(Publish(version, buffer), Published))


async def rounds(count: int = 5) -> None:
    """Let everything run that can run now."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- orders with one answer ----------------------------------------------------------------------------------------


async def test_an_order_gets_its_answer(engine: Engine) -> None:
    handle, far, _ = engine
    started = asyncio.create_task(handle.start(START))
    assert await far.receive() == START
    far.send(Ready(1.5))
    assert await started == Ready(1.5)


async def test_orders_are_given_one_after_the_other(engine: Engine) -> None:
    handle, far, _ = engine
    first = published(handle, 1, 1)
    second = asyncio.create_task(handle.ask(SaveCheckpoint("/x", True), Acknowledged))
    assert await far.receive() == Publish(1, 1)
    await rounds()
    assert far.nothing_waits()
    far.send(Published(1, 5))
    assert await first == Published(1, 5)
    assert await far.receive() == SaveCheckpoint("/x", True)
    far.send(Acknowledged())
    assert await second == Acknowledged()


ANSWERS: list[tuple[Message, type[Exception], str]] = [
    (Acknowledged(), TypeError, "worker engine answered Publish with Acknowledged"),
    (Failure("the disk is full"), WorkerFailedError, "worker engine: the disk is full"),
]


@pytest.mark.parametrize(("answer", "error", "message"), ANSWERS)
async def test_an_answer_that_is_none(engine: Engine, answer: Message, error: type[Exception], message: str) -> None:
    handle, far, lost = engine
    asked = published(handle, 4, 0)
    await far.receive()
    far.send(answer)
    with pytest.raises(error, match=message):
        await asked
    # The worker is alive: the next order is an order like any other.
    again = published(handle, 5, 1)
    await far.receive()
    far.send(Published(5, 6))
    assert await again == Published(5, 6)
    assert (handle.lost, lost) == (False, [])


async def test_an_answer_that_came_while_the_controller_was_held_up_counts(engine: Engine) -> None:
    handle, far, lost = engine
    asked = asyncio.create_task(handle.ask(Publish(4, 0), Published, deadline=0.2))
    assert await far.receive() == Publish(4, 0)
    far.send(Published(4, 77))
    time.sleep(0.3)  # as in a controller that is stopped
    assert await asked == Published(4, 77)
    assert lost == []


async def test_the_answer_to_an_order_that_nobody_waits_for_any_more_is_dropped(engine: Engine) -> None:
    handle, far, lost = engine
    for version in (1, 2):
        asked = published(handle, version, 0)
        assert await far.receive() == Publish(version, 0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    waiting = asyncio.create_task(handle.ask(SaveCheckpoint("/x", True), Acknowledged))
    assert await far.receive() == SaveCheckpoint("/x", True)
    for answer in (Published(1, 5), Failure("the disk is full"), Acknowledged()):
        far.send(answer)
    assert await waiting == Acknowledged()
    assert (handle.lost, lost) == (False, [])


async def test_who_is_cancelled_as_the_answer_comes_is_cancelled(engine: Engine) -> None:
    handle, far, _ = engine
    asked = published(handle, 1, 1)
    await far.receive()
    handle._receive(Published(1, 5))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_an_order_that_is_cancelled_before_it_is_sent_has_no_answer(engine: Engine) -> None:
    handle, far, _ = engine
    first = published(handle, 1, 1)
    second = published(handle, 2, 0)
    third = published(handle, 3, 1)
    assert await far.receive() == Publish(1, 1)
    second.cancel()
    far.send(Published(1, 5))
    assert await first == Published(1, 5)
    assert await far.receive() == Publish(3, 1)
    far.send(Published(3, 7))
    assert await third == Published(3, 7)


async def test_a_loss_reaches_who_waits_behind_an_order_that_was_cancelled(engine: Engine) -> None:
    handle, far, lost = engine
    asked = published(handle, 1, 1)
    await far.receive()
    asked.cancel()
    waiting = published(handle, 2, 0)
    await far.receive()
    far.close()
    with pytest.raises(WorkerLostError, match="was lost while it handled Publish"):
        await waiting
    assert lost == ["engine"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (Failure("KeyError: 7"), "it failed: KeyError: 7"),
        (Acknowledged(), "it sent Acknowledged, which was not requested"),
    ],
)
async def test_words_that_are_no_answer_are_the_reason_for_the_loss(words: Message, reason: str) -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    handle, far = await connect(Handle, lambda name, why: reasons.put_nowait(why))
    far.send(words)
    assert await asyncio.wait_for(reasons.get(), PATIENCE) == reason
    handle.close()
    far.close()


async def test_who_fails_at_an_order_and_ends_is_lost_for_that_reason_whoever_hears_of_it_first() -> None:
    reasons: list[str] = []
    handle, far = await connect(Handle, lambda name, why: reasons.append(why))
    asked = published(handle, 1, 1)
    await far.receive()
    far.send(Failure("KeyError: 7"))
    far.close()
    with pytest.raises(WorkerFailedError, match="KeyError: 7"):
        await asked
    while not handle.lost:
        await asyncio.sleep(0)
    assert reasons == ["it failed: KeyError: 7"]
    handle.close()


# --- generation ----------------------------------------------------------------------------------------------------


async def test_a_turn_gets_its_own_pieces_as_they_come(engine: Engine) -> None:
    handle, far, _ = engine
    first, second = made(handle, request("a", tokens=4)), made(handle, request("b", tokens=6))
    assert [await far.receive(), await far.receive()] == [request("a", tokens=4), request("b", tokens=6)]
    assert (handle.running, handle.work.load_tokens) == (2, 10)
    far.send(generated(piece("a", 3), piece("b", 7, 9), ended=["b"], busy=0.5, iterations=3, tokens=3, prefilled=10))
    assert await second == [piece("b", 7, 9)]
    assert (handle.running, handle.work.load_tokens) == (1, 4)
    far.send(
        generated(
            piece("a", 4),
            piece("a", 9, version=1),
            piece("unknown", 1),
            ended=["a", "unknown"],
            busy=0.75,
            iterations=5,
            tokens=6,
            prefilled=10,
        )
    )
    assert await first == [piece("a", 3), piece("a", 4), piece("a", 9, version=1)]
    assert (handle.running, handle.work.load_tokens) == (0, 0)
    # Counters are the engine's own sums, not added up here; finished turns are counted as they come.
    assert (handle.busy_seconds, handle.iterations) == (0.75, 5)
    assert (handle.generated_tokens, handle.prefilled_tokens, handle.finished_turns) == (6, 10, 3)


async def test_a_turn_may_end_between_an_order_and_its_answer(engine: Engine) -> None:
    handle, far, _ = engine
    turn = made(handle, request("a"))
    await rounds()
    loaded = asyncio.create_task(handle.load(LoadWeights(3, 1, 99)))
    await far.receive()
    await far.receive()
    far.send(whole("a", 9))
    far.send(Loaded(3, 0.25))
    assert await turn == [piece("a", 9)]
    assert await loaded == 0.25
    assert handle.version == 3


async def test_a_turn_that_is_interrupted_ends_with_what_it_has(engine: Engine) -> None:
    handle, far, _ = engine
    turn = made(handle, request("a"))
    await far.receive()
    handle.interrupt("a")
    assert await far.receive() == Interrupt("a")
    assert not turn.done()
    far.send(whole("a", 3, 4))
    assert await turn == [piece("a", 3, 4)]


async def test_a_turn_that_nobody_waits_for_is_interrupted(engine: Engine) -> None:
    handle, far, _ = engine
    turn = made(handle, request("a"))
    await far.receive()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert await far.receive() == Interrupt("a")
    assert (handle.running, handle.work.load_tokens) == (0, 0)
    far.send(whole("a", 9))  # it had ended already
    other = made(handle, request("b"))
    await far.receive()
    far.send(whole("b", 9))
    assert await other == [piece("b", 9)]


async def test_drained(engine: Engine) -> None:
    handle, far, _ = engine
    assert await handle.drained(0.0)
    turn = made(handle, request("a"))
    await far.receive()
    assert not await handle.drained(0.0)
    draining = asyncio.create_task(handle.drained(PATIENCE))
    far.send(whole("a", 9))
    assert await draining
    assert await turn == [piece("a", 9)]


# --- loss and end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "last_words",
    [b"", b"\0\0\0\x10{", b"\0\0\0\x02{}", b"\0\0\0\x04null", b"\0\0\0\x01?", b"\xff\xff\xff\xff"],
    ids=["none", "half a frame", "no message", "null", "not JSON", "an endless frame"],
)
async def test_a_lost_worker_fails_everyone_who_waits_for_it(engine: Engine, last_words: bytes) -> None:
    handle, far, lost = engine
    first, second = made(handle, request("a")), made(handle, request("b"))
    asked = published(handle, 1, 1)
    queued = published(handle, 2, 0)
    for _ in range(3):
        await far.receive()
    far.send_bytes(last_words)
    if last_words in (b"", b"\0\0\0\x10{"):
        far.close()
    outcomes = await asyncio.gather(first, second, asked, queued, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkerLostError] * 4
    assert (handle.lost, handle.running, handle.work.load_tokens) == (True, 0, 0)
    for late in (made(handle, request("c")), handle.ask(Publish(3, 1), Published)):
        with pytest.raises(WorkerLostError, match="engine is gone"):
            await late
    assert await handle.fetched(1) is None
    await handle.stop()
    await rounds()
    assert lost == ["engine"]


async def test_a_lost_worker_is_reported_before_its_waiters_go_on(engine: Engine) -> None:
    """Or they would be sent to the lost worker once more, again and again."""
    handle, far, lost = engine

    async def reported_when_told() -> list[str]:
        try:
            await handle.generate(request("a"), lambda piece: None)
        except WorkerLostError:
            pass
        return list(lost)

    waiting = asyncio.create_task(reported_when_told())
    await far.receive()
    far.close()
    assert await waiting == ["engine"]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_worker_that_goes_away_while_it_is_stopped_is_no_loss(engine: Engine, answered: bool) -> None:
    handle, far, lost = engine
    stopped = asyncio.create_task(handle.stop())
    assert await far.receive() == Stop()
    if answered:
        far.send(Acknowledged())
    far.close()
    await stopped
    await rounds()
    assert (handle.lost, lost) == (True, [])


async def test_a_turn_that_runs_when_its_engine_is_stopped_keeps_what_it_has(engine: Engine) -> None:
    handle, far, lost = engine
    pieces: list[Piece] = []
    turn = asyncio.create_task(handle.generate(request("a"), pieces.append))
    await far.receive()
    stopped = asyncio.create_task(handle.stop())
    assert await far.receive() == Stop()
    far.send(generated(piece("a", 3, 4)))
    far.send(Acknowledged())
    await stopped
    with pytest.raises(WorkerLostError):
        await turn
    assert pieces == [piece("a", 3, 4)]
    assert lost == []


async def test_nothing_comes_of_a_turn_after_its_engine_was_given_up(engine: Engine) -> None:
    """It goes on elsewhere from what had come."""
    handle, far, lost = engine
    pieces: list[Piece] = []
    turn = asyncio.create_task(handle.generate(request("a"), pieces.append))
    await far.receive()
    far.send(generated(piece("a", 3)))
    while not pieces:
        await asyncio.sleep(0)
    far.send(generated(piece("a", 4)))  # on its way
    handle.declare_lost("it is too slow")
    with pytest.raises(WorkerLostError):
        await turn
    await rounds()
    assert (pieces, lost) == ([piece("a", 3)], ["engine"])


# --- an engine that hangs ------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another as fast as the loop goes."""
    monkeypatch.setattr(libra.backends.vllm.engine_handle, "LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("looks")
async def test_an_engine_that_says_nothing_of_its_turns_is_lost(engine: Engine) -> None:
    handle, _, lost = engine
    with pytest.raises(WorkerLostError):
        await made(handle, request("a"))
    assert lost == ["engine"]


@pytest.mark.usefixtures("looks")
async def test_an_engine_without_turns_may_be_silent(engine: Engine) -> None:
    handle, _, lost = engine
    await rounds(10 * SILENT_LOOKS)
    assert (handle.lost, lost) == (False, [])


async def test_any_sign_of_life_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, far, _ = engine
    monkeypatch.setattr(libra.backends.vllm.engine_handle, "SILENT_LOOKS", 2)
    look = asyncio.Event()
    slept: asyncio.Queue[None] = asyncio.Queue()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds != libra.backends.vllm.engine_handle.LOOK_SECONDS:
            return await real_sleep(seconds)
        slept.put_nowait(None)
        await look.wait()
        look.clear()

    monkeypatch.setattr(libra.backends.vllm.engine_handle.asyncio, "sleep", sleep)

    async def next_look() -> None:
        look.set()
        await slept.get()

    await slept.get()
    turn = made(handle, request("a"))
    await far.receive()
    await next_look()
    for iterations in range(1, 6):  # without a token: it is about to compute a long prompt
        far.send(generated(iterations=iterations))
        while handle.iterations < iterations:
            await real_sleep(0)
        await next_look()
        await next_look()  # one silent look
    assert not handle.lost
    look.set()
    with pytest.raises(WorkerLostError):
        await turn


@pytest.mark.usefixtures("looks")
async def test_an_engine_that_takes_no_weights_is_lost_and_not_waited_for(engine: Engine) -> None:
    handle, _, lost = engine
    with pytest.raises(WorkerLostError, match="engine did not load weights in time"):
        await handle.load(LoadWeights(3, 1, 99))
    assert lost == ["engine"]


# --- other workers -------------------------------------------------------------------------------------------------


async def test_a_plain_handle_has_answers_only() -> None:
    handle, far = await connect(Handle, lambda name, why: None, "core-0")
    asked = published(handle, 1, 1)
    await far.receive()
    far.send(whole("a", 9))
    with pytest.raises(TypeError, match="worker core-0 answered Publish with Generated"):
        await asked
    handle.close()
    far.close()


async def test_an_answer_that_is_too_late_is_a_loss_and_not_the_next_orders(engine: Engine) -> None:
    handle, _, lost = engine
    with pytest.raises(TimeoutError):
        await handle.ask(Publish(1, 1), Published, deadline=0.01)
    assert len(lost) == 1
    with pytest.raises(WorkerLostError):
        await handle.ask(Publish(2, 0), Published)


# --- KV that is handed over ----------------------------------------------------------------------------------------

TRANSFER = KVTransfer(7, [0, 1])


async def test_what_an_engine_says_after_it_was_given_up_is_dropped(engine: Engine) -> None:
    handle, far, lost = engine
    saving, fetching = handle.save(Save([5] * 32, None, TRANSFER)), handle.fetched(8)
    await far.receive()
    # All of it arrives at once, and the first thing is why it is given up.
    far.send_bytes(b"".join(map(_frame, (Failure("KeyError: 7"), Saved(7, 2), Fetched(8, 16)))))
    assert (await saving, await fetching) == (None, None)
    await asyncio.wait([handle._reader])
    assert handle._reader.exception() is None
    assert lost == ["engine"]


@pytest.mark.parametrize("unasked", [Saved(9, 2), Fetched(9, 16)])
async def test_an_engine_that_tells_of_a_transfer_which_nobody_gave_it_is_lost_and_nobody_else(
    unasked: Message,
) -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    handle, far = await connect(EngineHandle, lambda name, why: reasons.put_nowait(why), "engine")
    try:
        saving = handle.save(Save([5] * 32, None, TRANSFER))
        far.send(unasked)
        why = await asyncio.wait_for(reasons.get(), PATIENCE)
        assert why == f"it sent {type(unasked).__name__} for transfer 9, which it was not given"
        assert await saving is None
    finally:
        handle.close()
        far.close()


async def test_who_answered_while_the_controller_was_held_up_is_not_lost() -> None:
    lost: list[str] = []
    far_ends = [await connect(Handle, lambda name, why: lost.append(name), name) for name in ("a", "b")]
    (first, first_end), (second, second_end) = far_ends
    members = Membership(first, lambda worker: None, Patience(), 0)
    orders = [(first, Publish(1, 0)), (second, Publish(1, 0))]
    asking = asyncio.create_task(members.ask(orders, Published, lambda elapsed: 0.3))
    for _, end in far_ends:
        await end.receive()
    first_end.send(Published(1, 5))
    await asyncio.sleep(0.05)  # the patience with the other begins
    second_end.send(Published(1, 6))
    time.sleep(0.5)  # as in a controller that is stopped
    assert await asyncio.wait_for(asking, PATIENCE) == [Published(1, 5), Published(1, 6)]
    assert lost == []
    for handle, end in far_ends:
        handle.close()
        end.close()
