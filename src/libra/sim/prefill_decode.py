"""Prompts are computed on some engines, and tokens generated on others, which pull the KV.

Invariant: a request is on one engine at a time, and every request ends or has a reason. Its KV stays where the prompt
was computed until the engine that goes on with it has read it, or the lease on it ends. As vLLM's NIXL connector in
pull mode: the first engine is asked for one token, the second one computes the last token of the prompt again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra.sim.clock import ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.frontend import Frontend, Host
from libra.sim.handover import KVMoves
from libra.sim.kv_network import KVNetwork
from libra.sim.kv_pulls import HandedOver, Prefill, Pulls
from libra.sim.placement import Placer
from libra.sim.workload.caller import Caller

_HEARTBEATS = 6  # in a lease
_EXTENSION = (2, 3)  # of a lease, that a heartbeat gives from then on


class PrefillDecode(Frontend):
    """Of engines with roles: requests that are handed over, and the KV kept for that. Without `keep`, `handed_over`
    stays empty."""

    def __init__(
        self,
        host: Host,
        placer: Placer,
        decoders: Placer,
        settings: KVNetwork,
        *,
        keep: bool,
        patient: bool,
        kv_moves: KVMoves | None,
        interrupted: Callable[[Request, int], Request] | None,
    ) -> None:
        super().__init__(host, placer, patient=patient, kv_moves=kv_moves, interrupted=interrupted)
        self.settings, self.decoders = settings, decoders
        self.placers = placer, decoders
        self.transfers = 0
        self.handed_over: list[HandedOver] = []  # in the order in which their prompts were computed
        self._keep = keep
        self._lease = ticks(settings.lease)
        self._stayed: set[str] = set()  # trajectories none of whose prompts went to an engine for prompts
        self._prefills: dict[Request, Prefill] = {}  # by the whole, from its placement until its KV is let go
        self._pulls = Pulls(settings, host.specs, host.at, self._arrived)
        self._broken: set[int] = set()  # engines that nothing can be read from

    @property
    def idle(self) -> bool:
        """Whether nothing is handed over, or kept for that."""
        return not self._prefills and not len(self._pulls)

    @property
    def transferred_bytes(self) -> int:
        return self._pulls.bytes

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Sent by all engines, and received: of transfers that ended."""
        return self._pulls.moved_bytes

    def placer_of(self, spec: EngineSpec) -> Placer:
        return self.decoders if spec.role.takes == "context" else self.placer

    # The way of a request

    def place(self, request: Request, again: bool) -> SimEngine | None:
        engine, owner = self._stays(request), request.owner
        if not isinstance(owner, Caller):
            return engine or self.placer.place(request, again=again)
        name = owner.trajectory.id
        if engine is not None:
            if not owner.position:
                self._stayed.add(name)
            return engine
        again = again or name in self._stayed  # its policy has not heard of the trajectory
        self._stayed.discard(name)
        return self.placer.place(request, again=again)

    def _stays(self, request: Request) -> SimEngine | None:
        """The engine that generates, if it computes the prompt, too: little of that is missing there."""
        if not self.settings.local_below:
            return None
        engine = self.decoders.place(request, again=True)
        if engine is None:
            return None
        request.ask_at = None  # the policy that is asked about requests does not know this one
        missing = request.prompt_tokens - engine.cached_tokens(request, self.host.now)
        return engine if missing < self.settings.local_below else None

    def send(self, request: Request, engine: SimEngine) -> None:
        """Where an engine hands over, only the prompt is computed there."""
        host = self.host
        if not host.specs[engine.index].role.hands_over:
            super().send(request, engine)
            return
        prefill = self._prefills[request] = Prefill(request, engine)
        request.engine = engine.index
        host.changed(engine, engine.submit(prefill.part, host.now))
        if prefill.part.status == "refused":
            del self._prefills[request]
            request.status, request.reason, request.finish = "refused", prefill.part.reason, host.now
            host.ended(request)

    def finished(self, request: Request, now: int) -> bool:
        if not isinstance(request.owner, Prefill):
            return super().finished(request, now)
        self._prefilled(request.owner, now)
        return False

    def planned(self, engine: SimEngine, now: int) -> None:
        """Pulls of KV that begin, or failed, with an engine's plan."""
        for request in engine.failed:
            self.host.ended(request)
        for request, blocks in engine.pulls:
            prefill = self._prefills[request]
            source = prefill.engine
            if source.closing or source.index in self._broken:
                why = self._why(source)
                self.host.at(now, lambda tick, it=prefill, why=why: self._lost(it, why, tick))  # type: ignore[misc]
                continue
            self._pulls.begin(prefill, engine, blocks, now)
        self._pulls.look_again(now)

    def give_up(self, request: Request, engine: SimEngine, submitted: Request) -> None:
        prefill, now = self._prefills.get(request), self.host.now
        if prefill is not None and prefill.decoder is None:  # its prompt is not computed yet
            del self._prefills[request]
            request.status, request.finish = "cancelled", now
            engine, submitted = prefill.engine, prefill.part
        elif prefill is not None and request.pull:  # nobody will read its KV
            self._let_go(prefill, now)
        super().give_up(request, engine, submitted)

    def resume(self, engine: SimEngine, request: Request, now: int) -> None:
        if isinstance(request.owner, Prefill):
            del self._prefills[request.owner.request]
            self.arrive_again(request.owner.request)
        else:
            super().resume(engine, request, now)

    def under_way(self) -> Sequence[Request]:
        """Requests whose prompts are not computed yet."""
        return [it.request for it in self._prefills.values() if it.decoder is None]

    def _prefilled(self, prefill: Prefill, now: int) -> None:
        """The prompt is computed: another engine goes on."""
        request, part = prefill.request, prefill.part
        if request.status == "cancelled":
            self._let_go(prefill, now)
            return
        _copy(part, request)
        ask_at = request.ask_at  # it was placed in this bucket by that policy
        engine = self.decoders.place(request, again=True, bucket=self.placer.bucket_of(prefill.engine))
        request.ask_at = ask_at
        if engine is None:
            if self.patient:  # its prompt is computed anew, and the KV stays until the lease ends
                self.host.at(now + self._lease, lambda tick: self._let_go(prefill, tick))
                del self._prefills[request]
                request.scheduled = request.prefill_end = None
                request.cached_tokens = 0
            else:
                self._let_go(prefill, now)
            self.not_placed(request)
            return
        prefill.decoder, prefill.known_since = engine, now
        if self._keep:
            source = prefill.engine
            blocks = source.config.blocks(part.prompt_tokens)
            prefill.record = HandedOver(request.number, source.index, engine.index, blocks, now)
            self.handed_over.append(prefill.record)
        request.pull = True
        self.host.changed(engine, engine.submit(request, now))
        if request.status == "refused":
            self._let_go(prefill, now)
            self.host.ended(request)

    # What is lost

    def fail(self, engine: SimEngine, now: int) -> None:
        """Nothing can be read from an engine any more: what is on its way is lost."""
        self._broken.add(engine.index)
        for prefill in [it for it in self._prefills.values() if it.engine is engine and it in self._pulls]:
            self._lost(prefill, self._why(engine), now)

    def fail_pull(self, request: Request, now: int) -> None:
        """What is on its way of one request is lost, if anything is."""
        prefill = self._prefills.get(request)
        if prefill is not None and prefill in self._pulls:
            self._lost(prefill, self._why(prefill.engine), now)

    def closed(self, engine: SimEngine, now: int) -> None:
        """An engine stopped for good: nobody reads what it had, nor what was kept for it."""
        self.fail(engine, now)
        for prefill in [it for it in self._prefills.values() if it.decoder is engine]:
            self._forget(prefill, now)

    def _why(self, source: SimEngine) -> str:
        return f"nothing comes from {self.host.specs[source.index].name}"

    # KV that is kept

    def _arrived(self, prefill: Prefill, now: int) -> None:
        decoder = prefill.decoder
        if decoder is None or decoder.closing:
            return  # it was forgotten meanwhile
        self.transfers += 1
        if prefill.record is not None:
            prefill.record.came = now
        self.host.changed(decoder, decoder.pull_ended(prefill.request, now))
        self._let_go(prefill, now)

    def _lost(self, prefill: Prefill, why: str, now: int) -> None:
        decoder = prefill.decoder
        self._pulls.drop(prefill, now)
        if decoder is not None and not decoder.closing:
            self.host.changed(decoder, decoder.pull_ended(prefill.request, now, why))
        self._forget(prefill, now)

    def _forget(self, prefill: Prefill, now: int) -> None:
        """Nobody says any more that the KV is needed: it stays until the lease ends."""
        self._pulls.drop(prefill, now)
        self._prefills.pop(prefill.request, None)
        finish = prefill.part.finish
        if finish is None:
            return
        since = finish if prefill.known_since is None else prefill.known_since
        beat = since + (now - since) // (self._lease // _HEARTBEATS) * (self._lease // _HEARTBEATS)
        numerator, denominator = _EXTENSION
        end = max(finish + self._lease, beat + self._lease * numerator // denominator)
        prefill.decoder = None
        self.host.at(max(now, end), lambda tick: self._let_go(prefill, tick))

    def _let_go(self, prefill: Prefill, now: int) -> None:
        if self._prefills.get(prefill.request) is prefill:  # its prompt may be computed anew by now
            del self._prefills[prefill.request]
        if prefill.record is not None:
            prefill.record.released = now
        engine = prefill.engine
        if not engine.closed:
            sooner = engine.sent(prefill.part, now)
            if engine.busy or engine.waiting or engine.ready:
                self.host.changed(engine, sooner)
            else:
                self.host.look_at(engine)


def _copy(part: Request, whole: Request) -> None:
    """What became of a request's prompt."""
    if whole.scheduled is None:
        whole.scheduled, whole.prefill_end = part.scheduled, part.prefill_end
        whole.cached_tokens = part.cached_tokens
    whole.preemptions += part.preemptions
