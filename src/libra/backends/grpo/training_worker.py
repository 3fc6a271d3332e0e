"""The main loop of a training worker: it receives orders and sends answers. Its replica is this process alone, or this
process and the peers that it leads.

Invariant: every order has one answer. A joiner follows its core whenever no order is waiting. The leader forks peers
before it starts a thread, and they die with it. The leader ends when a peer does, so a replica has all its processes or
does not exist. An order to the replica is an order to each process, and their answers are merged.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed import FileStore

from libra.backends.grpo.elastic import ElasticOrder, on_thread
from libra.backends.grpo.joint_step import divide, join
from libra.backends.grpo.model_part import ALONE, Inside, meet
from libra.backends.grpo.trainer import TrainerProcess
from libra.backends.launch.worker import Pacer, die_with, serve_and_leave
from libra.backends.transport.channel import FromWorker, PeerChannel, ToWorker, WorkerChannel
from libra.backends.transport.messages import Acknowledged, DeviceKind, Failure, Ready, Stop
from libra.backends.transport.trainer_messages import (
    Commit,
    Discard,
    Enter,
    LoadCheckpoint,
    MeasureTraining,
    Publish,
    Published,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Train,
    WarmUp,
)

_CLOSING_SECONDS = 3.0  # between the first closed connection of an ending process and its end
_LOOK_SECONDS = 0.05  # between two checks of whether the peers live and have met


def serve_trainer(channel: WorkerChannel, start: StartTrainer, descriptor: int, began: float) -> None:
    """Serve orders until `Stop`, or until the controller is lost."""

    def serve(channel: Channel, inside: Inside) -> None:
        threads = len(start.cores) // start.processes
        if threads > 1:
            torch.set_num_threads(threads)
        trainer = TrainerProcess(start, descriptor, Pacer(start.share / start.processes, start.cores), inside)
        channel.send(Ready(time.monotonic() - began, trainer.layout, trainer.buffer_bytes))
        serve_orders(channel, trainer)

    if start.processes == 1:
        serve(channel, ALONE)
    else:
        serve_together(channel, start.processes, serve, start.device)


def serve_orders(channel: Channel, trainer: TrainerProcess) -> None:
    """Answer the orders to one process of a replica, until `Stop`."""
    while True:
        trainer.elastic.keep_up_until(channel.poll)
        order = channel.receive()
        channel.send(_answer(trainer, order))
        if isinstance(order, Enter):
            trainer.elastic.stop_following()
        if isinstance(order, Stop):
            return


def _answer(trainer: TrainerProcess, order: ToWorker) -> FromWorker:
    if isinstance(order, ElasticOrder):
        return trainer.elastic.answer(order)
    match order:
        case Train():
            return trainer.reduce(order)
        case Commit():
            return trainer.commit(order)
        case Discard():
            trainer.discard()
        case WarmUp():
            return trainer.warm_up(order)
        case Publish():
            return Published(order.version, trainer.publish(order.buffer), trainer.diverged())
        case Score():
            return Scored(trainer.score(order.sequences))
        case MeasureTraining():
            return trainer.measure(order)
        case SaveCheckpoint():
            trainer.save(Path(order.directory), order.optimiser)
        case LoadCheckpoint():
            trainer.load(Path(order.directory))
        case Stop():
            pass
        case _:
            raise TypeError(f"{type(order).__name__} is not a message for a trainer")
    return Acknowledged()


# --- a replica of several processes ----------------------------------------------------------------------------------


class BrokenReplicaError(Exception):
    """A process of the replica is lost, or failed."""


class Peer(PeerChannel):
    """The leader's view of process `number` of the replica, a fork of the leader."""

    def __init__(self, connection: socket.socket, pid: int, number: int) -> None:
        super().__init__(connection)
        self.process = os.pidfd_open(pid)  # readable when it has ended
        self._number = number

    def answer(self) -> FromWorker:
        """The process's next answer. Raises `BrokenReplicaError` if the process is lost or fails."""
        try:
            answer = self.receive()
        except ConnectionError:
            raise BrokenReplicaError(f"process {self._number} of the replica has ended: {self._end()}") from None
        if isinstance(answer, Failure):
            raise BrokenReplicaError(f"process {self._number} of the replica: {answer.error}")
        return answer

    def refuse(self) -> None:
        """Handle an unrequested message, most likely the process's last error. Raises `BrokenReplicaError`."""
        raise BrokenReplicaError(f"process {self._number} of the replica sent {type(self.answer()).__name__} unasked")

    def close(self) -> None:
        super().close()
        os.close(self.process)

    def _end(self) -> str:
        """Description of the process's end, which follows soon after its connection closes."""
        if not select.select([self.process], [], [], _CLOSING_SECONDS)[0]:
            return "it closed its connection, and does not end"
        found = os.waitid(os.P_PIDFD, self.process, os.WEXITED)
        assert found is not None
        return f"{'exit status' if found.si_code == os.CLD_EXITED else 'killed by signal'} {found.si_status}"


class ReplicaChannel:
    """The leader's channel. `receive` sends the peers their parts of an order and returns the leader's own part; `send`
    merges its answer with theirs. Every method except `poll` raises `BrokenReplicaError` if a peer is lost."""

    def __init__(self, controller: WorkerChannel, peers: Sequence[Peer]) -> None:
        self._controller, self._peers = controller, peers
        self._all: list[Peer | WorkerChannel] = [*peers, controller]

    def poll(self, seconds: float | None) -> bool:
        return bool(select.select(self._all, [], [], seconds)[0])

    def receive(self) -> ToWorker:
        for channel in select.select(self._all, [], [])[0]:
            if isinstance(channel, Peer):
                channel.refuse()
        own, *others = divide(self._controller.receive(), 1 + len(self._peers))
        for peer, order in zip(self._peers, others, strict=True):
            try:
                peer.send(order)
            except ConnectionError:
                peer.answer()
        return own

    def send(self, answer: FromWorker) -> None:
        self._controller.send(join([answer, *(peer.answer() for peer in self._peers)]))

    def look_for_broken(self, seconds: float) -> None:
        """Raise `BrokenReplicaError` if a peer has ended, or ends within `seconds`."""
        ended = select.select([peer.process for peer in self._peers], [], [], seconds)[0]
        for peer in self._peers:
            while peer.process in ended:
                peer.answer()  # the last message gives the reason


Channel = WorkerChannel | ReplicaChannel


def serve_together(
    controller: WorkerChannel,
    processes: int,
    serve: Callable[[Channel, Inside], None],
    device: DeviceKind = "cpu",
) -> None:
    """Have this process and its forks `serve` as one replica. Raises `BrokenReplicaError` if one of them is lost or
    fails after the fork."""
    leader, memory = os.getpid(), os.memfd_create("replica")  # processes of other users cannot open it
    meeting = f"/proc/{leader}/fd/{memory}"
    peers: list[Peer] = []
    for rank in range(1, processes):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            die_with(leader)
            controller.close()  # each end has one owner, so that it closes when its owner ends
            ours.close()
            for peer in peers:
                peer.close()
            own = WorkerChannel(theirs)
            serve_and_leave(partial(_serve_peer, serve, own, rank, processes, meeting, device), own.send)
        theirs.close()
        peers.append(Peer(ours, pid, rank))
    channel = ReplicaChannel(controller, peers)
    try:
        serve(channel, _meet_peers(channel, processes, FileStore(meeting), device))
    except RuntimeError:  # torch raises it for a collective that a peer left, without the reason
        channel.look_for_broken(_CLOSING_SECONDS)
        raise


def _meet_peers(channel: ReplicaChannel, processes: int, store: FileStore, device: DeviceKind) -> Inside:
    """Run `meet` on a thread, since it would wait for a missing peer; meanwhile check that the peers live."""
    formed = on_thread("meet", lambda: meet(0, processes, store, device))
    while not formed.done():
        channel.look_for_broken(_LOOK_SECONDS)
    return formed.result()


def _serve_peer(
    serve: Callable[[Channel, Inside], None],
    channel: WorkerChannel,
    rank: int,
    processes: int,
    meeting: str,
    device: DeviceKind,
) -> None:
    serve(channel, meet(rank, processes, FileStore(meeting), device))
