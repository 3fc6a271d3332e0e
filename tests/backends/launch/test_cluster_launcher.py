"""Workers on several nodes: real fork servers whose heavy imports are left out, on nodes that a test can lose."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import select
import signal
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.far_end import PATIENCE
from fakes.fork_servers import BARE
from fakes.workers import NO_PROCESS
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.launch.cluster import ClusterLauncher, NodeSlot
from libra.backends.launch.fork_server import ForkError, ForkServer, LaunchError
from libra.backends.launch.launcher import CopyError, SourceLostError, WorkerLink
from libra.backends.launch.node import ClusterNode, NodeFacts, NodeLostError, Reception
from libra.backends.launch.ray import SlotOffer, node_slots, open_on_ray
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.messages import Acknowledged, Failure, Stop
from libra.backends.transport.shared_memory import Vector, WeightBuffer, WeightUpdateError
from libra.backends.weights.copying import CopyChoice
from libra.config.run import ClusterConfig
from libra.exec.pool import LOSS_WINDOW, with_loss

SIZE = 4096
took = CopyChoice.took


class LossyNode:
    """A `RemoteNode` in this process. `lose` ends what it started, and every verb from then on."""

    def __init__(self, node: ClusterNode) -> None:
        self.node = node
        self.reads = self.writes = self.deltas = 0
        self.tear = False  # what is written here from now on
        self.stuck: set[int] = set()  # buffers into which no write ends
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lose(self, why: str) -> None:
        self.node.close()
        self._lost.set_exception(NodeLostError(why))

    async def start(self, marks: Mapping[str, str]) -> NodeFacts:
        return await self._there(self.node.start(marks))

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        return await self._there(self.node.fork(name, slot, controller, token))

    def kill(self, pid: int) -> None:
        self.node.kill(pid)

    async def gone(self, pid: int) -> None:
        await self._there(self.node.gone(pid))

    async def read(self, order: LoadWeights, size: int, base: LoadWeights | None) -> Vector:
        self.reads += 1
        return (await self._there(self.node.read(order, size, base))).copy()

    async def write(self, order: LoadWeights, size: int, base: LoadWeights | None, content: Vector) -> None:
        self.writes += 1
        self.deltas += base is not None
        if self.tear:
            content = np.concatenate([content[: size // 2], np.zeros(size - size // 2, np.uint8)])
        if order.buffer in self.stuck:
            await self._there(asyncio.get_running_loop().create_future())
        await self._there(self.node.write(order, size, base, content))

    async def ended(self) -> str:
        return await self._there(self.node.ended())

    def close(self) -> None:
        self.node.close()

    async def _there(self, verb: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(verb)
        await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return self._lost.result()
        return task.result()


class LossyNodes:
    """A `Nodes`. The next node in a place is what `instead` makes."""

    host = "127.0.0.1"

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.opened: list[LossyNode] = []
        self.present: dict[int, LossyNode] = {}
        self.instead: Callable[[ClusterNode], LossyNode] = LossyNode
        self.devices: tuple[str, ...] = ()

    def open(self, number: int) -> LossyNode:
        node = self.instead(ClusterNode(self.host, self._logs, f"fork-server-{number}", self.devices))
        self.present[number] = node
        self.opened.append(node)
        return node


class Waiting(LossyNode):
    """There is no machine for it yet."""

    def __init__(self, room: asyncio.Event, node: ClusterNode) -> None:
        super().__init__(node)
        self._room = room

    async def start(self, marks: Mapping[str, str]) -> NodeFacts:
        await self._room.wait()
        return await super().start(marks)


class Failing(LossyNode):
    def __init__(self, error: OSError, node: ClusterNode) -> None:
        super().__init__(node)
        self._error = error

    async def start(self, marks: Mapping[str, str]) -> NodeFacts:
        raise self._error


LOSSES = 3  # of nodes in one place
NODE_SLOTS = [NodeSlot(0, 0), NodeSlot(1, 0), NodeSlot(0, 1)]


@pytest.fixture(autouse=True)
def bare_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.backends.launch.node.ForkServer", functools.partial(ForkServer, command=("-c", BARE)))


TwoNodes = tuple[ClusterLauncher, LossyNodes]
Workers = tuple[ClusterLauncher, LossyNodes, WorkerLink, WorkerLink, WorkerLink]


@asynccontextmanager
async def launched(
    nodes: LossyNodes, seats: Sequence[NodeSlot] = (NodeSlot(0, 0),), marks: Mapping[str, str] | None = None
) -> AsyncIterator[ClusterLauncher]:
    async with ClusterLauncher.open(nodes, seats, marks or {}, LOSSES) as launcher:
        yield launcher


@pytest.fixture
@asynccontextmanager
async def two_nodes(tmp_path: Path) -> AsyncIterator[TwoNodes]:
    nodes = LossyNodes(tmp_path)
    async with launched(nodes, NODE_SLOTS) as launcher:
        assert await launcher.ready() >= 0
        yield launcher, nodes


@pytest.fixture
@asynccontextmanager
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    """A trainer on the first node, an engine on the other, and one beside the trainer."""
    nodes = LossyNodes(tmp_path)
    async with launched(nodes, NODE_SLOTS) as launcher:
        await launcher.ready()
        yield launcher, nodes, *[await launcher.spawn(f"w{slot}", slot) for slot in range(3)]


async def answers(link: WorkerLink) -> bool:
    link.channel.send(Stop())
    return isinstance(await link.channel.receive(), Failure)  # a worker begins with something else


async def test_workers_run_on_the_nodes_of_their_slots(two_nodes: TwoNodes, tmp_path: Path) -> None:
    launcher, _ = two_nodes
    links = [await launcher.spawn(f"w{slot}", slot) for slot in range(3)]
    assert links[0].node == links[2].node != links[1].node
    assert {link.host for link in links} == {"127.0.0.1"}
    cores = links[0].cores
    assert [link.core for link in links] == [cores[slot % len(cores)] for slot in range(3)]  # one machine
    parents = [int(Path(f"/proc/{link.pid}/stat").read_text().split()[3]) for link in links]
    assert parents[0] == parents[2] != parents[1]
    assert sorted(set(parents)) == sorted(launcher.processes())
    assert launcher.hardware.startswith("2 nodes of ")
    for link in links:
        assert launcher.exists(link) and await answers(link)
        await launcher.gone(link)
        assert not launcher.exists(link)
        assert not Path(f"/proc/{link.pid}").exists()
    assert (tmp_path / "w1.log").read_text() and (tmp_path / "fork-server-1.log").is_file()


async def test_a_lost_node_is_lost_for_all_its_workers_and_another_takes_its_place(two_nodes: TwoNodes) -> None:
    launcher, nodes = two_nodes
    links = [await launcher.spawn(f"w{slot}", slot) for slot in range(3)]
    room, lost = asyncio.Event(), nodes.present[0]
    told: list[list[bool]] = []
    launcher.slots_changed = lambda: told.append([launcher.offers(slot) for slot in range(3)])
    nodes.instead = functools.partial(Waiting, room)
    # Their connections would not tell: the machines are only unplugged.
    lost._lost.set_exception(NodeLostError("unplugged"))
    for link in (links[0], links[2]):
        with pytest.raises(ConnectionError, match=r"node 127\.0\.0\.1 is lost \(unplugged\)"):
            await link.channel.receive()
        await launcher.gone(link)
        launcher.kill(link)
    assert told == [[False, True, False]]
    assert [launcher.exists(link) for link in links] == [False, True, False]
    with pytest.raises(ForkError, match=r"w0 cannot start: node 127\.0\.0\.1 is lost \(unplugged\), and no other"):
        await launcher.spawn("w0", 0)
    assert await answers(links[1])
    room.set()
    while len(told) < 2:
        await asyncio.sleep(0.01)
    assert told[1] == [True, True, True]
    again = await launcher.spawn("w0", 0)
    assert again.node not in {link.node for link in links}
    assert await answers(again)


async def test_a_worker_that_is_killed_is_gone_and_its_node_stays(two_nodes: TwoNodes) -> None:
    launcher, nodes = two_nodes
    killed, beside = await launcher.spawn("w0", 0), await launcher.spawn("w2", 2)
    launcher.kill(killed)
    await launcher.gone(killed)
    assert not launcher.exists(killed) and not Path(f"/proc/{killed.pid}").exists()
    assert await answers(beside)
    assert await answers(await launcher.spawn("w0", 0))
    assert len(nodes.opened) == 2


async def test_a_fork_server_that_ends_takes_its_node_with_it(two_nodes: TwoNodes) -> None:
    launcher, nodes = two_nodes
    link = await launcher.spawn("w1", 1)
    os.kill(nodes.present[1].node._started.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        await link.channel.receive()
    while len(nodes.opened) < 3 or not launcher.offers(1):
        await asyncio.sleep(0.01)
    assert await answers(await launcher.spawn("w1", 1))


async def test_a_place_in_which_no_node_starts_is_given_up(two_nodes: TwoNodes) -> None:
    launcher, nodes = two_nodes
    nodes.instead = functools.partial(Failing, NodeLostError("no memory"))
    nodes.present[0].lose("unplugged")
    await launcher._keepers[0]
    assert len(nodes.opened) == 2 + LOSSES - 1
    with pytest.raises(ForkError, match=r"no memory; it is given up with 3 losses within 3600 s\), and no other"):
        await launcher.spawn("w0", 0)
    assert await answers(await launcher.spawn("w1", 1))


async def test_a_fork_server_that_starts_well_and_dies_at_once_is_not_started_for_ever(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, nodes = two_nodes
    now = 0.0
    monkeypatch.setattr("libra.backends.launch.cluster.with_loss", lambda losses, moment: with_loss(losses, now))
    for opened in range(3, 3 + 2 * LOSSES):  # in the first hours it happens once in a while
        os.kill(nodes.present[0].node._started.pid, signal.SIGKILL)
        now += LOSS_WINDOW / 2 + 1
        while len(nodes.opened) < opened or not launcher.offers(0):
            await asyncio.sleep(0.01)
    os.kill(nodes.present[0].node._started.pid, signal.SIGKILL)  # the third within the hour
    await launcher._keepers[0]
    assert len(nodes.opened) == 2 + 2 * LOSSES
    log = re.escape(str(tmp_path / "fork-server-0.log"))
    with pytest.raises(ForkError, match=rf"ended: see {log}; it is given up with 3 losses within 3600 s"):
        await launcher.spawn("w0", 0)
    assert await answers(await launcher.spawn("w1", 1))


async def test_what_keeps_the_first_nodes_from_starting_is_told(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("another run's")
    async with launched(LossyNodes(tmp_path), NODE_SLOTS, {str(mark): "this run's"}) as launcher:
        with pytest.raises(LaunchError, match=rf"node 127\.0\.0\.1 cannot see the controller's {tmp_path}"):
            await launcher.ready()


async def test_nothing_is_left_when_a_launcher_is_closed(tmp_path: Path) -> None:
    async with launched(LossyNodes(tmp_path), NODE_SLOTS) as launcher:
        await launcher.ready()
        processes = [os.pidfd_open((await launcher.spawn(f"w{slot}", slot)).pid) for slot in range(3)]
    for process in processes:
        assert select.select([process], [], [], 0)[0]  # it has ended
        os.close(process)


# --- weights -------------------------------------------------------------------------------------------------------


def publish(node: LossyNode, version: int) -> LoadWeights:
    """What a trainer on that node would leave there."""
    content = np.random.default_rng(version).integers(0, 255, SIZE, dtype=np.uint8)
    checksum = zlib.crc32(content)
    WeightBuffer(node.node._started.weights, SIZE).store(version % 2, content, checksum)
    return LoadWeights(version, version % 2, checksum)


def holds(node: LossyNode, weights: LoadWeights) -> bool:
    return WeightBuffer(node.node._started.weights, SIZE).checksum(weights.buffer) == weights.checksum


async def test_weights_reach_another_node_once_and_whole(workers: Workers) -> None:
    launcher, nodes, trainer, away, beside = workers
    for version in (4, 5, 6):
        weights = publish(nodes.present[0], version)
        engines = (away, away, beside)
        await asyncio.gather(*(launcher.bring(weights, SIZE, trainer, engine) for engine in engines))
        assert holds(nodes.present[1], weights)
    assert (nodes.present[0].reads, nodes.present[1].writes, nodes.present[0].writes) == (3, 3, 0)
    assert holds(nodes.present[1], publish(nodes.present[0], 5))  # the buffer of the version before is untouched


async def test_a_node_that_has_the_version_before_gets_what_changed_where_that_takes_less_time(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, nodes, trainer, away, _ = workers
    source, target = nodes.present[0], nodes.present[1]
    seconds = {"everything": 3.0, "delta": 1.0}
    monkeypatch.setattr(CopyChoice, "took", lambda self, way, _: took(self, way, seconds[way]))
    for version, deltas in ((4, 0), (5, 1), (6, 2)):
        weights = publish(source, version)
        await launcher.bring(weights, SIZE, trainer, away)
        assert holds(target, weights) and target.deltas == deltas
    seconds["delta"] = 4.0
    for version, deltas in ((7, 3), (8, 3)):
        weights = publish(source, version)
        await launcher.bring(weights, SIZE, trainer, away)
        assert holds(target, weights) and target.deltas == deltas


@pytest.mark.parametrize("where", [0, 1])
async def test_everything_is_sent_where_the_version_before_is_not_what_it_was(workers: Workers, where: int) -> None:
    launcher, nodes, trainer, away, _ = workers
    await launcher.bring(publish(nodes.present[0], 4), SIZE, trainer, away)
    WeightBuffer(nodes.present[where].node._started.weights, SIZE).content(0)[7] ^= 1
    weights, target = publish(nodes.present[0], 5), nodes.present[1]
    await launcher.bring(weights, SIZE, trainer, away)
    assert holds(target, weights)
    assert (target.writes, target.deltas) == ((2, 0), (3, 1))[where]


async def test_weights_that_arrive_torn_are_an_error_and_can_be_sent_again(workers: Workers) -> None:
    launcher, nodes, trainer, away, _ = workers
    weights = publish(nodes.present[0], 4)
    nodes.present[1].tear = True
    results = await asyncio.gather(
        *(launcher.bring(weights, SIZE, trainer, away) for _ in range(2)), return_exceptions=True
    )
    assert all(isinstance(each, CopyError) and "v4" in str(each) and "checksum" in str(each) for each in results)
    nodes.present[1].tear = False
    await launcher.bring(weights, SIZE, trainer, away)
    assert holds(nodes.present[1], weights)


async def test_a_node_that_does_not_take_weights_is_given_up_and_newer_ones_do_not_wait_for_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, nodes, trainer, away, beside = workers
    hanging = nodes.present[1]
    hanging.stuck = {0}
    older, newer = publish(nodes.present[0], 4), publish(nodes.present[0], 5)
    waiting = asyncio.create_task(launcher.bring(older, SIZE, trainer, away))
    while not hanging.writes:
        await asyncio.sleep(0)
    await launcher.bring(newer, SIZE, trainer, away)
    assert holds(hanging, newer) and not waiting.done()
    waiting.cancel()

    monkeypatch.setattr("libra.backends.launch.cluster._COPY_SECONDS", 0.05)
    with pytest.raises(CopyError, match=r"v6 from node-0.* to node-1.*: not written in"):
        await launcher.bring(publish(nodes.present[0], 6), SIZE, trainer, away)
    with pytest.raises(ConnectionError, match=r"is lost \(it loaded no weights in 0 s\)"):
        await away.channel.receive()
    monkeypatch.setattr("libra.backends.launch.cluster._COPY_SECONDS", PATIENCE)
    while nodes.present[1] is hanging or not launcher.offers(1):
        await asyncio.sleep(0.01)
    again = await launcher.spawn("w1", 1)
    latest = publish(nodes.present[0], 8)
    await launcher.bring(latest, SIZE, trainer, again)
    assert holds(nodes.present[1], latest)
    assert launcher.exists(trainer) and launcher.exists(beside)


async def test_weights_that_are_not_read_cost_no_node(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, nodes, trainer, away, _ = workers
    nodes.present[0].read = lambda *order: asyncio.sleep(PATIENCE)  # type: ignore[method-assign]
    monkeypatch.setattr("libra.backends.launch.cluster._COPY_SECONDS", 0.05)
    with pytest.raises(CopyError, match=r"v4 from node-0.* to node-1.*: not read in"):
        await launcher.bring(publish(nodes.present[0], 4), SIZE, trainer, away)
    assert launcher.exists(away) and launcher.offers(1)


async def test_weights_that_nobody_has_any_more(workers: Workers) -> None:
    launcher, nodes, trainer, away, _ = workers
    weights = publish(nodes.present[0], 4)
    with pytest.raises(SourceLostError, match="are not on node-1"):
        await launcher.bring(weights, SIZE, away, trainer)  # they were published on the other node
    nodes.present[0].lose("unplugged")
    with pytest.raises(SourceLostError, match=r"v4 are (lost with|not on) node-0"):
        await launcher.bring(weights, SIZE, trainer, away)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    buffer = WeightBuffer(os.memfd_create("weights"), SIZE)
    with pytest.raises(WeightUpdateError, match="100 bytes for buffer 1, expected 4096"):
        buffer.store(1, np.zeros(100, np.uint8), 0)


SHOWING = BARE.replace(
    "fork_server.main",
    """
import os
fork_server.serve = lambda channel, weights: print(os.environ["CUDA_VISIBLE_DEVICES"])
fork_server.main""",
)


async def test_every_seat_has_its_own_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server = functools.partial(ForkServer, command=("-c", SHOWING))
    monkeypatch.setattr("libra.backends.launch.node.ForkServer", fork_server)
    nodes = LossyNodes(tmp_path)
    nodes.devices = ("4", "7")
    async with launched(nodes, [NodeSlot(0, 0), NodeSlot(0, 1)]) as launcher:
        await launcher.ready()
        for slot in (0, 1):
            link = await launcher.spawn(f"w{slot}", slot)
            with pytest.raises(ConnectionError):
                await link.channel.receive()
    assert [(tmp_path / f"w{slot}.log").read_text() for slot in (0, 1)] == ["4\n", "7\n"]


async def test_a_first_node_that_may_not_write_is_told_of(tmp_path: Path) -> None:
    nodes = LossyNodes(tmp_path)
    nodes.instead = functools.partial(Failing, PermissionError(13, "Permission denied", "fork-server-0.log"))
    async with launched(nodes) as launcher:
        with pytest.raises(LaunchError, match=r"Permission denied: 'fork-server-0\.log'"):
            await asyncio.wait_for(launcher.ready(), PATIENCE)


class Hanging(LossyNode):
    """From some time on its process answers nothing, and nobody says that it is lost."""

    hangs = False

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        return await super().fork(name, slot, controller, token)

    async def gone(self, pid: int) -> None:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        await super().gone(pid)


async def test_a_node_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = LossyNodes(tmp_path)
    nodes.instead = Hanging
    async with launched(nodes) as launcher:
        await launcher.ready()
        link = await launcher.spawn("w0", 0)
        nodes.present[0].hangs = True  # type: ignore[attr-defined]
        monkeypatch.setattr("libra.backends.launch.cluster._FORK_SECONDS", 0.05)
        monkeypatch.setattr("libra.backends.launch.cluster._GONE_SECONDS", 0.05)
        with pytest.raises(TimeoutError, match=r"node 127\.0\.0\.1 does not answer"):
            await launcher.gone(link)
        with pytest.raises(ForkError, match=r"w0 cannot start on node 127\.0\.0\.1: it does not answer"):
            await launcher.spawn("w0", 0)


class Halfway(LossyNode):
    """Its worker has reached the controller when the order to fork it fails."""

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        self.worker = await asyncio.to_thread(socket.create_connection, controller)
        self.worker.sendall(token)
        await asyncio.sleep(0.05)
        raise NodeLostError("unplugged")


class Unplugged(LossyNode):
    """It is lost when its worker has reached the controller and has not begun."""

    heard: asyncio.Event

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        self.worker = await asyncio.to_thread(socket.create_connection, controller)
        self.worker.sendall(token)
        self._lost.set_exception(NodeLostError("unplugged"))
        await self.heard.wait()
        return NO_PROCESS


async def test_a_worker_whose_node_is_lost_as_it_starts_is_none(tmp_path: Path) -> None:
    nodes = LossyNodes(tmp_path)
    nodes.instead = Unplugged
    async with launched(nodes) as launcher:
        await launcher.ready()
        nodes.instead, Unplugged.heard = LossyNode, asyncio.Event()
        launcher.slots_changed = Unplugged.heard.set
        with pytest.raises(ForkError, match=r"w0 cannot start: node 127\.0\.0\.1 is lost \(unplugged\)$"):
            await launcher.spawn("w0", 0)
        with nodes.opened[0].worker as worker:  # type: ignore[attr-defined]
            worker.settimeout(PATIENCE)
            assert await asyncio.to_thread(worker.recv, 1) == b""
        while not launcher.offers(0):
            await asyncio.sleep(0.01)
        assert await answers(await launcher.spawn("w0", 0))


async def test_a_worker_whose_start_failed_is_not_kept_waiting(tmp_path: Path) -> None:
    nodes = LossyNodes(tmp_path)
    nodes.instead = Halfway
    async with launched(nodes) as launcher:
        await launcher.ready()
        with pytest.raises(ForkError, match="unplugged"):
            await launcher.spawn("w0", 0)
        with nodes.present[0].worker as worker:  # type: ignore[attr-defined]
            worker.settimeout(PATIENCE)
            assert await asyncio.to_thread(worker.recv, 1) == b""


async def test_a_node_without_memory_for_the_weights_costs_its_engines_and_not_the_run(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, nodes, trainer, away, _ = workers

    def full(self: WeightBuffer, descriptor: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    weights = publish(nodes.present[0], 4)
    monkeypatch.setattr(WeightBuffer, "__init__", full)
    with pytest.raises(SourceLostError, match=r"v4 are not on node-0.*Cannot allocate memory"):
        await launcher.bring(weights, SIZE, trainer, away)
    nodes.present[0].read = lambda *order: asyncio.sleep(0, np.zeros(SIZE, np.uint8))  # type: ignore[method-assign]
    with pytest.raises(CopyError, match=r"v4 from node-0.* to node-1.*Cannot allocate memory"):
        await launcher.bring(weights, SIZE, trainer, away)


async def knock(reception: Reception, *words: bytes) -> socket.socket:
    connection = await asyncio.to_thread(socket.create_connection, reception.address)
    connection.settimeout(PATIENCE)
    for word in words:
        connection.sendall(word)
    return connection


async def is_closed(connection: socket.socket) -> bool:
    with connection:
        return await asyncio.to_thread(connection.recv, 1) == b""


async def test_a_worker_with_its_token_is_let_in_once_and_nobody_else() -> None:
    broken: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: broken.append(context))
    async with Reception.open("127.0.0.1") as reception:
        assert reception.address[0] == "127.0.0.1"
        with reception.expect() as (token, arrival):
            assert await is_closed(await knock(reception, bytes(32)))
            assert not arrival.done()
            worker = await knock(reception, token[:5], token[5:])
            channel = await asyncio.wait_for(arrival, PATIENCE)
            with worker:
                WorkerChannel(worker).send(Acknowledged())
                assert await channel.receive() == Acknowledged()
                assert await is_closed(await knock(reception, token))
            channel.close()
        with reception.expect() as (token, arrival):
            pass
        assert await is_closed(await knock(reception, token))  # nobody expects it any more
        assert not arrival.done()
        half = await knock(reception, b"half a token")
        half.close()
    assert not broken


async def test_silence_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.backends.launch.node._TOKEN_SECONDS", 0.05)
    async with Reception.open("127.0.0.1") as reception:
        assert await is_closed(await knock(reception))


def placed(slots: int, rooms: list[int]) -> list[NodeSlot]:
    return node_slots(slots, [SlotOffer("n", cpus, 0.0) for cpus in rooms], 1.0, None)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 12))
def test_slots_are_spread_as_evenly_as_there_is_room(rooms: list[int], slots: int) -> None:
    if sum(rooms) < slots:
        with pytest.raises(LaunchError, match=f"{slots} slots are wanted, .* room for {sum(rooms)}"):
            placed(slots, rooms)
        return
    found = placed(slots, rooms)
    assert len(set(found)) == slots
    counts = Counter(slot.node for slot in found)
    assert sorted(counts) == list(range(len(counts)))
    for node, count in counts.items():
        assert {slot.number for slot in found if slot.node == node} == set(range(count))
    # Water that fills vessels: no node has two more than another one that is not full.
    level = next(level for level in range(slots + 1) if sum(min(each, level) for each in rooms) >= slots)
    assert all(level - 1 <= count <= level for count in counts.values() if count not in rooms)
    assert sorted(counts.values()) <= sorted(min(each, level) for each in rooms if each)
    width = sum(each > 0 for each in rooms)
    assert len({slot.node for slot in found[:width]}) == min(width, slots)  # core trainers come first


def test_core_trainers_are_on_different_nodes() -> None:
    assert placed(4, [0, 2, 2, 2]) == [NodeSlot(0, 0), NodeSlot(1, 0), NodeSlot(2, 0), NodeSlot(0, 1)]


@pytest.mark.parametrize(
    ("offers", "most", "rooms"),
    [
        ([(2.0, 0.0), (1.0, 0.0), (0.0, 0.0)], None, [4, 2, 0]),
        ([(0.9, 0.0), (0.44, 0.0)], None, [2, 0]),
        ([(64.0, 0.0)], 3, [3]),
        ([(2.0, 8.0), (64.0, 0.0)], None, [8, 0]),  # where there are accelerators, those are the devices
        ([(2.0, 8.0), (2.0, 4.0)], 6, [6, 4]),
    ],
)
def test_the_slots_that_nodes_have(offers: list[tuple[float, float]], most: int | None, rooms: list[int]) -> None:
    found = node_slots(sum(rooms), [SlotOffer("n", *offer) for offer in offers], 0.45, most)
    assert list(Counter(slot.node for slot in found).values()) == [each for each in rooms if each]
    words = ", ".join(f"n {each}" for each in rooms)
    with pytest.raises(LaunchError, match=f"room for {sum(rooms)}, {words}; use fewer"):
        node_slots(sum(rooms) + 1, [SlotOffer("n", *offer) for offer in offers], 0.45, most)


async def test_a_ray_cluster_of_this_machine_alone_listens_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes a network's address where it was imported before it could be told not to."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setattr(ray, "init", lambda **options: None)
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.2")
    with pytest.raises(LaunchError, match=r"would listen on 192\.0\.2\.2, since Ray was imported before"):
        async with open_on_ray(ClusterConfig(launcher="ray"), tmp_path):
            pass
    assert ended == [True]
