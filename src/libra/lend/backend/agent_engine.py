"""The engine on a lent device, and its connection to the run that uses it. Turns and weights pass through this module.

Invariant: a run gets only the results of its own turns, and the engine computes these turns only with weights of this
run. A run keeps the engine until it disconnects. Without a run, the engine computes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from libra.backends.launch.fork_server import ForkError
from libra.backends.launch.launcher import LocalLauncher, WorkerLink
from libra.backends.tiny_model import kv_bytes_per_token, vocabulary
from libra.backends.transport.channel import AgentChannel, ToWorker
from libra.backends.transport.engine_messages import (
    Borrow,
    ExpectWeights,
    Generate,
    Generated,
    Interrupt,
    Lent,
    Loaded,
    LoadWeights,
    LoanState,
    NotNow,
)
from libra.backends.transport.messages import Acknowledged, Failure, Ready, Stop
from libra.backends.weights.grid import Grid
from libra.exec.background import background
from libra.lend.backend.engine_weights import EngineWeights
from libra.lend.backend.lender_file import LoanOrder
from libra.lend.backend.own_socket import trusted_peer
from libra.lend.backend.rollout_model import RolloutModel
from libra.lend.backend.turn_limits import TurnLimits

# Looks, a second apart, at an engine that has turns and sends nothing, before the engine counts as lost. Looks are
# counted and not seconds: an agent that was stopped itself reads the waiting messages at its next look.
_SILENT = 10
_LOADING = 300  # the same, for an engine that loads weights
_SHOWN = 40  # characters of an id in a message
_INTRODUCTION = 10.0  # seconds in which a new connection has to send its request


class AgentEngine:
    """The borrowing engine. Calls `changed` when the engine has been started, is ready, or has ended."""

    def __init__(
        self,
        order: LoanOrder,
        launcher: LocalLauncher,
        logs: Path,
        told: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self._order, self._launcher, self._told, self._changed = order, launcher, told, changed
        start = order.start
        self._limits = TurnLimits(start.max_model_len, vocabulary(Path(start.model_directory)))
        self.ready = False
        self.turns: set[str] = set()  # the run's names of its turns in the engine
        self._link: WorkerLink | None = None
        self._silent = 0  # looks since the engine's last message
        self._loan = self._loan_before = LoanState("", 0.0, 0.0, 0, 0)  # now, and when the controller connected
        self._controller: AgentChannel | None = None
        self._visits = 0  # controllers so far; distinguishes turns of two controllers with the same name
        self._refresh_kv = self._follows = False  # the controller's wishes
        self._weights = EngineWeights(launcher.weights, logs / "follower.log", self._load, self._no_weights)
        self._expected: ExpectWeights | None = None  # the last such message to the engine
        self._held: LoadWeights | None = None  # the run's weights that the engine has loaded
        self._own = True  # whether the engine still has its initial weights
        self._sources = 0  # sources of weights so far; distinguishes versions of two sources with the same number
        self._loaded: asyncio.Future[Loaded | Failure | None] | None = None  # answer to a load; None: engine has ended

    @property
    def there(self) -> bool:
        """Whether the engine was started and has not ended."""
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """Process ID of the engine; None until the engine is ready."""
        return self._link.pid if self._link is not None and self.ready else None

    async def live(self) -> str:
        """Run the engine from its start to its end; returns the reason of its end."""
        try:
            link = await self._launcher.spawn("borrower", 0)
        except ForkError as error:
            return str(error)
        self._link, self._silent = link, 0
        self._changed()
        listening = asyncio.create_task(self._hear(link))
        try:
            link.channel.send(self._order.start)
            while not listening.done():
                await asyncio.wait([listening], timeout=1.0)
                self._silent += 1
                if not listening.done() and (why := self._hangs()):
                    return why
            return listening.result()
        finally:
            listening.cancel()
            self._link = self._expected = self._held = None
            self.ready, self._own = False, True
            self._loan = self._loan_before = LoanState("", 0.0, 0.0, 0, 0)
            self._answered(None)
            self._changed()
            self._launcher.kill(link)
            link.channel.close()
            self._hang_up()
            await self._launcher.gone(link)

    async def close(self) -> None:
        self._answered(None)
        await self._weights.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until it or the engine ends."""
        channel = AgentChannel(reader, writer)
        try:
            trusted_peer(writer.get_extra_info("socket"))
            async with asyncio.timeout(_INTRODUCTION):
                first = await channel.receive()
            refusal = self._refusal(first)
            if refusal is None:
                assert isinstance(first, Borrow)
                await self._welcome(channel, first)
            else:
                channel.send(refusal)
            while self._controller is channel and self._obey(channel, await channel.receive()):
                pass
        except msgspec.MsgspecError as error:
            channel.send(Failure(f"not a message to an agent of this version of libra: {error}"))
        except (TimeoutError, ConnectionError, PermissionError):
            pass  # the controller is gone, or belongs to another user
        finally:
            if self._controller is channel:
                self._hang_up()
            channel.close()

    # The engine

    def _hangs(self) -> str | None:
        """Reason why the engine counts as lost; None: it does not."""
        if self._loaded is not None:
            return f"it loaded no weights in {_LOADING} s" if self._silent > _LOADING else None
        if self.turns and self._silent > _SILENT:
            return f"it has {len(self.turns)} turns and reported nothing for {_SILENT} s"
        return None

    async def _hear(self, link: WorkerLink) -> str:
        last = "it is gone"
        try:
            while True:
                message = await link.channel.receive()
                self._silent = 0
                match message:
                    case Ready():
                        self.ready = True
                        self._changed()
                        self._told(f"the borrower is ready after {message.seconds:.1f} s")
                    case Generated():
                        self._loan = message.loan or self._loan
                        self._pass_on(message)
                    case Loaded() | Failure() if self._loaded is not None:
                        self._answered(message)
                    case Failure():
                        last = message.error
                    case _:
                        pass  # no request waits for this message
        except (ConnectionError, msgspec.MsgspecError) as error:
            return last if isinstance(error, ConnectionError) else f"it sent an unknown message: {error}"

    def _pass_on(self, said: Generated) -> None:
        """Send the controller only reports of its own turns: turns of an earlier controller may still be running."""
        visit = f"{self._visits}."
        ended = [turn.removeprefix(visit) for turn in said.ended if turn.startswith(visit)]
        pieces = [
            msgspec.structs.replace(piece, turn=piece.turn.removeprefix(visit))
            for piece in said.pieces
            if piece.turn.startswith(visit)
        ]
        self.turns.difference_update(ended)
        if self._controller is not None:
            loan = _since(self._loan_before, self._loan)
            self._controller.send(msgspec.structs.replace(said, pieces=pieces, ended=ended, loan=loan))

    # Weights

    async def _load(self, order: LoadWeights) -> None:
        link = self._link
        if link is None or self._expected is None:
            return  # `_welcome` sends the weights to the next engine
        if order == self._held:
            return
        self._loaded = asyncio.get_running_loop().create_future()
        self._own, self._silent, source = False, 0, self._sources
        link.channel.send(order)
        try:
            said = await self._loaded
        finally:
            self._loaded = None
        if source != self._sources:
            return  # another run has connected during the load
        if isinstance(said, Loaded):
            self._held = order
            if self._controller is not None:
                self._controller.send(said)
        elif said is not None:
            self._no_weights(said.error)

    def _answered(self, said: Loaded | Failure | None) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(said)

    def _no_weights(self, why: str) -> None:
        """Send the run the reason and disconnect; it has to connect again."""
        self._told(f"no weights: {why}")
        if self._controller is not None:
            self._controller.send(Failure(why))
        self._hang_up()

    # A controller

    def _refusal(self, wanted: object) -> Failure | NotNow | None:
        if not isinstance(wanted, Borrow):
            return Failure(f"an agent got {type(wanted).__name__}; a controller begins with Borrow")
        if (other := self._other(wanted)) is not None:
            return Failure(other)
        if self._controller is not None:
            return NotNow("another controller has this engine; only one controller can have it at a time")
        return None if self.ready else NotNow("the engine is not ready yet; try again")

    def _other(self, wanted: Borrow) -> str | None:
        """Reason why the engine does not fit this run; None if it fits."""
        start = self._order.start
        directory = Path(start.model_directory)
        kv_tokens = start.kv_cache_bytes // kv_bytes_per_token(directory, start.dtype)
        for name, there in (
            ("max_model_len", start.max_model_len),
            ("max_num_seqs", start.max_num_seqs),
            ("kv_tokens", kv_tokens),
        ):
            if getattr(wanted, name) > there:
                return f"{name} is {there} in the lent engine, but the run needs {getattr(wanted, name)}"
        if not wanted.layout:
            return None
        try:
            return RolloutModel.read(directory, start.dtype).difference(wanted.layout, json.loads(wanted.config))
        except (ValueError, RecursionError) as error:
            return str(error)

    async def _welcome(self, channel: AgentChannel, wanted: Borrow) -> None:
        self._controller, self._visits = channel, self._visits + 1
        self._refresh_kv, self._follows = wanted.refresh_kv, wanted.weights is not None
        if wanted.weights is not None:
            grid = Grid.of(wanted.layout, wanted.buffer_bytes)
            if not self._weights.follows(wanted.weights, grid):
                self._sources, self._held = self._sources + 1, None
                await self._weights.follow(wanted.weights, grid)
        terms = self._order.terms
        self._loan_before = self._loan
        channel.send(Lent(terms.model, terms.envelope.rate, self._loan.away))
        if self._held is not None:
            channel.send(Loaded(self._held.version, 0.0))
        elif wanted.weights is not None and self._link is not None:
            # An engine that was started later than the follower loads the weights that have already arrived.
            self._expected = ExpectWeights(wanted.layout, wanted.buffer_bytes)
            self._link.channel.send(self._expected)
            background(self._weights.bring(), "bring weights")

    def _obey(self, channel: AgentChannel, message: ToWorker) -> bool:
        """Carry out one order of the controller. Returns False to disconnect the controller."""
        engine = self._link
        match message:
            case Generate() if engine is not None and self.ready:
                if not (self._held if self._follows else self._own):
                    channel.send(Failure("a turn arrived before weights of this run"))
                    return False
                if why := self._limits.objection(message, self.turns):
                    channel.send(Failure(f"turn {message.id[:_SHOWN]!r}: {why}"))
                    return False
                self.turns.add(message.id)
                name = f"{self._visits}.{message.id}"
                engine.channel.send(msgspec.structs.replace(message, id=name, salt=self._salt(message.salt)))
            case Interrupt() if engine is not None:
                if message.id in self.turns:
                    engine.channel.send(Interrupt(f"{self._visits}.{message.id}"))
            case Stop():
                channel.send(Acknowledged())
                return False
            case Generate() | Interrupt():
                return False  # the engine has ended
            case _:
                channel.send(Failure(f"an engine on a lent device accepts no {type(message).__name__}"))
                return False
        return True

    def _salt(self, asked: str | None) -> str:
        """The namespace of a turn in the prefix cache: KV of other weights must not be reused."""
        version = f"v{self._held.version}" if self._refresh_kv and self._held is not None else ""
        return f"{self._sources}{version}.{asked or ''}"

    def _hang_up(self) -> None:
        """Disconnect the controller. The engine keeps its weights, and computes nothing without a controller."""
        controller, self._controller = self._controller, None
        if controller is not None:
            controller.close()
        if self._link is not None:
            for turn in self.turns:
                self._link.channel.send(Interrupt(f"{self._visits}.{turn}"))
        self.turns.clear()


def _since(before: LoanState, now: LoanState) -> LoanState:
    """Result of the loan between two states."""
    return LoanState(
        now.away,
        now.wanted - before.wanted,
        now.lent - before.lent,
        now.grants - before.grants,
        now.overstayed - before.overstayed,
    )
