"""The servers that a borrowing run starts: one server on each lent device, under recorded traffic.

Invariant: a server is not a worker. The run starts and ends a server, but never restarts, moves or controls it. A
server that has ended lends nothing more, and its users' requests end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import WorkerLauncher
from libra.backends.tiny_model import kv_bytes_per_token, write_tiny_model
from libra.backends.transport.engine_messages import DeviceLoan, StartServer
from libra.backends.transport.messages import Dtype
from libra.lend.backend.terms import device_loan
from libra.lend.gate import Slo
from libra.lend.lending_config import LendingConfig, ServerConfig
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingTerms
from libra.lend.records.served import read_served, summarise
from libra.lend.traffic.envelope import Envelope
from libra.records.files import writing
from libra.records.schema import ServedSummary

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"  # one token each, since no user reads the output
_MOST_QUIET = 16  # limit of the doubling of `quiet`, as a multiple of `quiet`


@dataclass(eq=False)
class TracedServers:
    """Servers under recorded traffic on the lent devices, whose slots are `slots`. They write to `directory`."""

    launcher: WorkerLauncher
    config: LendingConfig
    directory: Path
    slots: tuple[int, ...]
    share: float  # of one core: a device's speed
    dtype: Dtype
    seed: int
    say: Callable[[str], None]
    _handles: list[Handle] = field(default_factory=list)

    @property
    def slo(self) -> Slo:
        return Slo(*self.config.objective)

    @property
    def _server(self) -> ServerConfig:
        assert self.config.server is not None
        return self.config.server

    def loan(self, number: int, rollout: str) -> DeviceLoan:
        """Loan of the device of the `number`th server to an engine of the model `rollout`."""
        config, server = self.config, self._server
        terms = LendingTerms(
            model=f"server {number}",
            rollout=rollout,
            pace=self.slo.pace(config.use),
            longest=config.longest_grant,
            shortest=config.shortest_grant,
            envelope=Envelope(
                rate=config.requests_per_second,
                queued=server.kv_tokens,
                live=server.max_num_seqs,
                context=server.kv_tokens,
                window=config.window,
            ),
            recall=RecallPolicy(config.quiet, _MOST_QUIET * config.quiet),
            sharing=config.rule,
            ttft=config.use * self.slo.ttft,
            slo=self.slo,
        )
        return device_loan(str(self._device(number)), terms, str(self._path(f"lending-{number}.jsonl")), self.share)

    async def start(self) -> None:
        """Start all servers, and wait until they serve. Raises `ForkError`, `LaunchError`, or a server's failure."""
        server = self._server
        model = server.model.directory or self.directory / "server"
        if server.model.directory is None:
            with writing(model):
                write_tiny_model(model, server.model, _ALPHABET, server.max_model_len)
        await asyncio.gather(*(self._start(number, slot, model) for number, slot in enumerate(self.slots)))

    async def end(self) -> ServedSummary | None:
        """End the servers; returns a summary of their users' latencies, or None if no request ended."""
        await asyncio.gather(*(handle.stop() for handle in self._handles))
        for number in range(len(self.slots)):
            self._device(number).unlink(missing_ok=True)
        served = [it for number in range(len(self.slots)) for it in read_served(self._served(number))]
        return summarise(served, self.slo)

    async def _start(self, number: int, slot: int, model: Path) -> None:
        server = self._server
        link = await self.launcher.spawn(f"server-{number}", slot)
        handle = Handle(link, lambda name, why: self.say(f"{name} is gone, and its device is not lent: {why}"))
        self._handles.append(handle)
        await handle.start(
            StartServer(
                model_directory=str(model),
                random_weights=server.model.directory is None,
                max_model_len=server.max_model_len,
                max_num_seqs=server.max_num_seqs,
                max_num_batched_tokens=server.max_num_batched_tokens,
                kv_cache_bytes=server.kv_tokens * kv_bytes_per_token(model, self.dtype),
                dtype=self.dtype,
                seed=self.seed,
                device=str(self._device(number)),
                share=self.share,
                cores=(link.core,),
                traffic=str(server.traffic),
                speed=server.speed,
                shorter=server.shorter,
                begins=number / len(self.slots),
                first=1 + max((it.number for it in read_served(self._served(number))), default=-1),
                served=str(self._served(number)),
            )
        )

    def _device(self, number: int) -> Path:
        return self._path(f"device-{number}")

    def _served(self, number: int) -> Path:
        return self._path(f"served-{number}.jsonl")

    def _path(self, name: str) -> Path:
        return (self.directory / name).resolve()
