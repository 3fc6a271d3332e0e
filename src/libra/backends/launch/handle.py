"""The controller's view of a worker: orders over a channel, whose answers can be awaited.

Invariant: when a worker is lost, all its waiting callers get `WorkerLostError` at once; no caller waits for ever or
gets a success. A worker that sends an unexpected message counts as lost, and its later messages are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from libra.backends.devices import CPU
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import FromWorker
from libra.backends.transport.engine_messages import StartEngine, StartServer
from libra.backends.transport.messages import Acknowledged, Failure, Message, Ready, Stop
from libra.backends.transport.trainer_messages import StartTrainer
from libra.exec.background import background
from libra.exec.protocols import WorkerFailedError, WorkerLostError

START_DEADLINE = 120.0  # seconds until a worker is ready
GPU_START_DEADLINE = 600.0  # the same on a GPU: the first start compiles kernels and captures graphs for minutes
ANSWER_DEADLINE = 300.0  # seconds for any other order

# Number of checks without an answer after which a worker counts as lost. Checks are counted, not seconds: a controller
# that was itself stopped, or waited for a disk, checks less often, and then finds an answer that arrived meanwhile.
SILENT_LOOKS = 20

Reply = TypeVar("Reply", bound=Message)


class Handle:
    """A worker that answers each order once, in order. `on_lost` is called once, when the worker is lost."""

    def __init__(self, link: WorkerLink, on_lost: Callable[[str, str], None]) -> None:
        self.name, self.link = link.name, link
        self.node, self.host = link.node, link.host
        self._channel = link.channel
        self._on_lost = on_lost
        # Orders without an answer yet, oldest first. An order with a cancelled caller stays, since its answer still
        # comes.
        self._asked: deque[asyncio.Future[FromWorker | None]] = deque()
        self._order = asyncio.Lock()
        self.lost = False
        self.weight_bytes = 0  # bytes of the weights that a started trainer publishes
        self._stopping = False  # whether the worker was ordered to stop, so that its end is no loss
        self._reader = background(self._read(), f"read {link.name}")

    async def ask(self, message: Message, reply: type[Reply], deadline: float = ANSWER_DEADLINE) -> Reply:
        """Send an order and wait for its answer. Raises `WorkerLostError`, `WorkerFailedError`, `TimeoutError`."""
        async with self._order:
            if self.lost:
                raise WorkerLostError(f"worker {self.name} is gone")
            asked: asyncio.Future[FromWorker | None] = asyncio.get_running_loop().create_future()
            self._asked.append(asked)
            self._channel.send(message)
            for _ in range(SILENT_LOOKS):
                await asyncio.wait([asked], timeout=deadline / SILENT_LOOKS)
                if asked.done():
                    break
            else:
                why = f"no answer to {type(message).__name__} in {deadline:.0f} s"
                self.declare_lost(why)
                raise TimeoutError(f"worker {self.name}: {why}")
            answer = asked.result()
        if answer is None:
            raise WorkerLostError(f"worker {self.name} was lost while it handled {type(message).__name__}")
        if isinstance(answer, Failure):
            raise WorkerFailedError(f"worker {self.name}: {answer.error}")
        if not isinstance(answer, reply):
            raise TypeError(f"worker {self.name} answered {type(message).__name__} with {type(answer).__name__}")
        return answer

    async def start(self, message: StartEngine | StartServer | StartTrainer) -> Ready:
        ready = await self.ask(message, Ready, START_DEADLINE if self.link.device == CPU else GPU_START_DEADLINE)
        self.weight_bytes = ready.buffer_bytes
        return ready

    async def stop(self) -> None:
        """End the worker; no effect if it has ended already."""
        self._stopping = True
        try:
            await self.ask(Stop(), Acknowledged, 10.0)
        except (WorkerLostError, TimeoutError):
            pass
        self.close()

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            self._fail_waiters()
        self._reader.cancel()
        self._channel.close()

    def _receive(self, message: FromWorker) -> None:
        if self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(message)
        elif isinstance(message, Failure):  # its last message before it ends
            self.declare_lost(f"it failed: {message.error}")
        else:
            self.declare_lost(f"it sent {type(message).__name__}, which was not requested")

    def _fail_waiters(self) -> None:
        for asked in self._asked:
            if not asked.done():
                asked.set_result(None)

    async def _read(self) -> None:
        latest: FromWorker | None = None
        try:
            while not self.lost:  # later messages of a lost worker are not answers
                latest = await self._channel.receive()
                self._receive(latest)
        except ConnectionError as error:
            # A worker that fails at an order reports the failure and ends. Its end may be seen before the report.
            self.declare_lost(f"it failed: {latest.error}" if isinstance(latest, Failure) else str(error))
        except msgspec.MsgspecError as error:
            self.declare_lost(f"it sent an unknown message: {error}")

    def declare_lost(self, why: str) -> None:
        """Treat the worker as lost. Reports this once, and not for a worker that was ordered to stop."""
        if self.lost:
            return
        self.lost = True
        self._fail_waiters()
        self._channel.close()  # ends the process if it still runs
        if not self._stopping:
            self._on_lost(self.name, why)
