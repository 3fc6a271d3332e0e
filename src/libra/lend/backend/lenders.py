"""The launcher of a run that borrows from agents: some of its slots are engines on devices of other users' servers.

Invariant: the run never starts or ends such an engine; it only connects and disconnects. A slot is available while its
agent offers the engine. The launcher queries agents of unavailable slots again and again, and reports each new answer
once. Agents follow the weights that the run publishes; the run does not wait for agents.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from libra.backends.launch.handle import START_DEADLINE, Handle
from libra.backends.launch.launcher import LenderRefusedError, LocalLauncher, RunWeights, WorkerLink
from libra.backends.machine import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import Borrow, Lent, LoadWeights, NotNow, WeightsPlace
from libra.backends.transport.messages import Acknowledged, Failure, Message, Stop
from libra.backends.weights.grid import Grid
from libra.exec.background import background
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.lend.backend.own_socket import trusted_peer
from libra.lend.weights.processes import WeightsProcessError, WeightsPublisher

_LOOK_SECONDS = 1.0  # between two looks at an agent that is away
_ANSWER_SECONDS = 10.0  # for an agent to answer whether its engine is available


class LenderLauncher:
    """`agents` are the agents' sockets by slot; `inner` has all other slots. `wanted` is the run's request for a lent
    engine. Agents follow the run's weights at `place` (host, port; port 0: any free port). `log` is the log of the
    publishing process."""

    def __init__(
        self,
        inner: LocalLauncher,
        agents: Mapping[int, Path],
        wanted: Borrow,
        place: tuple[str, int],
        log: Path,
        say: Callable[[str], None],
    ) -> None:
        self._inner, self._agents, self._wanted, self._place, self._log = inner, agents, wanted, place, log
        self._say = say
        self.slots_changed: Callable[[], None] = lambda: None
        self._there: set[int] = set()
        self._told: dict[int, str] = {}  # reported reason why an agent is unavailable, by slot
        self._links: dict[WorkerLink, int] = {}
        self._published: RunWeights | None = None
        self._publisher: WeightsPublisher | None = None
        self._publishing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def look(self) -> None:
        """Query all agents, and from then on repeat the query of unavailable agents. Raises `LenderRefusedError`."""
        answers = await asyncio.gather(*map(self._ask, self._agents))
        for slot, answer in zip(self._agents, answers, strict=True):
            if isinstance(answer, Failure):
                raise LenderRefusedError(f"{self._agents[slot]}: {answer.error}")
            self._note(slot, answer)
        self._tasks.append(background(self._watch(), "watch lenders"))

    async def join(self, engine: Handle) -> Lent:
        """Borrow the engine of an agent over its spawned link. Raises `LenderRefusedError`, `WorkerLostError`,
        `WorkerFailedError` or `TimeoutError`."""
        assert self._published is not None, "`begin` must set the weights before an engine joins"
        order = msgspec.structs.replace(self._full, weights=await self._publication(self._published))
        try:
            answer = await engine.ask(order, Message, START_DEADLINE)
        except WorkerFailedError as error:
            raise LenderRefusedError(str(error)) from None
        if not isinstance(answer, Lent):
            raise WorkerLostError(answer.why if isinstance(answer, NotNow) else f"the agent answered {answer}")
        self._say(f"{engine.name} borrows beside {answer.model}, up to {answer.certified:.4g} requests/s there")
        return answer

    def begin(self, published: RunWeights) -> None:
        """Set the run's first weights."""
        self._published = published

    def publish(self, order: LoadWeights) -> None:
        """Set the run's later weights, which agents follow."""
        assert self._published is not None
        self._published = RunWeights(self._published.layout, self._published.size, order)
        if self._publisher is not None:
            self._publisher.tell(order)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._publisher is not None:
            await self._publisher.close()

    # Methods of every launcher

    @property
    def hardware(self) -> str:
        return self._inner.hardware

    @property
    def bf16(self) -> Sequence[Bf16Speed]:
        return self._inner.bf16

    def processes(self) -> Sequence[int]:
        return self._inner.processes()

    def offers(self, slot: int) -> bool:
        return slot in self._there if slot in self._agents else self._inner.offers(slot)

    async def ready(self) -> float:
        return await self._inner.ready()

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        """Start a worker. On an agent's slot, connect to the agent, and raise `WorkerLostError` if this fails."""
        if slot not in self._agents:
            return await self._inner.spawn(name, slot)
        try:
            channel, pid = await self._connect(slot)
        except OSError as error:
            raise WorkerLostError(str(error)) from None
        link = WorkerLink(name, pid, channel, (0,), 0, node=str(self._agents[slot]))
        self._links[link] = slot
        return link

    def kill(self, link: WorkerLink) -> None:
        slot = self._links.pop(link, None)
        if slot is None:
            self._inner.kill(link)
            return
        link.channel.close()
        self._there.discard(slot)
        self.slots_changed()  # until the agent answers that the engine is available again

    async def gone(self, link: WorkerLink) -> None:
        if not self._is_lent(link):
            await self._inner.gone(link)

    def exists(self, link: WorkerLink) -> bool:
        return self._is_lent(link) or self._inner.exists(link)

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        await self._inner.bring(weights, size, source, target)

    # Agents

    def _is_lent(self, link: WorkerLink) -> bool:
        return any(link.node == str(agent) for agent in self._agents.values())

    @property
    def _full(self) -> Borrow:
        """The run's request; with the layout of its weights, once weights are published."""
        if self._published is None:
            return self._wanted
        return msgspec.structs.replace(self._wanted, layout=self._published.layout, buffer_bytes=self._published.size)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            away = sorted(self._agents.keys() - self._there)
            for slot, answer in zip(away, await asyncio.gather(*map(self._ask, away)), strict=True):
                self._note(slot, answer)

    async def _ask(self, slot: int) -> Message:
        """Ask an agent whether its engine is available, and disconnect at once."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                channel, _ = await self._connect(slot)
                with contextlib.closing(channel):
                    channel.send(self._full)
                    answer = await channel.receive()
                    if isinstance(answer, Lent):
                        channel.send(Stop())
                        while not isinstance(await channel.receive(), Acknowledged):
                            pass
                    return answer
        except TimeoutError:
            return NotNow(f"the agent did not answer in {_ANSWER_SECONDS:.0f} s")
        except OSError as error:
            return NotNow(f"no agent answers ({error.strerror or error})")
        except msgspec.MsgspecError as error:
            return NotNow(f"the socket is not of an agent of this version of libra: {error}")

    def _note(self, slot: int, answer: Message) -> None:
        if isinstance(answer, Lent):
            self._told.pop(slot, None)
            self._there.add(slot)
            self.slots_changed()
            return
        why = answer.why if isinstance(answer, NotNow) else answer.error if isinstance(answer, Failure) else str(answer)
        if self._told.get(slot) != why:
            self._told[slot] = why
            self._say(f"{self._agents[slot]} lends nothing yet, and is queried again: {why}")

    async def _connect(self, slot: int) -> tuple[ControllerChannel, int]:
        """Connect to an agent. Returns the channel and the agent's process ID. Raises `OSError`, also for an agent of
        another user."""
        reader, writer = await asyncio.open_unix_connection(self._agents[slot])
        try:
            return ControllerChannel(reader, writer), trusted_peer(writer.get_extra_info("socket"))
        except BaseException:
            writer.close()
            raise

    # Weights

    async def _publication(self, published: RunWeights) -> WeightsPlace:
        """Start the publishing process unless it runs. Returns the address at which followers get the weights."""
        async with self._publishing:
            if self._publisher is None:
                grid = Grid.of(published.layout, published.size)
                try:
                    publisher = await WeightsPublisher.open(grid, self._inner.weights, *self._place, self._log)
                except WeightsProcessError as error:
                    raise WorkerFailedError(f"weights cannot be published: {error}") from None
                assert self._published is not None
                publisher.tell(self._published.latest)
                self._publisher = publisher
                self._tasks.append(background(self._outlive(publisher), "watch the publisher"))
            return self._publisher.place

    async def _outlive(self, publisher: WeightsPublisher) -> None:
        """Cut the links to agents when the publisher ends, so that agents reconnect and follow the next publisher."""
        await publisher.ended()
        self._publisher = None
        for link in self._links:
            link.channel.sever("the process that published weights ended")
