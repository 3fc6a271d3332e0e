"""Joining of a replica: it catches up during the steps of the others, then enters between two of them.

Invariant: it enters only after a proof that it holds the core's state, and the boundary between two steps is held only
for messages. There are two exceptions: a joiner whose every copy was overtaken, and one that was busy with a copy or an
update at many boundaries. The core then makes no step until the joiner is done.
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

COURTEOUS = 15  # first of the `JOIN_BOUNDARIES`, at which it is let in only if it is ready at once
HOLD = 0.02  # seconds that a step boundary waits for a joiner that is nearly there
HOLD_SHARE = 0.03  # of a step, where that is longer: large updates take the joiner about as long as the core
SLOWEST = 100e6  # bytes a second of a vector that is copied; a network that is slower takes too long for joins

Places = list[StatePlace | RelayPlace]


class JoinError(WorkerFailedError):
    """A replica does not catch up with the core."""


class Joiner:
    """A started replica on its way in."""

    def __init__(
        self, replica: Handle, core: bool, membership: Membership, boundary: Boundary, step_seconds: float
    ) -> None:
        """`step_seconds`: duration of a step, 0 where it is not known."""
        self._replica, self._core, self._membership, self._boundary = replica, core, membership, boundary
        self._hold = max(HOLD, HOLD_SHARE * step_seconds)
        self._late: asyncio.Task[StateDigest] | None = None  # an answer that a boundary did not wait for
        self._follows: Handle | None = None
        self._generation = 0  # for which it was prepared
        self._wanted: StateDigest | None = None  # the core's, at the last boundary
        self._behind = ""  # why it ceased to follow
        self._copy_seconds = 0.0  # for which it may be in the middle of a copy; 0: it has followed no core yet

    async def join(self) -> float:
        """Take the replica in; returns the seconds that a step waited for that. Raises `JoinError`,
        `WorkerLostError`."""
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
            f"worker {self._replica.name} cannot join: it was not level at {JOIN_BOUNDARIES} step boundaries"
        )

    def _is_stale(self) -> bool:
        """Whether the prepared generation is unusable, as at first and after the loss of a replica."""
        return self._follows is not self._membership.cores[0] or self._generation != self._membership.prepared

    async def _introduce(self, hold: float | None) -> None:
        """Let all replicas prepare the generation with the joiner, and the joiner follow the core. Do nothing if the
        joiner is in the middle of a copy and does not answer within `hold` seconds (None: no limit)."""
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
        """Admit the joiner if it holds the core's state and says so within `hold` seconds (None: no limit). Returns the
        seconds that a step waited at this boundary, or None if the joiner did not enter."""
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
        """The joiner's answer; None if it does not answer within `hold` seconds, since it is busy and will answer
        later.
        """
        self._late = asyncio.create_task(self._ask(order, deadline))
        await asyncio.wait([self._late], timeout=hold)
        if not self._late.done():
            return None
        answered, self._late = self._late, None
        return answered.result()

    async def _come_level(self, wanted: StateDigest) -> None:
        """Let the joiner reach the core's state of the last boundary while steps are made."""
        await self._hear_out()
        patience = self._membership.patience
        catch_up = CatchUp(wanted.number, self._generation, patience.unknown)
        there = await self._ask(catch_up, patience.unknown + patience.floor + self._copy_seconds)
        self._behind = there.behind
        if there.number == wanted.number and there.parameter_hash != wanted.parameter_hash:
            self._follows = None  # what it holds is not what the core held: from the beginning
        elif there.number == wanted.number and not there.ready:
            self._generation = 0  # it did not form: another one is prepared

    async def _hear_out(self) -> None:
        """Wait for the answer that came too late for a boundary, while steps are made."""
        if self._late is not None:
            late, self._late = self._late, None
            await late

    async def _follow(self, places: Places, here: StateDigest) -> None:
        self._copy_seconds = _copy_seconds(here)
        deadline = self._membership.patience.unknown + self._copy_seconds
        self._behind = (await self._ask(Follow(places), deadline)).behind

    async def _places(self, here: StateDigest) -> Places | None:
        """Places where the joiner reads the core's state: in memory that they share, or through a relay that now runs
        next to the core. None when the core is lost. Raises `JoinError`."""
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
        """Digest of the core's state; None when the core is lost."""
        core = self._membership.cores[0]
        deadline = self._membership.patience.floor + mirror_seconds(core)
        [digest] = await self._membership.ask([(core, Identify())], StateDigest, deadline=deadline)
        return digest


def mirror_seconds(core: Handle) -> float:
    """Time limit for a core on a GPU to copy its state and a gradient to where a joiner reads them, in seconds. It
    publishes at least half of the bytes of a vector."""
    return 0.0 if core.link.device == CPU else 4 * 2 * core.weight_bytes / OFF_GPU


def _copy_seconds(core: StateDigest) -> float:
    """Time limit for the slowest copy of a core's state and of the updates made meanwhile, in seconds."""
    return 6 * core.size / SLOWEST  # parameters and two moments; the ring keeps three gradients
