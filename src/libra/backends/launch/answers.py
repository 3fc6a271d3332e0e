"""The same question to several workers at once, and who is lost for not answering.

Invariant: everyone who was asked has answered, or is lost, when `ask_all` returns. A worker that hangs keeps its
connection open and answers nothing; it is found by comparison with the others, who had the same to do. One that fails
in what the others can do is lost, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from libra.backends.launch.handles import ANSWER_DEADLINE, SILENT_LOOKS, Handle, WorkerFailedError, WorkerLostError
from libra.backends.transport.messages import Message

Reply = TypeVar("Reply", bound=Message)
_LOST = (WorkerLostError, WorkerFailedError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a replica may take before it is taken for lost.

    Replicas have nearly the same to do, so one that needs `factor` times as long as another, and `floor` seconds on top
    (a loaded operating system may keep a healthy process waiting for some), hangs. Too little patience costs a healthy
    replica, too much only the time in which a broken one holds the others up.
    """

    factor: float = 4.0
    floor: float = 10.0  # seconds
    unknown: float = 60.0  # seconds for a first step, of which nobody knows how long it takes
    grace: float = 2.0  # seconds between answers that come at the same time

    def beside(self, seconds: float) -> float:
        """Seconds for what takes another one `seconds`."""
        return self.factor * seconds + self.floor


STANDARD = Patience()


async def ask_all(
    orders: Sequence[tuple[Handle, Message]],
    reply: type[Reply],
    allowed: Callable[[float], float],
    kill: Callable[[Handle], None],
    deadline: float = ANSWER_DEADLINE,
) -> list[Reply | None]:
    """The answers in the order of the orders; None from a worker that is lost.

    `allowed` gives the seconds that all may take, once the first has answered after so many; `deadline` those until the
    first answer. Who takes longer, or fails, is declared lost and killed.
    """
    began = time.monotonic()
    look, looks = None, SILENT_LOOKS
    tasks = {asyncio.create_task(worker.ask(order, reply, deadline)): worker for worker, order in orders}
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=look, return_when=asyncio.FIRST_COMPLETED)
            if look is None and any(not isinstance(task.exception(), _LOST) for task in done):
                elapsed = time.monotonic() - began
                look = max(0.0, allowed(elapsed) - elapsed) / SILENT_LOOKS
            elif not done:
                looks -= 1
            if not looks:
                for task in waiting:
                    _give_up(tasks[task], "it did not answer while the others did", kill)
                look, looks = None, SILENT_LOOKS
        return [_answer(task, tasks[task], kill) for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _give_up(worker: Handle, why: str, kill: Callable[[Handle], None]) -> None:
    worker.declare_lost(why)
    kill(worker)


def _answer(task: asyncio.Task[Reply], worker: Handle, kill: Callable[[Handle], None]) -> Reply | None:
    match task.exception():
        case None:
            return task.result()
        case WorkerLostError():
            return None
        case TimeoutError():  # the handle has declared it lost
            kill(worker)
            return None
        case WorkerFailedError() as error:
            _give_up(worker, str(error), kill)
            return None
        case error:
            raise error
