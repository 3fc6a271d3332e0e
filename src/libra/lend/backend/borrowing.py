"""Devices that a run borrows, from its own servers and from agents.

Invariant: slots are numbered as the pool numbers its workers: the run's own devices, then those of its servers, then
those of agents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra.backends.launch.launcher import LocalLauncher, WorkerLauncher
from libra.backends.transport.engine_messages import Borrow, DeviceLoan, LoanState
from libra.backends.transport.messages import Dtype
from libra.config.input_file import read_input
from libra.config.run import ClusterConfig, ConfigError, LendingRule, RunConfig
from libra.lend.backend.lenders import LenderLauncher
from libra.lend.backend.servers import TracedServers
from libra.lend.lending_config import LendingConfig
from libra.loop.preflight import try_port
from libra.records.schema import LendingSummary
from libra.sim.workload.request_file import RequestFormatError, read_requests


@dataclass(frozen=True, slots=True)
class Borrowing:
    """The sources of borrowed devices; both are None if nothing is borrowed."""

    rule: LendingRule
    servers: TracedServers | None
    agents: LenderLauncher | None  # a launcher whose last slots are the devices of agents

    @classmethod
    def of(
        cls,
        config: RunConfig,
        launcher: WorkerLauncher,
        model: Path,
        dtype: Dtype,
        line: Callable[[str], None],
        told: Callable[[str], None],
    ) -> Borrowing:
        """Build the sources, without starting servers or contacting agents. Calls `told` with news of agents."""
        lending = config.lending
        assert isinstance(lending, LendingConfig)
        first, servers, agents = config.cluster.slots, None, None
        if lending.servers:
            slots = tuple(range(first, first + lending.servers))
            share, seed = config.cluster.share, config.seed
            servers = TracedServers(launcher, lending, config.run_directory, slots, share, dtype, seed, line)
        if lending.agents and config.lent_devices:
            assert isinstance(launcher, LocalLauncher), "agents run on the controller's machine"
            size = lending.engine
            agents = LenderLauncher(
                launcher,
                dict(enumerate(lending.agents, first + lending.servers)),
                Borrow(
                    size.max_model_len,
                    size.max_num_seqs,
                    size.kv_tokens,
                    read_input(model / "config.json").decode(),
                    refresh_kv=config.training.kv_on_update == "refresh",
                ),
                (lending.weights.host, lending.weights.port),
                config.run_directory / "logs" / "publisher.log",
                told,
            )
        return cls(lending.rule, servers, agents)

    def loans(self, lent: Sequence[str], run: str) -> dict[str, DeviceLoan]:
        """Loans of the workers on devices of the run's own servers. These workers are the first of `lent`."""
        if self.servers is None:
            return {}
        return {name: self.servers.loan(slot, run) for slot, name in enumerate(lent[: len(self.servers.slots)])}

    async def start(self, phase: Callable[[str], None]) -> None:
        """Start the run's own servers, if it has any; call `phase` with each step of the start."""
        if self.servers is not None:
            phase("starting servers")
            await self.servers.start()

    async def end(self, loans: Iterable[LoanState | None], recalls: int) -> LendingSummary | None:
        """End the run's own servers. Returns the gains and costs of the `loans`, recalled `recalls` times; None if the
        run does not borrow."""
        if self.servers is None and self.agents is None:
            return None
        known = [loan for loan in loans if loan is not None]
        wanted = sum(loan.wanted for loan in known)
        return LendingSummary(
            rule=self.rule,
            share=sum(loan.lent for loan in known) / wanted if wanted else 0.0,
            grants=sum(loan.grants for loan in known),
            overstayed=sum(loan.overstayed for loan in known),
            recalls=recalls,
            users=None if self.servers is None else await self.servers.end(),
        )

    async def close(self) -> None:
        if self.agents is not None:
            await self.agents.close()


def check_lending(lending: LendingConfig, cluster: ClusterConfig) -> None:
    """Raises `ConfigError` if a run cannot borrow."""
    if cluster.launcher != "local":
        raise ConfigError(
            f"lending: servers and agents run on the controller's machine, but cluster.launcher is {cluster.launcher};"
            " set it to local"
        )
    if lending.agents and lending.weights.port != 0:
        try_port("lending.weights.port", lending.weights.host, lending.weights.port, "give a free port, or 0 for any")
    if lending.server is None:
        return
    try:
        read_requests(lending.server.traffic)
    except RequestFormatError as error:
        raise ConfigError(f"lending.server.traffic: {error}") from None
