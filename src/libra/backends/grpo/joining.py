"""Joins a replica to training: it catches up during the steps of the others, then enters between two of them.

Invariant: a joiner enters only after it has proved that it has the core's state, and it holds the boundary between two
steps only for messages. There are two exceptions: a joiner whose every copy became outdated, and a joiner that was busy
with a copy or an update at many boundaries. The core then makes no step until the joiner is done.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from libra.backends.devices import CPU
from libra.backends.grpo.membership import Boundary, Membership
from libra.backends.grpo.publication import OFF_GPU
from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Message
from libra.backends.transport.trainer_messages import (
    TOKEN_BYTES,
    CatchUp,
    Follow,
    Identify,
    RelayPlace,
    Serve,
    Serving,
    StateDigest,
    StatePlace,
)
from libra.exec.pool import JOIN_BOUNDARIES
from libra.exec.protocols import WorkerFailedError, WorkerLostError

COURTEOUS = 15  # of the `JOIN_BOUNDARIES`, the first ones, at which a joiner enters only if it is ready at once
HOLD = 0.02  # seconds that a step boundary waits for a joiner that is nearly ready
HOLD_SHARE = 0.03  # of a step, if that is longer: large updates take the joiner about as long as the core
SLOWEST = 100e6  # bytes per second at which a vector is copied at least; joins over slower networks take too long

Places = list[StatePlace | RelayPlace]


class JoinError(WorkerFailedError):
    """A replica does not catch up with the core."""


class Joiner:
    """A started replica that is about to join."""

    def __init__(
        self, replica: Handle, core: bool, membership: Membership, boundary: Boundary, step_seconds: float
    ) -> None:
        """`step_seconds` is the duration of a step; 0 if unknown."""
        self._replica, self._core, self._membership, self._boundary = replica, core, membership, boundary
        self._hold = max(HOLD, HOLD_SHARE * step_seconds)
        self._late: asyncio.Task[StateDigest] | None = None  # an answer for which a boundary did not wait
        self._follows: Handle | None = None
        self._generation = 0  # for which the joiner was prepared
        self._wanted: StateDigest | None = None  # the core's digest at the last boundary
        self._behind = ""  # reason why the joiner stopped following
        self._copy_seconds = 0.0  # longest time of a copy that it may be making; 0: it has followed no core yet

    async def join(self) -> float:
        """Join the replica; returns the seconds that a step waited for it. Raises `JoinError`, `WorkerLostError`."""
        try:
            for boundary in range(JOIN_BOUNDARIES):
                hold = self._hold if boundary < COURTEOUS else None
                if self._is_stale():
                    await self._introduce(hold)
                waited = await self._try_to_enter(hold)
                if waited is not None:
                    return waited
                if self._wanted is not None:
                    await self._come_level(self._wanted)
        finally:
            if self._late is not None:
                self._late.cancel()
        raise JoinError(
            f"worker {self._replica.name} cannot join: it was behind the core at {JOIN_BOUNDARIES} step boundaries"
        )

    def _is_stale(self) -> bool:
        """Whether no usable generation is prepared, as at the start and after the loss of a replica."""
        return self._follows is not self._membership.cores[0] or self._generation != self._membership.prepared

    async def _introduce(self, hold: float | None) -> None:
        """Have all replicas prepare the generation with the joiner, and have the joiner follow the core. Does nothing
        if the joiner is in the middle of a copy and does not answer within `hold` seconds (None: no limit)."""
        members, follows, places = self._membership, self._follows, None
        await self._hear_out()
        async with self._boundary:
            await members.tidy()
            if self._copy_seconds:
                deadline = members.patience.floor + self._copy_seconds
                if await self._answer_within(hold, Identify(), deadline) is None:
                    return
            rank = len(members.cores if self._core else members.replicas)
            present = members.replicas
            self._generation = await members.prepare([*present[:rank], self._replica, *present[rank:]])
            here = await self._core_digest()
            self._follows = members.cores[0] if here is not None else None
            if here is not None and self._follows is not follows:
                places = await self._places(here)
        if here is not None and places is not None:
            await self._follow(places, here)

    async def _try_to_enter(self, hold: float | None) -> float | None:
        """Admit the joiner if it reports the core's state within `hold` seconds (None: no limit). Returns the seconds
        that a step waited at this boundary, or None if the joiner did not enter."""
        members, self._wanted = self._membership, None
        async with self._boundary:
            began = time.monotonic()
            await members.tidy()
            here = await self._core_digest()
            if here is None or self._is_stale():
                return None
            if self._behind:
                places = await self._places(here)
                if places is None:
                    return None
                await self._follow(places, here)
                if self._behind:
                    raise JoinError(f"worker {self._replica.name} cannot join: {self._behind}")
            self._wanted = here
            catch_up = CatchUp(here.number, self._generation, HOLD)
            there = await self._answer_within(hold, catch_up, HOLD + members.patience.floor + self._copy_seconds)
            if there is None or not there.ready:
                return None
            if (there.number, there.parameter_hash) != (here.number, here.parameter_hash):
                return None
            (members.cores if self._core else members.hybrids).append(self._replica)
            await members.enter(self._generation)
            if self._replica.lost:
                raise WorkerLostError(f"worker {self._replica.name} was lost while it joined")
            return self._boundary.waited(began)

    async def _answer_within(self, hold: float | None, order: Message, deadline: float) -> StateDigest | None:
        """The joiner's answer; None if it does not come within `hold` seconds. The joiner is then busy, and answers
        later.
        """
        self._late = asyncio.create_task(self._ask(order, deadline))
        await asyncio.wait([self._late], timeout=hold)
        if not self._late.done():
            return None
        answered, self._late = self._late, None
        return answered.result()

    async def _come_level(self, wanted: StateDigest) -> None:
        """Have the joiner reach the core's state of the last boundary while steps are made."""
        await self._hear_out()
        patience = self._membership.patience
        catch_up = CatchUp(wanted.number, self._generation, patience.unknown)
        there = await self._ask(catch_up, patience.unknown + patience.floor + self._copy_seconds)
        self._behind = there.behind
        if there.number == wanted.number and there.parameter_hash != wanted.parameter_hash:
            self._follows = None  # its state differs from the core's: start over
        elif there.number == wanted.number and not there.ready:
            self._generation = 0  # it did not form the generation: prepare another one

    async def _hear_out(self) -> None:
        """Wait, while steps are made, for an answer that came too late for a boundary."""
        if self._late is not None:
            late, self._late = self._late, None
            await late

    async def _follow(self, places: Places, here: StateDigest) -> None:
        self._copy_seconds = _copy_seconds(here)
        deadline = self._membership.patience.unknown + self._copy_seconds
        self._behind = (await self._ask(Follow(places), deadline)).behind

    async def _places(self, here: StateDigest) -> Places | None:
        """Places at which the joiner reads the core's state: in shared memory, or through a relay started next to the
        core. None if the core is lost. Raises `JoinError`."""
        core, replica, patience = self._membership.cores[0], self._replica, self._membership.patience
        if core.node == replica.node:
            return [*here.places]
        token = secrets.token_hex(TOKEN_BYTES // 2)
        beside = tuple(number for number in core.link.cores if number != core.link.core)
        order = Serve(core.host, token, beside or core.link.cores)
        [serving] = await self._membership.ask([(core, order)], Serving, deadline=patience.floor)
        if serving is None:
            return None
        if serving.failure:
            why = f"its core's state cannot be read from node {replica.node}: {serving.failure}"
            raise JoinError(f"worker {replica.name} cannot join: {why}")
        return [RelayPlace(core.host, port, token) for port in serving.ports]

    async def _ask(self, order: Message, deadline: float) -> StateDigest:
        [digest] = await self._membership.ask([(self._replica, order)], StateDigest, deadline=deadline)
        if digest is None:
            raise WorkerLostError(f"worker {self._replica.name} was lost while it joined")
        return digest

    async def _core_digest(self) -> StateDigest | None:
        """Digest of the core's state; None if the core is lost."""
        core = self._membership.cores[0]
        deadline = self._membership.patience.floor + mirror_seconds(core)
        [digest] = await self._membership.ask([(core, Identify())], StateDigest, deadline=deadline)
        return digest


def mirror_seconds(core: Handle) -> float:
    """Seconds in which a core on a GPU must have copied its state and a gradient to where a joiner reads them. It
    publishes at least half of the bytes of a vector."""
    return 0.0 if core.link.device == CPU else 4 * 2 * core.weight_bytes / OFF_GPU


def _copy_seconds(core: StateDigest) -> float:
    """Seconds that the slowest copy of a core's state, and of the updates made meanwhile, may take."""
    return 6 * core.size / SLOWEST  # parameters, two moments, and the three gradients kept in the ring
