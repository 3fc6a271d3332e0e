"""Front end for pushed KV: the prefill engine pushes KV into blocks reserved by the decode engine.

Invariant: a request is on its decode engine from its arrival. The prompt is computed once the decode engine has
reserved blocks for the KV. The KV arrives with the first token, so `n` tokens take `n - 1` iterations there. The order
of events is SGLang's. The sender knows when its receiver is gone, so there are no leases.
"""

from __future__ import annotations

from libra.sim.engine.admission import refusal
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.kv_transfers import HandedOver, Prefill
from libra.sim.prefill_decode import PrefillDecode, copy_prompt

_FIRST_ASKED = 2  # least generated tokens at `ask_at`, since the prefill engine generates the first


class PushFrontend(PrefillDecode):
    def hand_over(self, prefill: Prefill) -> None:
        request, source, host = prefill.request, prefill.engine, self.host
        if request.prompt_tokens >= source.config.max_model_len:
            request.status, request.finish = "refused", host.now
            request.reason = refusal(request, source.config)
            host.ended(request)
            return
        decoder = prefill.decoder = self._decoder(prefill)
        if decoder is None:
            self.not_placed(request)
            return
        if request.ask_at is not None:
            request.ask_at = max(request.ask_at, _FIRST_ASKED)
        request.pull = True
        host.changed(decoder, decoder.submit(request, host.now))
        if request.status == "refused":
            host.ended(request)
            return
        self._prefills[request] = prefill
        if self._keep:
            blocks = source.config.blocks(request.prompt_tokens)
            prefill.record = HandedOver(request.number, source.index, decoder.index, blocks)
            self.handed_over.append(prefill.record)

    def reserved(self, prefill: Prefill, now: int) -> None:
        """Submit the prompt to its prefill engine at this tick, after all plans of the tick."""
        self.host.at(now, lambda tick: self._ask(prefill, tick))

    def _ask(self, prefill: Prefill, now: int) -> None:
        source = prefill.engine
        if self._prefills.get(prefill.request) is not prefill:
            return  # the request was given up at the same tick
        if source.closing:
            self._start_anew(prefill, now)
        elif source.index in self._broken:
            self._lost(prefill, self._why(source), now)
        else:
            prefill.part.arrival = now
            self.host.changed(source, source.submit(prefill.part, now))

    def prefilled(self, prefill: Prefill, now: int) -> None:
        """Send the KV of a computed prompt."""
        request, source, decoder = prefill.request, prefill.engine, prefill.decoder
        if prefill.record is not None:
            prefill.record.computed = now
        if self._prefills.get(request) is not prefill:
            self._let_go(prefill, now)
            return
        assert decoder is not None
        copy_prompt(prefill.part, request)
        if self._unreadable(source):
            self._lost(prefill, self._why(source), now)
        else:
            self._transfers.begin(prefill, decoder, now)
            self._transfers.look_again(now)

    def give_up(self, request: Request, engine: SimEngine, submitted: Request) -> None:
        """Cancel a request. If a transfer is in flight, its blocks stay reserved until it ends."""
        prefill, now = self._prefills.get(request), self.host.now
        if prefill is not None and prefill.part.finish is None:
            self.host.changed(engine, engine.pull_ended(request, now, "it was given up"))
            self.forget(prefill, now)
        super().give_up(request, engine, submitted)

    def resume(self, engine: SimEngine, request: Request, now: int) -> None:
        if not isinstance(request.owner, Prefill):
            super().resume(engine, request, now)
        elif self._prefills.get(request.owner.request) is request.owner:
            # Some engines have already decided at this tick, or are at a boundary without an event.
            self.host.at(now + 1, lambda tick, it=request.owner: self._start_anew(it, tick))  # type: ignore[misc]

    def _start_anew(self, prefill: Prefill, now: int) -> None:
        """Restart a request on other engines after its prefill engine has closed."""
        request, decoder = prefill.request, prefill.decoder
        if self._prefills.pop(request, None) is not prefill or decoder is None:
            return
        if prefill.record is not None:
            prefill.record.released = now
        self.host.changed(decoder, decoder.pull_ended(request, now, self._why(prefill.engine)))
        self.host.changed(decoder, decoder.interrupt(request, now))

    def forget(self, prefill: Prefill, now: int) -> None:
        self._transfers.drop(prefill, now)
        self._prefills.pop(prefill.request, None)
        prefill.decoder = None
        part, source = prefill.part, prefill.engine
        if part.finish is not None:
            self._let_go(prefill, now)
            return
        if prefill.record is not None:
            prefill.record.released = now
        if part.engine is not None and not source.closing:
            self.host.changed(source, source.cancel(part, now))
