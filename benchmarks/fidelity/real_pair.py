"""A prefill and a decode engine of vLLM's, each on its own CPU clock, with a link between them.

Invariant: every decision is that of vLLM's scheduler beside a connector in pull mode, and KV is what the prefill engine
computed. The link is of the clock alone: pulls share it evenly, and copying their blocks counts on neither engine, as
where a network card does it. An end of a pull is told at the end of the step under way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from benchmarks.fidelity.pull_connector import PullConnector
from benchmarks.fidelity.real_engine import RealEngine, chain_of, undisturbed
from benchmarks.fidelity.texts import Texts
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Request
from libra.sim.link import Network, link
from libra.sim.workload.requests import Workload


class PairedEngine(RealEngine):
    """One side of a pair. `ready`: its next step may do something, as it may not after one that did nothing."""

    def __init__(self, number: int, model: Path, config: EngineConfig) -> None:
        super().__init__(number, model, config, pulls=True)
        self.ready = False
        self._came: set[str] = set()  # since the last step, by vLLM's names
        self._sent: set[str] = set()

    def give(self, request: Request, prompt: list[int], now: int) -> None:
        self._wake(now)
        self.put(request, prompt)

    def came(self, request: Request, now: int) -> None:
        """The KV of a prompt is here."""
        self._wake(now)
        self._came.add(self._name(request))

    def sent(self, request: Request, now: int) -> None:
        """The KV of a prompt is needed here no longer."""
        self._wake(now)
        self._sent.add(self._name(request))

    def step(self) -> list[tuple[Request, list[int]]]:
        if self._came or self._sent:
            heard = KVConnectorOutput(finished_recving=self._came, finished_sending=self._sent)
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=heard)
            self._scheduler.update_from_output(SchedulerOutput.make_empty(), output)
            self._came, self._sent = set(), set()
        done = super().step() if self.busy else []
        decided = self._scheduler.decided
        acted = decided is not None and bool(decided.num_scheduled_tokens or decided.preempted_req_ids)
        self.ready = self.busy and acted
        return done

    def started(self) -> list[int]:
        """Numbers of the requests whose pulls begin with the last step."""
        connector = self._scheduler.connector
        assert isinstance(connector, PullConnector)
        names, connector.started = connector.started, []
        return [int(name.partition("-")[0]) for name in names]

    def missing(self, request: Request) -> int:
        """Blocks that a pull fills: the last ones, for those before them are cached."""
        return sum(block.block_hash is None for block in self._blocks(request))

    def copy_from(self, other: PairedEngine, request: Request, kept: Request, blocks: int) -> None:
        """The last blocks of a request's prompt, which the other engine keeps for `kept`."""
        ours, theirs = self._blocks(request), other._blocks(kept)
        for here, there in zip(self._layers(), other._layers(), strict=True):
            for block, source in zip(ours[-blocks:], theirs[-blocks:], strict=True):
                here[block.block_id].copy_(there[source.block_id])

    def forget(self) -> None:
        super().forget()
        self.ready = False

    def _wake(self, now: int) -> None:
        if not self.ready:
            self.clock = max(self.clock, now)
        self.ready = True

    def _name(self, request: Request) -> str:
        """vLLM appends random characters to the names it is given."""
        given = f"{request.number:08d}-"
        names: Iterable[str] = self._scheduler.requests
        return next(name for name in names if name.startswith(given))

    def _blocks(self, request: Request) -> Sequence[KVCacheBlock]:
        blocks: Sequence[KVCacheBlock] = self._scheduler.kv_cache_manager.get_blocks(self._name(request)).blocks[0]
        return blocks

    def _layers(self) -> list[torch.Tensor]:
        """KV of each layer, [block, ...]."""
        worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers: list[torch.Tensor] = worker.model_runner.kv_caches
        return layers


@dataclass(slots=True)
class _Handed:
    """A request whose prompt is computed."""

    whole: Request
    part: Request  # that the prefill engine was asked for
    blocks: int = 0  # to pull


def run_pair(
    prefill: PairedEngine, decode: PairedEngine, workload: Workload, rate: float, texts: Texts
) -> list[Request]:
    """Serve all of a workload over a link of `rate` KV tokens/s; the requests as they came.

    What comes first is done first: the end of a pull, a request that is handed over or arrives, a step of the engine
    whose clock is behind. Raises RuntimeError where requests are left that nothing moves.
    """
    coming = [(request.arrival, request.number, request) for request in workload.start()]
    heapq.heapify(coming)
    handed: list[tuple[int, int]] = []  # tick and number
    known: dict[int, _Handed] = {}
    network, out, into = Network(), link(rate), link(rate)
    requests = []
    with undisturbed():
        while True:
            side = min((it for it in (prefill, decode) if it.ready), key=lambda engine: engine.clock, default=None)
            moments = [network.next_end(), *(heap[0][0] for heap in (handed, coming) if heap)]
            now = min((tick for tick in moments if tick is not None), default=None)
            if now is not None and (side is None or now <= side.clock):
                if moments[0] == now:
                    for number in network.ended(now):
                        assert isinstance(number, int)
                        it = known[number]
                        decode.copy_from(prefill, it.whole, it.part, it.blocks)
                        decode.came(it.whole, now)
                        prefill.sent(it.part, now)
                elif handed and handed[0][0] == now:
                    whole = known[heapq.heappop(handed)[1]].whole
                    decode.give(whole, texts.prompt(chain_of(whole), whole.prompt_tokens), now)
                else:
                    whole = heapq.heappop(coming)[2]
                    requests.append(whole)
                    part = Request(whole.number, whole.arrival, whole.prompt_tokens, 1, chain=whole.chain,
                                   priority=whole.priority, keeps=True)  # fmt: skip
                    known[whole.number] = _Handed(whole, part)
                    prefill.give(part, texts.prompt(chain_of(whole), whole.prompt_tokens), now)
            elif side is prefill:
                for part, _ in prefill.step():
                    whole = known[part.number].whole
                    whole.scheduled, whole.pull = part.scheduled, True
                    heapq.heappush(handed, (prefill.clock, whole.number))
            elif side is decode:
                began = decode.clock
                done = decode.step()
                for number in decode.started():
                    it = known[number]
                    it.blocks = decode.missing(it.whole)
                    network.begin(number, out, into, it.blocks * decode.block_size, began)
                for whole, tokens in done:
                    part = known.pop(whole.number).part
                    whole.prefill_end, whole.cached_tokens = part.prefill_end, part.cached_tokens
                    whole.preemptions += part.preemptions
                    texts.generated(chain_of(whole), whole.prompt_tokens, tokens)
                    following = workload.finished(whole, decode.clock)
                    if following is not None:
                        heapq.heappush(coming, (following.arrival, following.number, following))
            elif known:
                raise RuntimeError(f"{len(known)} requests are left, and nothing moves them: {sorted(known)[:5]}")
            else:
                return requests
