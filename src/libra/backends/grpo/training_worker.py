"""The life of a training worker: orders in, answers out, and a core to follow in between.

Invariant: every order has one answer. A joiner keeps up with its core whenever no order is waiting.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from libra.backends.grpo.elastic import PeerLostError
from libra.backends.grpo.model_part import ALONE, Inside
from libra.backends.grpo.publication import OverrunError, Publication, UnreachableError
from libra.backends.grpo.relay import Relay
from libra.backends.grpo.replica_processes import Channel, serve_together
from libra.backends.grpo.train_state import TrainState
from libra.backends.grpo.trainer import TrainerProcess
from libra.backends.launch.worker import Pacer
from libra.backends.transport.channel import FromWorker, ToWorker, WorkerChannel
from libra.backends.transport.messages import Acknowledged, Ready, Stop
from libra.backends.transport.shared_memory import LayoutError
from libra.backends.transport.trainer_messages import (
    CatchUp,
    Commit,
    Discard,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    LoadCheckpoint,
    MeasureTraining,
    Prepare,
    Publish,
    Published,
    Rendezvous,
    SaveCheckpoint,
    Score,
    Scored,
    Serve,
    Serving,
    StartTrainer,
    StateDigest,
    Train,
    WarmUp,
)

SNAPSHOTS = 3  # in a row without catching up; then the core is faster than this replica and has to stand still for it
SILENT_SECONDS = 30.0  # in the middle of one change; an optimiser step takes seconds at most


class BehindError(RuntimeError):
    """The core's state changes faster than this replica can take it over."""


class SilentError(RuntimeError):
    """The core has been in the middle of a change for too long: it hangs, or is gone."""


class Follower:
    """A joiner on its way to a core's state, beside the core and at its own pace.

    It holds exactly state `number` of the core, or knows that it holds none: one snapshot, then the updates that came
    since, each once and in order. What it missed it makes up by a new snapshot, a bounded number of times.
    """

    def __init__(self, publication: Publication, state: TrainState) -> None:
        self._publication, self._state = publication, state
        self._snapshots = 0  # since the last time there was nothing left to do
        self._changing_since: float | None = None  # when the core was first seen in the change that it is in
        self.number: int | None = None  # of the core's state that is held

    def advance(self) -> None:
        """Go on until nothing more is published, or the core is in the middle of a change that has to end first. Raises
        `BehindError`, `SilentError`, `UnreachableError`."""
        while True:
            if self.number is None:
                if not self._at_rest():
                    return
                self._take_snapshot()
            elif not self._take_update(self.number + 1):
                break
        self._snapshots = 0

    def _at_rest(self) -> bool:
        """Whether there is a state to copy now. That there is none yet is no copy that was overtaken."""
        if self._publication.at_rest():
            self._changing_since = None
            return True
        now = time.monotonic()
        if self._changing_since is None:
            self._changing_since = now
        if now - self._changing_since >= SILENT_SECONDS:
            raise SilentError("the core replica does not get done with a change of its state")
        return False

    def _take_snapshot(self) -> None:
        if self._snapshots == SNAPSHOTS:
            raise BehindError(
                f"{SNAPSHOTS} copies of the core's state in a row were overtaken by its steps: each was torn, or more"
                " steps followed than the ring of gradients keeps"
            )
        self._snapshots += 1
        self.number = self._state.take_state(self._publication)

    def _take_update(self, number: int) -> bool:
        """Whether there is more to do: an update was taken, or missed."""
        try:
            if not self._state.take_update(self._publication, number):
                return False
            self.number = number
        except OverrunError:
            self.number = None
        return True


_LOOK_SECONDS = 0.002  # between two looks at what a core publishes: little beside a step


def serve_trainer(channel: WorkerChannel, start: StartTrainer, descriptor: int, began: float) -> None:
    """Until `Stop`, or until the controller goes away."""

    def serve(channel: Channel, inside: Inside) -> None:
        threads = len(start.cores) // start.processes
        if threads > 1:
            torch.set_num_threads(threads)
        trainer = TrainerProcess(start, descriptor, Pacer(start.share / start.processes, start.cores), inside)
        channel.send(Ready(time.monotonic() - began, trainer.layout, trainer.buffer_bytes))
        TrainingWorker(channel, trainer).run()

    if start.processes == 1:
        serve(channel, ALONE)
    else:
        serve_together(channel, start.processes, serve)


class TrainingWorker:
    """One process of a replica."""

    def __init__(self, channel: Channel, trainer: TrainerProcess) -> None:
        self._channel, self._trainer = channel, trainer
        self._follower: Follower | None = None
        self._behind = ""  # why it ceased to follow
        self._relay: Relay | None = None  # the last one

    def run(self) -> None:
        while True:
            while self._follower is not None and not self._channel.poll(_LOOK_SECONDS):
                self._keep_up()
            message = self._channel.receive()
            self._channel.send(self._answer(message))
            if isinstance(message, Enter):
                self._follower = None  # not before the answer: to unmap a large state takes as long as many messages
            if isinstance(message, Stop):
                return

    def _answer(self, message: ToWorker) -> FromWorker:
        trainer = self._trainer
        match message:
            case Train():
                return trainer.reduce(message)
            case Commit():
                return trainer.commit(message)
            case Discard():
                trainer.discard()
                return Acknowledged()
            case HostRendezvous():
                return Rendezvous(trainer.exchange.host_rendezvous(message))
            case Prepare():
                trainer.exchange.prepare(message)
                return Acknowledged()
            case Enter():
                return self._enter(message)
            case Identify():
                return self._digest()
            case Serve():
                return self._serve(message)
            case Follow():
                return self._follow(message)
            case CatchUp():
                return self._catch_up(message)
            case WarmUp():
                return trainer.warm_up(message)
            case Publish():
                return Published(message.version, trainer.publish(message.buffer))
            case Score():
                return Scored(trainer.score(message.sequences))
            case MeasureTraining():
                return trainer.measure(message)
            case SaveCheckpoint():
                trainer.save(Path(message.directory), message.optimiser)
                return Acknowledged()
            case LoadCheckpoint():
                trainer.load(Path(message.directory))
                return Acknowledged()
            case Stop():
                return Acknowledged()
            case _:
                raise TypeError(f"{type(message).__name__} is not a message for a trainer")

    def _enter(self, order: Enter) -> Entered:
        try:
            self._trainer.exchange.enter(order.generation)
        except PeerLostError as error:
            return Entered(order.generation, str(error))
        return Entered(order.generation, "")

    def _serve(self, order: Serve) -> Serving:
        if self._relay is not None:
            self._relay.end()
        state = self._trainer.state
        try:
            self._relay = Relay(order, state.place, state.shape)
        except OSError as error:
            return Serving([], str(error))
        return Serving([self._relay.port], "")

    def _follow(self, order: Follow) -> StateDigest:
        self._follower, self._behind = None, ""
        state, [place] = self._trainer.state, order.places
        try:
            self._follower = Follower(state.publication_at(place), state)
        except (LayoutError, OSError) as error:
            self._behind = f"the core's state cannot be read: {error}"
        self._keep_up()
        return self._digest()

    def _catch_up(self, order: CatchUp) -> StateDigest:
        ends = time.monotonic() + order.seconds
        while self._follower is not None and self._number() < order.number and time.monotonic() < ends:
            time.sleep(_LOOK_SECONDS)
            self._keep_up()
        ready = self._trainer.exchange.formed(order.generation, max(0.0, ends - time.monotonic()))
        return self._digest(ready)

    def _keep_up(self) -> None:
        if self._follower is None:
            return
        try:
            self._follower.advance()
        except (BehindError, SilentError, UnreachableError) as error:
            self._follower, self._behind = None, str(error)
        self._trainer.pace()

    def _digest(self, ready: bool = False) -> StateDigest:
        state = self._trainer.state
        return StateDigest(self._number(), state.checksum, state.size, [state.place], ready, self._behind)

    def _number(self) -> int:
        """Of the state that is held; -1 when it is none of the core's."""
        if self._behind:
            return -1
        if self._follower is None:
            return self._trainer.state.number
        return -1 if self._follower.number is None else self._follower.number
