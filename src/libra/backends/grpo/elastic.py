"""A replica's part in elastic training. It exchanges gradients in a membership that changes between steps, and serves
its state to joiners. As a joiner, it follows a core replica.

Invariant: the exchange sums the unnormalised gradient and the loss denominator; the division happens once, after it. A
membership is one numbered generation. A separate thread forms it while training continues in the previous one, and
replicas enter it between two steps. If a replica disappears, the collectives of all others fail.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo

from libra.backends.grpo.publication import UnreachableError
from libra.backends.grpo.relay import Relay
from libra.backends.grpo.rendezvous import RendezvousServer, RendezvousStore
from libra.backends.grpo.train_state import BehindError, Follower, SilentError, TrainState
from libra.backends.launch.worker import Pacer
from libra.backends.transport.channel import FromWorker
from libra.backends.transport.messages import Acknowledged
from libra.backends.transport.shared_memory import LayoutError
from libra.backends.transport.trainer_messages import (
    FORMING_SECONDS,
    CatchUp,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    Prepare,
    Rendezvous,
    Serve,
    Serving,
    StateDigest,
)

Result = TypeVar("Result")

FORMING = timedelta(seconds=FORMING_SECONDS)


class PeerLostError(RuntimeError):
    """A collective failed because another replica is lost, or too late."""


def on_thread(name: str, verb: Callable[[], Result]) -> Future[Result]:
    """Run `verb` on a daemon thread, since it may wait for a replica that never arrives."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(verb())
        except Exception as error:  # noqa: BLE001 - the end of a thread: the caller of `result` gets the error
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


class GradientExchange:
    """One replica's membership. For a single replica (size 1), every method returns at once.

    In a replica of several processes, each process exchanges its part with the processes of the same rank in the other
    replicas."""

    def __init__(self, process: int = 0) -> None:
        self._process = process
        self._store: RendezvousServer | None = None  # if this replica has rank 0 and the others meet here
        self._listen_error: OSError | None = None  # why this replica cannot listen
        self._prepared: Prepare | None = None
        self._forming = Future[ProcessGroupGloo | None]()  # the prepared membership's group; None for a single replica
        self._group: ProcessGroupGloo | None = None
        self.size = 1

    def host_rendezvous(self, order: HostRendezvous) -> int:
        """Host the rendezvous of the replicas, at the same port as before if possible. Returns the port, or 0 if this
        replica cannot listen there, and then `enter` reports the reason. Only its first process listens."""
        if self._process:
            return 0
        store = self._store
        if (
            store is None
            or (store.host, store.secret) != (order.host, order.token)
            or order.port not in (0, store.port)
        ):
            if store is not None:
                store.close()
            try:
                store = self._store = RendezvousServer(order.host, order.port, order.token)
            except OSError as error:
                self._store, self._listen_error = None, error
                return 0
        return store.port

    def prepare(self, order: Prepare) -> None:
        """Start to form the next membership while the current one continues. It replaces a membership that was prepared
        but not entered.
        """
        self._prepared, self._forming = order, Future()
        if order.size <= 1:
            self._forming.set_result(None)
        elif not order.port:
            self._forming.set_exception(self._listen_error or ConnectionError("the first replica cannot listen"))
        else:
            self._forming = on_thread(f"generation {order.generation}", lambda: _form(order, self._process))

    def formed(self, generation: int, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether the prepared membership is ready to enter."""
        self._require_prepared(generation)
        with contextlib.suppress(Exception):  # `enter` reports the failure
            self._forming.result(seconds)
        return self._forming.done() and self._forming.exception() is None

    def enter(self, generation: int) -> None:
        """Exchange with the replicas of this membership from now on.

        Raises `PeerLostError` if a replica is missing; this replica then exchanges nothing until the next membership.
        """
        self.size = self._require_prepared(generation).size
        forming, self._forming = self._forming, Future()
        self._prepared = self._group = None
        try:
            self._group = forming.result(FORMING.total_seconds())
        except (RuntimeError, OSError) as error:
            what = f"membership {generation} of {self.size} replicas"
            raise PeerLostError(f"{what} was not formed: {str(error) or 'not all of them arrived'}") from error

    def all_reduce(self, tensor: torch.Tensor, seconds: float) -> float:
        """Replace the tensor by its sum over all replicas, in place; wait at most `seconds` for each of them. Returns
        the seconds taken. Raises `PeerLostError`; the tensor is then invalid, and this membership has ended."""
        if self.size <= 1:
            return 0.0
        if self._group is None:
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: the membership has ended")
        began = time.monotonic()
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            self.abort()  # so that the others do not wait for their deadlines
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: {error}") from error
        return time.monotonic() - began

    def abort(self) -> None:
        """End this membership. Replicas that wait for this replica notice at once."""
        self._group = None  # closes the connections

    def _require_prepared(self, generation: int) -> Prepare:
        if self._prepared is None or self._prepared.generation != generation:
            raise ValueError(f"membership {generation} was not prepared")
        return self._prepared


def _form(order: Prepare, process: int) -> ProcessGroupGloo:
    # Each forming has its own connection: one that waits for a replica that never comes must not block the next.
    prefix = f"generation-{order.generation}-process-{process}/"
    store = RendezvousStore(order.host, order.port, order.token, prefix, FORMING)
    options = ProcessGroupGloo._Options()
    options._timeout = FORMING
    options._devices = [ProcessGroupGloo.create_device(hostname=order.address)]
    return ProcessGroupGloo(store, order.rank, order.size, options)


ElasticOrder = HostRendezvous | Prepare | Enter | Identify | Serve | Follow | CatchUp
_LOOK_SECONDS = 0.002  # between two checks of a core's publication: short relative to a step


class ElasticReplica:
    """Answers the controller's orders about other replicas, for one process of a replica, and exchanges the gradients
    of its trainer."""

    def __init__(self, state: TrainState, pacer: Pacer, process: int = 0) -> None:
        self.exchange = GradientExchange(process)
        self._state, self._pacer = state, pacer
        self._follower: Follower | None = None
        self._behind = ""  # reason why it stopped following
        self._relay: Relay | None = None  # the latest relay for a joiner

    def answer(self, order: ElasticOrder) -> FromWorker:
        match order:
            case HostRendezvous():
                return Rendezvous(self.exchange.host_rendezvous(order))
            case Prepare():
                self.exchange.prepare(order)
                return Acknowledged()
            case Enter():
                return self._enter(order.generation)
            case Identify():
                if self._follower is None:  # this replica is the core that a joiner will follow
                    self._state.mirror(True)
                return self._digest()
            case Serve():
                return self._serve(order)
            case Follow():
                return self._follow(order)
            case CatchUp():
                return self._catch_up(order)

    def keep_up_until(self, interrupted: Callable[[float], bool]) -> None:
        """Follow the core, if this replica is a joiner, until `interrupted` returns true. `interrupted` is called with
        the seconds that it may wait."""
        while self._follower is not None and not interrupted(_LOOK_SECONDS):
            self._keep_up()

    def stop_following(self) -> None:
        """Stop following. This happens after the answer to `Enter`, since unmapping a large state takes as long as many
        messages."""
        self._follower = None

    def _enter(self, generation: int) -> Entered:
        try:
            self._state.mirror(False)
            self.exchange.enter(generation)
        except PeerLostError as error:
            return Entered(generation, str(error))
        return Entered(generation, "")

    def _serve(self, order: Serve) -> Serving:
        if self._relay is not None:
            self._relay.end()
        try:
            self._relay = Relay(order, self._state.place, self._state.shape)
        except OSError as error:
            return Serving([], str(error))
        return Serving([self._relay.port], "")

    def _follow(self, order: Follow) -> StateDigest:
        self._follower, self._behind = None, ""
        [place] = order.places
        try:
            self._follower = Follower(self._state.publication_at(place), self._state)
        except (LayoutError, OSError) as error:
            self._behind = f"the core's state cannot be read: {error}"
        self._keep_up()
        return self._digest()

    def _catch_up(self, order: CatchUp) -> StateDigest:
        ends = time.monotonic() + order.seconds
        while self._follower is not None and self._number() < order.number and time.monotonic() < ends:
            time.sleep(_LOOK_SECONDS)
            self._keep_up()
        ready = self.exchange.formed(order.generation, max(0.0, ends - time.monotonic()))
        return self._digest(ready)

    def _keep_up(self) -> None:
        if self._follower is None:
            return
        try:
            self._follower.advance()
        except (BehindError, SilentError, UnreachableError) as error:
            self._follower, self._behind = None, str(error)
        self._pacer.pace()

    def _digest(self, ready: bool = False) -> StateDigest:
        state = self._state
        return StateDigest(self._number(), state.checksum, state.size, [state.place], ready, self._behind)

    def _number(self) -> int:
        """The number of the local state; -1 if the local state is not a state of the core."""
        if self._behind:
            return -1
        if self._follower is None:
            return self._state.number
        return -1 if self._follower.number is None else self._follower.number
