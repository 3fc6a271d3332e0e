"""The gradient exchange between training replicas, whose membership changes between steps.

Invariant: what is added up is the unnormalised gradient and the loss denominator; the division happens once, after the
exchange. A membership is one numbered generation. It is formed on a thread of its own while training goes on in the one
before, and entered between two steps. A replica that goes away fails the collective of everyone else.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, TCPStore

from libra.backends.transport.trainer_messages import FORMING_SECONDS, HostRendezvous, Prepare

FORMING = timedelta(seconds=FORMING_SECONDS)


class PeerLostError(RuntimeError):
    """A collective failed because another replica is gone, or too late."""


@dataclass(frozen=True, slots=True)
class _Forming:
    """A membership on its way. Its group is None for a replica that is alone."""

    order: Prepare
    process: int
    group: Future[ProcessGroupGloo | None] = field(default_factory=Future)


class GradientExchange:
    """One replica's membership. Alone (size 1) every verb is free.

    Of a replica of several processes, each exchanges its part with the process of the same number in the others."""

    def __init__(self, process: int = 0) -> None:
        self._process = process
        self._store: TCPStore | None = None  # of the replica that is rank 0: where the others find it
        self._deaf: OSError | None = None  # why this replica cannot listen
        self._forming: _Forming | None = None
        self._group: ProcessGroupGloo | None = None
        self.size = 1

    def host_rendezvous(self, order: HostRendezvous) -> int:
        """Be where replicas meet, at the same port as before if it will do. Returns the port; 0 when this replica
        cannot listen there, and `enter` tells why. Only its first process listens."""
        if self._process:
            return 0
        store = self._store
        if store is None or store.host != order.host or order.port not in (0, store.port):
            try:
                store = self._store = _serve_store(order.host, order.port)
            except OSError as error:
                self._deaf = error
                return 0
        port: int = store.port
        return port

    def prepare(self, order: Prepare) -> None:
        """Start to form a membership beside the present one, instead of any that was prepared and not entered."""
        self._forming = forming = _Forming(order, self._process)
        if order.size <= 1:
            forming.group.set_result(None)
        elif not order.port:
            forming.group.set_exception(self._deaf or ConnectionError("the first replica cannot listen"))
        else:
            Thread(target=_form, args=(forming,), name=f"generation {order.generation}", daemon=True).start()

    def formed(self, generation: int, seconds: float) -> bool:
        """Whether that membership can be entered without waiting, after at most `seconds`."""
        forming = self._prepared(generation)
        with contextlib.suppress(Exception):  # how it failed is told by `enter`
            forming.group.result(seconds)
        return forming.group.done() and forming.group.exception() is None

    def enter(self, generation: int) -> None:
        """Exchange with the replicas of that membership from now on.

        Raises `PeerLostError` when not everyone came; this replica then exchanges nothing until the next membership."""
        forming = self._prepared(generation)
        self._forming, self._group, self.size = None, None, forming.order.size
        try:
            self._group = forming.group.result(FORMING.total_seconds())
        except (RuntimeError, OSError) as error:
            what = f"membership {generation} of {self.size} replicas"
            raise PeerLostError(f"{what} did not come about: {str(error) or 'not all of them came'}") from error

    def add_up(self, tensor: torch.Tensor, seconds: float) -> float:
        """Replace the tensor by its sum over all replicas, in place; waits at most `seconds` for each of them. Returns
        the seconds that it took. Raises `PeerLostError`; the tensor is then of no use, and this membership is over."""
        if self.size <= 1:
            return 0.0
        if self._group is None:
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: the membership is over")
        began = time.monotonic()
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            self.give_up()  # the others need not wait for their deadline
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: {error}") from error
        return time.monotonic() - began

    def give_up(self) -> None:
        """This membership is over. Who still counts on this replica finds out at once."""
        self._group = None  # closes the connections

    def _prepared(self, generation: int) -> _Forming:
        if self._forming is None or self._forming.order.generation != generation:
            raise ValueError(f"membership {generation} was not prepared")
        return self._forming


def _form(forming: _Forming) -> None:
    order = forming.order
    try:
        # A connection of its own: one that waits for a replica that never comes must not block the next forming.
        found = TCPStore(order.host, order.port, is_master=False, timeout=FORMING, wait_for_workers=False)
        options = ProcessGroupGloo._Options()
        options._timeout = FORMING
        options._devices = [ProcessGroupGloo.create_device(hostname=order.address)]
        store = PrefixStore(f"generation-{order.generation}-process-{forming.process}", found)
        forming.group.set_result(ProcessGroupGloo(store, order.rank, order.size, options))
    except Exception as error:  # noqa: BLE001 - the end of a thread: `enter` raises it
        forming.group.set_exception(error)


def _serve_store(host: str, port: int) -> TCPStore:
    """The meeting place, for those who reach this address; 0: at any free port."""
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, timeout=FORMING, wait_for_workers=False, master_listen_fd=listener.detach()
    )
