"""Interface through which lending adds borrowed devices to a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from libra.backends.launch.launcher import AgentLauncher
from libra.backends.transport.engine_messages import DeviceLoan, LoanState
from libra.records.schema import LendingSummary


class RunBorrowing(Protocol):
    """The sources of a run's borrowed devices."""

    @property
    def agents(self) -> AgentLauncher | None:
        """A launcher whose last slots belong to agents; None without agents."""
        ...

    def loans(self, lent: Sequence[str], run: str) -> dict[str, DeviceLoan]:
        """Map each worker of `lent` on a device of the run's own servers to its loan."""
        ...

    async def start(self, phase: Callable[[str], None]) -> None:
        """Start the run's own servers; call `phase` with each step that takes time."""
        ...

    async def end(self, loans: Iterable[LoanState | None], recalls: int) -> LendingSummary | None:
        """End the run's own servers. Returns the gains and costs of the `loans`, recalled `recalls` times."""
        ...

    async def close(self) -> None: ...
