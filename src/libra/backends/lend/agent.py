"""The process beside a server: it starts the engine that borrows, and gives the lender's word for it.

Invariant: the word is given a few seconds at a time, and only while the server lives and is the one that was certified,
and the borrower goes on. So a loan ends by itself where this process is killed or stopped, and it needs no controller:
one may come, go and come back, and finds the engine with its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from libra.backends.launch.fork_server import ForkError
from libra.backends.launch.launcher import LocalLauncher, WorkerLink
from libra.backends.lend.device_page import BorrowerTally
from libra.backends.lend.lender_file import LoanOrder
from libra.backends.lend.lender_token import LenderToken
from libra.backends.lend.server_watch import ServerWatch
from libra.backends.transport.channel import AgentChannel
from libra.backends.transport.engine_messages import Generate, Generated, Interrupt, StartEngine
from libra.backends.transport.messages import Acknowledged, Failure, Ready, Stop
from libra.exec.background import background

_WORDS = 4  # in one lease
_SILENT = 10.0  # seconds without a report of an engine that has turns: it hangs, or was stopped
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a borrower that was lost is started again; doubles
_LOSSES = 5  # of borrowers that did not use a single grant: it will not work


class LoanEndedError(RuntimeError):
    """A loan that began cannot go on. One line."""


@dataclass(frozen=True, slots=True)
class LendingPeriod:
    """What came of the loan in one period."""

    seconds: float
    lent: float  # share of the device's time
    grants: int
    tokens: int  # that the steps computed
    overstayed: int
    over_bound: int
    turns: int  # that the controller has under way
    requests: int  # of users, that came
    live: int
    longest_step: float | None  # seconds (C); None: not known yet
    pace: float  # seconds a token (tau)
    why: str | None  # nothing was lent; None where something was, or nobody had anything to compute


class LendingAgent:
    """One loan, from `open` to its end."""

    def __init__(
        self,
        lender: LoanOrder,
        token: LenderToken,
        server: ServerWatch,
        launcher: LocalLauncher,
        told: Callable[[str], None],
    ) -> None:
        self._lender, self._token, self._server = lender, token, server
        self._launcher, self._told = launcher, told
        self._engine: WorkerLink | None = None
        self._ready: Ready | None = None
        self._controller: AgentChannel | None = None
        self._visits = 0  # of controllers: two may give their turns the same names
        self._turns: set[str] = set()  # of the controller, that the engine has, by its names
        self._heard = 0.0  # when the engine reported last
        self._before: tuple[float, BorrowerTally, int] | None = None
        self._unrecorded = False
        self.why: str | None = "the borrower starts"  # the word is not given

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, lender: LoanOrder, logs: Path, told: Callable[[str], None]) -> AsyncIterator[LendingAgent]:
        """Raises LendingError where the device is not to be lent, LaunchError where no engine can be started."""
        token = LenderToken(lender.device)
        try:
            server = ServerWatch(lender, token)
            async with LocalLauncher.open(logs) as launcher:
                await launcher.ready()
                lender.listen.unlink(missing_ok=True)  # of an agent that was killed: the token says there is no other
                agent = cls(lender, token, server, launcher, told)
                controllers = await asyncio.start_unix_server(agent._serve_controller, lender.listen)
                lender.listen.chmod(0o600)
                try:
                    async with controllers:
                        yield agent
                finally:
                    token.extend(0.0)
                    server.close()
                    lender.listen.unlink(missing_ok=True)
        finally:
            token.close()

    async def run(self, ended: asyncio.Event) -> None:
        """Keep an engine that borrows until `ended`. Raises LoanEndedError."""
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
        """The process of the engine, once it is ready."""
        return self._engine.pid if self._engine is not None and self._ready is not None else None

    @property
    def tally(self) -> BorrowerTally:
        """What the engine did so far."""
        return self._token.tally

    def period(self) -> LendingPeriod:
        """What came of the loan since the last call."""
        now, tally, notice = time.monotonic(), self._token.tally, self._token.look()
        then, before, came = self._before or (now, tally, notice.view.came)
        if tally.grants < before.grants:  # another borrower
            before = BorrowerTally()
        self._before = now, tally, notice.view.came
        if tally.unrecorded and not self._unrecorded:
            self._unrecorded = True
            self._told("the record has no room any more: lending goes on, unrecorded from here on")
        seconds, grants = now - then, tally.grants - before.grants
        why = self.why or ((tally.why or "no step has ended") if self._turns and not grants else None)
        return LendingPeriod(
            seconds=seconds,
            lent=min(1.0, (tally.lent - before.lent) / seconds) if seconds > 0 else 0.0,
            grants=grants,
            tokens=tally.tokens - before.tokens,
            overstayed=tally.overstayed - before.overstayed,
            over_bound=tally.over_bound - before.over_bound,
            turns=len(self._turns),
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
                raise LoanEndedError(f"{self._lender.device} is another file by now; start `libra lend serve` again")
            self._word()
            await asyncio.sleep(self._lender.lease / _WORDS)

    def _word(self) -> None:
        self.why = self._server.objection() or ("the borrower starts" if self._ready is None else None)
        self._token.extend(0.0 if self.why else time.monotonic() + self._lender.lease)

    # The engine

    async def _life(self) -> str:
        """Of one engine: from its start to its end, which is told."""
        try:
            link = await self._launcher.spawn("borrower", 0)
        except ForkError as error:
            return str(error)
        self._engine, self._heard = link, time.monotonic()
        listening = asyncio.create_task(self._hear(link))
        try:
            link.channel.send(self._lender.start)
            while not listening.done():
                await asyncio.wait([listening], timeout=1.0)
                if self._turns and not listening.done() and time.monotonic() - self._heard > _SILENT:
                    return f"it has {len(self._turns)} turns to make and said nothing for {_SILENT:.0f} s"
            return listening.result()
        finally:
            listening.cancel()
            self._engine = self._ready = None
            self._token.extend(0.0)
            self._launcher.kill(link)
            link.channel.close()
            self._hang_up()
            await self._launcher.gone(link)
            self._token.borrower_gone()

    async def _hear(self, link: WorkerLink) -> str:
        last = "it went away"
        try:
            while True:
                message = await link.channel.receive()
                self._heard = time.monotonic()
                match message:
                    case Ready():
                        self._ready = message
                        self._word()
                        self._told(f"the borrower is ready after {message.seconds:.1f} s")
                    case Generated():
                        self._pass_on(message)
                    case Failure():
                        last = message.error
                    case _:
                        pass  # nobody asked for anything else
        except (ConnectionError, msgspec.MsgspecError) as error:
            return last if isinstance(error, ConnectionError) else f"it sent what is not a message: {error}"

    def _pass_on(self, said: Generated) -> None:
        """To the controller, what is of its turns: those of one before it may not have ended yet."""
        visit = f"{self._visits}."
        ended = [turn.removeprefix(visit) for turn in said.ended if turn.startswith(visit)]
        pieces = [
            msgspec.structs.replace(piece, turn=piece.turn.removeprefix(visit))
            for piece in said.pieces
            if piece.turn.startswith(visit)
        ]
        self._turns.difference_update(ended)
        if self._controller is not None:
            self._controller.send(msgspec.structs.replace(said, pieces=pieces, ended=ended))

    # A controller

    async def _serve_controller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = AgentChannel(reader, writer)
        if self._controller is not None:
            channel.send(Failure("another controller has this engine; one at a time can"))
            channel.close()
            return
        self._controller, self._visits = channel, self._visits + 1
        try:
            while await self._obey(channel):
                pass
        except (ConnectionError, msgspec.MsgspecError):
            pass  # it went away, or is none
        finally:
            if self._controller is channel:
                self._hang_up()

    async def _obey(self, channel: AgentChannel) -> bool:
        """One order. False: it was the last."""
        message, engine = await channel.receive(), self._engine
        match message:
            case StartEngine():
                channel.send(welcome := self._welcome(message))
                return isinstance(welcome, Ready)
            case Generate() if engine is not None and self._ready is not None:
                self._turns.add(message.id)
                engine.channel.send(msgspec.structs.replace(message, id=f"{self._visits}.{message.id}"))
            case Interrupt() if engine is not None:
                if message.id in self._turns:
                    engine.channel.send(Interrupt(f"{self._visits}.{message.id}"))
            case Stop():
                channel.send(Acknowledged())
                return False
            case Generate() | Interrupt():
                return False  # to an engine that is gone
            case _:
                channel.send(Failure(f"an engine on a device that is lent takes no {type(message).__name__}"))
                return False
        return True

    def _welcome(self, wanted: StartEngine) -> Ready | Failure:
        ours = self._lender.start
        if self._ready is None:
            return Failure("the engine is not ready yet; come back")
        if wanted.max_model_len > ours.max_model_len:
            return Failure(f"max_model_len is {ours.max_model_len} here, {wanted.max_model_len} is wanted")
        return self._ready

    def _hang_up(self) -> None:
        """Without a controller nothing is computed; the engine keeps its weights."""
        controller, self._controller = self._controller, None
        if controller is not None:
            controller.close()
        if self._engine is not None:
            for turn in self._turns:
                self._engine.channel.send(Interrupt(f"{self._visits}.{turn}"))
        self._turns.clear()
