"""Prefill and decode on different engines: decode engines continue requests with KV from prefill engines.

Invariant: one engine computes a request's prompt, and another generates its tokens. Every request finishes or has a
reason why not. The KV of a prompt stays on its prefill engine until the KV has arrived or is no longer needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.frontend import Frontend, Host
from libra.sim.handover import KVMoves
from libra.sim.kv_network import KVNetwork
from libra.sim.kv_transfers import HandedOver, KVTransfers, Prefill
from libra.sim.placement import Placer
from libra.sim.workload.caller import Caller


class PrefillDecode(Frontend, ABC):
    """Front end for engines with roles, which moves requests from prefill to decode engines. Without `keep`,
    `handed_over` stays empty."""

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
        self.transfers = 0  # transfers that have arrived
        self.handed_over: list[HandedOver] = []  # in the order in which decode engines got the requests
        self._keep = keep
        self._stayed: set[str] = set()  # trajectories that have had no prompt on a prefill engine yet
        self._prefills: dict[Request, Prefill] = {}  # by whole request, from placement until the KV is released
        self._transfers = KVTransfers(settings, host.specs, host.at, self._arrived)
        self._broken: set[int] = set()  # engines whose KV cannot be read

    @property
    def idle(self) -> bool:
        """Whether no KV is in transfer, or kept for a transfer."""
        return not self._prefills and not len(self._transfers)

    @property
    def transferred_bytes(self) -> int:
        return self._transfers.bytes

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """(bytes sent, bytes received) by all engines, in transfers that have ended."""
        return self._transfers.moved_bytes

    def placer_of(self, spec: EngineSpec) -> Placer:
        return self.decoders if spec.role.takes == "context" else self.placer

    # Requests

    def place(self, request: Request, again: bool) -> SimEngine | None:
        engine, owner = self._stays(request), request.owner
        if not isinstance(owner, Caller):
            return engine or self.placer.place(request, again=again)
        name = owner.trajectory.id
        if engine is not None:
            if not owner.position:
                self._stayed.add(name)
            return engine
        again = again or name in self._stayed  # the prefill policy does not know the trajectory yet
        self._stayed.discard(name)
        return self.placer.place(request, again=again)

    def _stays(self, request: Request) -> SimEngine | None:
        """The decode engine that also computes the prompt, because it lacks only few of the prompt's tokens; None if a
        prefill engine computes the prompt."""
        if not self.settings.local_below:
            return None
        engine = self.decoders.place(request, again=True)
        if engine is None:
            return None
        request.ask_at = None  # the policy that decides at `ask_at` has not placed this request
        missing = request.prompt_tokens - engine.cached_tokens(request, self.host.now)
        return engine if missing < self.settings.local_below else None

    def _decoder(self, prefill: Prefill) -> SimEngine | None:
        """The decode engine for a prompt, in the bucket of the prefill engine."""
        request = prefill.request
        ask_at = request.ask_at  # from the prefill policy, which has placed the request in this bucket
        engine = self.decoders.place(request, again=True, bucket=self.placer.bucket_of(prefill.engine))
        request.ask_at = ask_at
        return engine

    def send(self, request: Request, engine: SimEngine) -> None:
        """Submit a request to its engine; only the prompt if the engine is a prefill engine."""
        if self.host.specs[engine.index].role.hands_over:
            self.hand_over(Prefill(request, engine))
        else:
            super().send(request, engine)

    @abstractmethod
    def hand_over(self, prefill: Prefill) -> None:
        """Begin a request for whose prompt a prefill engine was chosen."""

    def finished(self, request: Request, now: int) -> bool:
        if not isinstance(request.owner, Prefill):
            return super().finished(request, now)
        self.prefilled(request.owner, now)
        return False

    @abstractmethod
    def prefilled(self, prefill: Prefill, now: int) -> None:
        """Handle a computed prompt whose KV is kept."""

    def planned(self, engine: SimEngine, now: int) -> None:
        for request in engine.ended:
            self.host.ended(request)
        for request, blocks in engine.pulls:
            prefill = self._prefills[request]
            prefill.blocks = blocks
            if prefill.record is not None:
                prefill.record.reserved = now
            self.reserved(prefill, now)
        self._transfers.look_again(now)

    @abstractmethod
    def reserved(self, prefill: Prefill, now: int) -> None:
        """Handle a prompt for which the decode engine has reserved blocks in its plan."""

    # Losses

    def fail(self, engine: SimEngine, now: int) -> None:
        """Make the KV of an engine unreadable. Transfers in flight from this engine are lost."""
        self._broken.add(engine.index)
        for prefill in [it for it in self._prefills.values() if it.engine is engine and it in self._transfers]:
            self._lost(prefill, self._why(engine), now)

    def fail_pull(self, request: Request, now: int) -> None:
        """Lose the transfer of one request if the transfer is in flight."""
        prefill = self._prefills.get(request)
        if prefill is not None and prefill in self._transfers:
            self._lost(prefill, self._why(prefill.engine), now)

    def closed(self, engine: SimEngine, now: int) -> None:
        """Forget the KV on an engine that will not start again, and the KV that other engines keep for it."""
        self.fail(engine, now)
        for prefill in [it for it in self._prefills.values() if it.decoder is engine]:
            self.forget(prefill, now)

    @abstractmethod
    def forget(self, prefill: Prefill, now: int) -> None:
        """Forget a prompt's KV when it is no longer needed."""

    def _why(self, source: SimEngine) -> str:
        return f"nothing comes from {self.host.specs[source.index].name}"

    def _unreadable(self, source: SimEngine) -> bool:
        return source.closing or source.index in self._broken

    def _lost(self, prefill: Prefill, why: str, now: int) -> None:
        decoder = prefill.decoder
        self._transfers.drop(prefill, now)
        if decoder is not None and not decoder.closing:
            self.host.changed(decoder, decoder.pull_ended(prefill.request, now, why))
        self.forget(prefill, now)

    # KV that is kept

    def _arrived(self, prefill: Prefill, now: int) -> None:
        decoder = prefill.decoder
        if decoder is None or decoder.closing:
            return  # the KV was forgotten during the transfer
        self.transfers += 1
        if prefill.record is not None:
            prefill.record.came = now
        self.host.changed(decoder, decoder.pull_ended(prefill.request, now, first_token=self.settings.push))
        self._let_go(prefill, now)

    def _let_go(self, prefill: Prefill, now: int) -> None:
        if self._prefills.get(prefill.request) is prefill:  # otherwise the prompt is being computed again
            del self._prefills[prefill.request]
        if prefill.part.finish is None:
            return  # the prompt is not computed yet, so no KV is kept
        if prefill.record is not None:
            prefill.record.released = now
        engine = prefill.engine
        if not engine.closed:
            sooner = engine.sent(prefill.part, now)
            if engine.busy or engine.waiting or engine.ready:
                self.host.changed(engine, sooner)
            else:
                self.host.look_at(engine)


def copy_prompt(part: Request, whole: Request) -> None:
    """Copy the outcome of a request's prompt to the whole request."""
    if whole.scheduled is None:
        whole.scheduled, whole.prefill_end = part.scheduled, part.prefill_end
        whole.cached_tokens = part.cached_tokens
    whole.preemptions += part.preemptions
