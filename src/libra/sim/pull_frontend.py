"""Front end for pulled KV: the decode engine pulls the KV of a computed prompt.

Invariant: a request is on one engine at a time. Its KV stays on the prefill engine until the decode engine has read the
KV, or the lease ends. As with vLLM's NIXL connector in pull mode, the prefill engine generates one token, and the
decode engine computes the last token of the prompt again.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.sim.clock import ticks
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.kv_transfers import HandedOver, Prefill
from libra.sim.prefill_decode import PrefillDecode, copy_prompt

_HEARTBEATS = 6  # per lease
_EXTENSION = (2, 3)  # share of a lease for which a heartbeat extends it


class PullFrontend(PrefillDecode):
    def hand_over(self, prefill: Prefill) -> None:
        request, engine, host = prefill.request, prefill.engine, self.host
        self._prefills[request] = prefill
        request.engine = engine.index
        host.changed(engine, engine.submit(prefill.part, host.now))
        if prefill.part.status == "refused":
            del self._prefills[request]
            request.status, request.reason, request.finish = "refused", prefill.part.reason, host.now
            host.ended(request)

    def prefilled(self, prefill: Prefill, now: int) -> None:
        """Send a request with a computed prompt to a decode engine."""
        request, part = prefill.request, prefill.part
        if request.status == "cancelled":
            self._let_go(prefill, now)
            return
        copy_prompt(part, request)
        engine = self._decoder(prefill)
        if engine is None:
            if self.patient:  # the prompt will be computed again, and the KV stays until the lease ends
                self.host.at(now + ticks(self.settings.lease), lambda tick: self._let_go(prefill, tick))
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

    def reserved(self, prefill: Prefill, now: int) -> None:
        source, decoder = prefill.engine, prefill.decoder
        if self._unreadable(source):
            why = self._why(source)
            self.host.at(now, lambda tick: self._lost(prefill, why, tick))
        else:
            assert decoder is not None
            self._transfers.begin(prefill, decoder, now)

    def give_up(self, request: Request, engine: SimEngine, submitted: Request) -> None:
        prefill, now = self._prefills.get(request), self.host.now
        if prefill is not None and prefill.decoder is None:  # the prompt is not computed yet
            del self._prefills[request]
            request.status, request.finish = "cancelled", now
            engine, submitted = prefill.engine, prefill.part
        elif prefill is not None and request.pull:  # the KV will not be read
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

    def forget(self, prefill: Prefill, now: int) -> None:
        """End the heartbeats for a prompt's KV, which then stays until the lease ends."""
        self._transfers.drop(prefill, now)
        self._prefills.pop(prefill.request, None)
        finish = prefill.part.finish
        if finish is None:
            return
        lease = ticks(self.settings.lease)
        since = finish if prefill.known_since is None else prefill.known_since
        beat = since + (now - since) // (lease // _HEARTBEATS) * (lease // _HEARTBEATS)
        numerator, denominator = _EXTENSION
        end = max(finish + lease, beat + lease * numerator // denominator)
        prefill.decoder = None
        self.host.at(max(now, end), lambda tick: self._let_go(prefill, tick))
