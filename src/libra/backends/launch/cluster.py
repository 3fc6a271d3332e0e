"""Worker processes on the nodes of a cluster.

Invariant: a node is present or lost for all of its workers at once, and a lost node has no worker. Another node
replaces it if one is available; until then, its slots are unavailable. Engines load weights only after the checksum
shows that the weights are complete on the engine's node. A node receives each version once for all of its engines, and
the source is read once for all nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra.backends.devices import CPU, SlotDevice
from libra.backends.launch.fork_server import ForkError, LaunchError
from libra.backends.launch.launcher import CopyError, SourceLostError, WorkerLink
from libra.backends.launch.node import NodeFacts, NodeLostError, Nodes, Reception, RemoteNode
from libra.backends.machine import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import WeightUpdateError
from libra.backends.weights.copying import CopyChoice, Way
from libra.exec.background import background
from libra.exec.pool import LOSS_WINDOW, with_loss

_ARRIVAL_SECONDS = 30.0  # from a fork to the worker's connection
# A node that hangs is not lost, but does not answer. The node's own time limits for both are shorter.
_FORK_SECONDS = 60.0
_GONE_SECONDS = 60.0
_COPY_SECONDS = 120.0  # for the reading and for the writing end of a copy of weights


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """Slot `number` of node `node`."""

    node: int
    number: int


class _TornError(CopyError):
    """The received weights do not match their checksum."""


class _Place:
    """A place for one node, and the node that occupies the place now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.node: RemoteNode | None = None
        self.facts: NodeFacts
        self.generation = 0  # number of nodes that were in this place
        self.links: set[WorkerLink] = set()
        self.why = "it has not started"  # reason why there is no node
        self.patience = asyncio.timeout(None)  # expires when the node is given up
        self.losses: tuple[float, ...] = ()  # times at which a node was lost, or did not start
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """The name of the current node. The next node in this place has another name."""
        return f"node-{self.number}.{self.generation}"

    def give_up(self) -> None:
        """Stop using a node that hangs: it is not lost, but does not answer."""
        if self.node is not None and not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time())


class ClusterLauncher:
    """A `WorkerLauncher` on the nodes of a cluster. `slots` has the place of each slot; `marks` are files that every
    node must see. A place that loses `most_losses` nodes within an hour, including failed starts, is given up."""

    def __init__(
        self,
        nodes: Nodes,
        slots: Sequence[NodeSlot],
        reception: Reception,
        marks: Mapping[str, str],
        most_losses: int,
    ) -> None:
        self._nodes, self._slots, self._reception, self._marks = nodes, slots, reception, marks
        self._most_losses = most_losses
        self._places = [_Place(number) for number in range(1 + max(slot.node for slot in slots))]
        self._keepers: list[asyncio.Task[None]] = []
        self._weights: LoadWeights | None = None  # the latest weights whose copies have begun
        self._copies: dict[tuple[LoadWeights, str], asyncio.Task[Any]] = {}  # reads and writes, by weights and node
        self._held: dict[str, LoadWeights] = {}  # the newest weights that arrived at each node
        self._choice = CopyChoice()
        self._way: Way = "everything"  # of copying the current weights
        self.slots_changed: Callable[[], None] = lambda: None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, nodes: Nodes, slots: Sequence[NodeSlot], marks: Mapping[str, str], most_losses: int
    ) -> AsyncIterator[ClusterLauncher]:
        """Context with a launcher that is starting; closes it at the end."""
        async with Reception.open(nodes.host) as reception:
            launcher = cls(nodes, slots, reception, marks, most_losses)
            launcher._keepers = [background(launcher._keep(place)) for place in launcher._places]
            try:
                yield launcher
            finally:
                await launcher._close()

    @property
    def hardware(self) -> str:
        kinds = sorted({place.facts.hardware for place in self._places})
        return f"{len(self._places)} nodes of {' and '.join(kinds)}"

    @property
    def bf16(self) -> tuple[Bf16Speed, ...]:
        return tuple(place.facts.bf16 for place in self._places)

    def processes(self) -> list[int]:
        here = self._reception.address[0]
        return [
            place.facts.fork_server for place in self._places if place.node is not None and place.facts.host == here
        ]

    def offers(self, slot: int) -> bool:
        return self._place(slot).node is not None

    async def ready(self) -> float:
        await asyncio.gather(*(place.began for place in self._places))
        return max(place.facts.import_seconds for place in self._places)

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        place, number = self._place(slot), self._slots[slot].number
        node, generation = place.node, place.generation
        if node is None:
            raise ForkError(f"worker {name} cannot start: {place.why}, and no other has slot {slot}")
        with self._reception.expect() as (token, arrival):
            try:
                async with asyncio.timeout(_FORK_SECONDS):
                    pid = await node.fork(name, number, self._reception.address, token)
            except (LaunchError, OSError) as error:
                why = str(error) or "it does not answer"
                raise ForkError(f"worker {name} cannot start on node {place.facts.host}: {why}") from None
            try:
                channel = await asyncio.wait_for(arrival, _ARRIVAL_SECONDS)
            except TimeoutError:
                node.kill(pid)
                raise ForkError(f"worker {name} does not reach the controller from {place.facts.host}") from None
        if place.generation != generation or place.node is None:
            channel.close()
            raise ForkError(f"worker {name} cannot start: {place.why}")
        link = self._link(name, pid, channel, slot)
        place.links.add(link)
        return link

    def kill(self, link: WorkerLink) -> None:
        place = self._place_of(link)
        if place is not None and place.node is not None:
            place.node.kill(link.pid)

    async def gone(self, link: WorkerLink) -> None:
        place = self._place_of(link)
        if place is None or place.node is None:
            return  # the process ended with its node
        try:
            async with asyncio.timeout(_GONE_SECONDS):
                await place.node.gone(link.pid)
        except NodeLostError:
            pass
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"node {link.host} does not answer") from None
        place.links.discard(link)

    def exists(self, link: WorkerLink) -> bool:
        return self._place_of(link) is not None

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        if source.node == target.node:
            return
        if weights != self._weights:
            self._weights, self._copies, self._way = weights, {}, self._choice.next()
        write = f"write {target.node}"
        await self._once(weights, write, lambda: self._copy(weights, size, source.node, target.node))

    async def _copy(self, weights: LoadWeights, size: int, source: str, target: str) -> None:
        """Copy only the changes since the version on the target, if the current choice is `delta` and this succeeds;
        otherwise copy all weights."""
        base = self._held.pop(target, None)  # the copy overwrites it, or makes it older than the newest
        if base is not None and base.buffer != weights.buffer and self._way == "delta":
            try:
                await self._carry(weights, size, source, target, base)
                return
            except (SourceLostError, _TornError):
                self._choice.took("delta", math.inf)  # avoids deltas until the next trial
        await self._carry(weights, size, source, target, None)

    async def _carry(self, weights: LoadWeights, size: int, source: str, target: str, base: LoadWeights | None) -> None:
        what, began = f"weights v{weights.version} from {source} to {target}", time.monotonic()
        try:
            async with asyncio.timeout(_COPY_SECONDS):
                content = await self._read(weights, size, source, base)
        except TimeoutError:
            raise CopyError(f"{what}: not read in {_COPY_SECONDS:.0f} s") from None
        try:
            place, node = self._named(target)
            async with asyncio.timeout(_COPY_SECONDS):
                await node.write(weights, size, base, content)
        except TimeoutError:
            if place.name == target:
                place.give_up()
            raise CopyError(f"{what}: not written in {_COPY_SECONDS:.0f} s") from None
        except WeightUpdateError as error:
            raise _TornError(f"{what}: {error}") from None
        except OSError as error:
            raise CopyError(f"{what}: {error}") from None
        self._held[target] = weights
        self._choice.took("everything" if base is None else "delta", time.monotonic() - began)

    async def _read(self, weights: LoadWeights, size: int, source: str, base: LoadWeights | None) -> Any:
        try:
            _, node = self._named(source)
            read = f"read {source}" if base is None else f"read {source} from v{base.version}"
            return await self._once(weights, read, lambda: node.read(weights, size, base))
        except (OSError, WeightUpdateError) as error:
            raise SourceLostError(f"weights v{weights.version} are not on {source}: {error}") from None

    async def _once(self, weights: LoadWeights, what: str, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of the task named `what`, which is started if it does not exist or has failed."""
        task = self._copies.get((weights, what))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._copies[weights, what] = asyncio.create_task(begin())
        return await asyncio.shield(task)

    def _named(self, name: str) -> tuple[_Place, RemoteNode]:
        """A present node, even if its workers have ended, since its weights stay. Raises `NodeLostError`."""
        for place in self._places:
            if place.name == name and place.node is not None:
                return place, place.node
        raise NodeLostError("the node is gone")

    def _place(self, slot: int) -> _Place:
        return self._places[self._slots[slot].node]

    def _place_of(self, link: WorkerLink) -> _Place | None:
        return next((place for place in self._places if link in place.links), None)

    def _link(self, name: str, pid: int, channel: ControllerChannel, slot: int) -> WorkerLink:
        place = self._place(slot)
        cores = place.facts.cores
        # Slots of other nodes count if those nodes are on the same machine, as in a simulated cluster.
        before = [other for other in range(slot) if self._place(other).facts.host == place.facts.host]
        gpus = place.facts.gpus
        device = SlotDevice("cuda", (gpus[self._slots[slot].number],)) if gpus else CPU
        core = cores[len(before) % len(cores)]
        return WorkerLink(name, pid, channel, cores, core, place.name, place.facts.host, device)

    async def _keep(self, place: _Place) -> None:
        """Keep a node in this place, and replace it when it is lost, until the place has had too many losses."""
        while len(place.losses) < self._most_losses:
            node: RemoteNode | None = None
            place.patience = asyncio.timeout(None)
            try:
                node = self._nodes.open(place.number)
                place.facts = await node.start(self._marks)
                place.node, place.generation = node, place.generation + 1
                if not place.began.done():
                    place.began.set_result(None)
                self.slots_changed()
                async with place.patience:
                    why = await node.ended()
            except (LaunchError, OSError) as error:
                why = f"it loaded no weights in {_COPY_SECONDS:.0f} s" if place.patience.expired() else str(error)
            except Exception as error:
                if not place.began.done():
                    place.began.set_exception(error)
                raise
            finally:
                if node is not None:
                    node.close()
            if not place.began.done():
                place.began.set_exception(LaunchError(why))
                return
            place.losses = with_loss(place.losses, time.monotonic())
            if len(place.losses) == self._most_losses:
                why += f"; it is given up with {self._most_losses} losses within {LOSS_WINDOW:.0f} s"
            self._lose(place, why)

    def _lose(self, place: _Place, why: str) -> None:
        place.node, place.why = None, f"node {place.facts.host} is lost ({why})"
        self.slots_changed()  # before the workers are reported lost, since they cannot be started here again
        links, place.links = place.links, set()
        for link in links:
            link.channel.sever(place.why)

    async def _close(self) -> None:
        for task in (*self._keepers, *self._copies.values()):
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
