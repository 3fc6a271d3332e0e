"""The agent of a server: a process that starts the borrowing engine, and renews the lender's word.

Invariant: the lender's word permits borrowing for a few seconds. The agent renews the word only while the certified
server is alive and the borrower makes progress. So a loan ends by itself when the agent is killed or stopped. A loan
needs no controller: a controller may connect, disconnect and return, and the engine keeps its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from libra.backends.launch.launcher import LocalLauncher
from libra.exec.background import background
from libra.lend.backend.agent_engine import AgentEngine
from libra.lend.backend.device_page import BorrowerTally, LendingError
from libra.lend.backend.lender_file import LoanOrder
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.own_socket import bind_own
from libra.lend.backend.record import open_record
from libra.lend.backend.server_watch import ServerWatch

_WORDS = 4  # renewals of the word in one lease
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a lost borrower is started again; doubled after each loss
_LEAVES, _LOOK = 5.0, 0.05  # seconds: most until the borrower of a killed agent has ended, and between two looks
_LOSSES = 5  # borrowers in a row that ended without a grant, before the loan ends


class LoanEndedError(RuntimeError):
    """A started loan cannot continue. The message is one line."""


@dataclass(frozen=True, slots=True)
class LendingPeriod:
    """Result of the loan in one period."""

    seconds: float
    lent: float  # share of the device's time
    grants: int
    tokens: int  # computed by the steps
    overstayed: int  # steps that ended after their grant
    over_bound: int  # steps that took longer than their bound
    turns: int  # of the controller, in progress
    requests: int  # users' requests that arrived
    live: int
    longest_step: float | None  # seconds (C); None: not known yet
    pace: float  # seconds a token (tau)
    why: str | None  # reason why nothing was lent; None: something was lent, or the borrower had no work


class LendingAgent:
    """The agent of one loan, from `open` to the loan's end."""

    def __init__(
        self,
        lender: LoanOrder,
        token: LenderToken,
        server: ServerWatch,
        launcher: LocalLauncher,
        logs: Path,
        told: Callable[[str], None],
    ) -> None:
        self._lender, self._token, self._server, self._told = lender, token, server, told
        self._engine = AgentEngine(lender, launcher, logs, told, self._word)
        self._before: tuple[float, BorrowerTally, int] | None = None
        self._unrecorded = False
        self.why: str | None = "the borrower starts"  # reason why the word is not renewed

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, lender: LoanOrder, logs: Path, told: Callable[[str], None]) -> AsyncIterator[LendingAgent]:
        """Open the loan. Raises LendingError if the device must not be lent, and LaunchError if no engine can be
        started.
        """
        token = LenderToken(lender.device)
        try:
            server = ServerWatch(lender, token)
            await _nobody_borrows(lender.device, token)
            _make_way(lender.listen)
            if (record := lender.record) is not None:
                os.close(open_record(record))  # raises now, before the borrower tries to open the record
            async with LocalLauncher.open(logs) as launcher:
                await launcher.ready()
                agent = cls(lender, token, server, launcher, logs, told)
                try:
                    async with _listening(agent._engine, lender.listen):
                        yield agent
                finally:
                    token.extend(0.0)
                    await agent._engine.close()
                    server.close()
        finally:
            token.close()

    async def run(self, ended: asyncio.Event) -> None:
        """Keep a borrowing engine running until `ended`. Raises LoanEndedError."""
        word = background(self._give_word(), "lender's word")
        over = asyncio.create_task(ended.wait())
        try:
            pause, losses = _FIRST_PAUSE, 0
            while not ended.is_set():
                grants = self._token.tally.grants
                life = asyncio.create_task(self._life())
                await asyncio.wait([life, over, word], return_when=asyncio.FIRST_COMPLETED)
                if word.done():
                    life.cancel()
                    await word
                if not life.done():
                    life.cancel()
                    await asyncio.gather(life, return_exceptions=True)
                    return
                why = life.result()
                losses = losses + 1 if self._token.tally.grants == grants else 0
                if losses >= _LOSSES:
                    raise LoanEndedError(f"the borrower ended {losses} times without a grant: {why}")
                pause = _FIRST_PAUSE if losses <= 1 else min(2 * pause, _LONGEST_PAUSE)
                self._told(f"the borrower ended: {why}; it is started again in {pause:.0f} s")
                await asyncio.wait([over, word], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            word.cancel()
            over.cancel()
            self._token.extend(0.0)

    @property
    def borrower(self) -> int | None:
        """Process ID of the engine; None until the engine is ready."""
        return self._engine.pid

    @property
    def tally(self) -> BorrowerTally:
        """Totals of the borrower so far."""
        return self._token.tally

    def period(self) -> LendingPeriod:
        """Result of the loan since the last call."""
        now, tally, notice = time.monotonic(), self._token.tally, self._token.look()
        then, before, came = self._before or (now, tally, notice.view.came)
        if tally.grants < before.grants:  # another borrower
            before = BorrowerTally()
        self._before = now, tally, notice.view.came
        if tally.unrecorded and not self._unrecorded:
            self._unrecorded = True
            self._told("the disk of the record is full: lending continues without a record")
        seconds, grants = now - then, tally.grants - before.grants
        why = self.why or ((tally.why or "no step has ended") if self._engine.turns and not grants else None)
        return LendingPeriod(
            seconds=seconds,
            lent=min(1.0, (tally.lent - before.lent) / seconds) if seconds > 0 else 0.0,
            grants=grants,
            tokens=tally.tokens - before.tokens,
            overstayed=tally.overstayed - before.overstayed,
            over_bound=tally.over_bound - before.over_bound,
            turns=len(self._engine.turns),
            requests=max(0, notice.view.came - came),
            live=notice.view.live,
            longest_step=tally.longest_step or None,
            pace=self._lender.terms.pace,
            why=why,
        )

    # The word

    async def _give_word(self) -> None:
        while True:
            if self._token.replaced:
                raise LoanEndedError(
                    f"{self._lender.device} was replaced by another file; start `libra lend serve` again"
                )
            self._word()
            await asyncio.sleep(self._lender.lease / _WORDS)

    def _word(self) -> None:
        objection = self._server.objection()
        self.why = objection or (None if self._engine.ready else "the borrower starts")
        given = objection is None and self._engine.there  # an engine that starts needs grants for its first steps, too
        self._token.extend(time.monotonic() + self._lender.lease if given else 0.0)

    async def _life(self) -> str:
        """Run one engine from its start to its end; returns the reason of its end."""
        try:
            return await self._engine.live()
        finally:
            self._token.borrower_gone()


async def _nobody_borrows(device: Path, token: LenderToken) -> None:
    """Raises LendingError if a process borrows the device without an agent."""
    until = time.monotonic() + _LEAVES
    while token.borrowed:
        if time.monotonic() > until:
            raise LendingError(f"{device}: a borrower without an agent has this device; end that process first")
        await asyncio.sleep(_LOOK)


def _make_way(listen: Path) -> None:
    """Remove the socket of a killed agent. Raises LendingError if the path has anything else."""
    try:
        found = listen.lstat()
        if not stat.S_ISSOCK(found.st_mode):
            raise LendingError(f"listen: {listen} exists and is not a socket; name another file, or remove this one")
        if found.st_uid != os.geteuid():
            raise LendingError(f"listen: {listen} belongs to user {found.st_uid}; name a socket in your own directory")
        with socket.socket(socket.AF_UNIX) as one:
            one.setblocking(False)
            one.connect(str(listen))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        listen.unlink(missing_ok=True)
        return
    except OSError:  # for example, its process is too busy to answer
        pass
    raise LendingError(f"listen: another process has the socket {listen}; name another socket, or end that process")


@contextlib.asynccontextmanager
async def _listening(engine: AgentEngine, listen: Path) -> AsyncIterator[None]:
    """Accept controllers at the socket `listen`, and remove the socket at the end. Raises LendingError."""
    try:
        controllers = await asyncio.start_unix_server(engine.serve, sock=bind_own(listen))
    except OSError as error:
        raise LendingError(f"listen: {listen}: {error.strerror}; name a socket that can be created") from None
    ours = listen.lstat()
    try:
        async with controllers:
            yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(listen.lstat(), ours):
                listen.unlink()
