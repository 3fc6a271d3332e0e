"""Interface by which lending decides when an engine on a lent device steps; the engine's worker calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from libra.backends.transport.engine_messages import LoanState

if TYPE_CHECKING:
    from libra.backends.vllm.engine import VllmEngine
    from libra.backends.vllm.report import Sampled


class EngineLoan(Protocol):
    """The loan of one rollout engine. It is created before the engine."""

    scheduler: type[Any]  # the scheduler class that the engine needs

    def lend(self, engine: VllmEngine) -> None:
        """Begin to lend the device to `engine`."""
        ...

    def rest(self) -> float | None:
        """Record that the engine has no turns. Returns the seconds after which to call `settle` anyway; None: no
        need."""
        ...

    @property
    def changed(self) -> bool:
        """Whether the device was recalled or lent again since the last report of its state."""
        ...

    def settle(self) -> list[str]:
        """Return memory to serving, or take free memory, between two steps. Returns the turns that had to be
        stopped."""
        ...

    def step(self) -> list[Sampled] | None:
        """Make one step if there is a grant; otherwise return None after a short wait."""
        ...

    def state(self) -> LoanState:
        """The state of the loan, for a report."""
        ...

    def trained(self) -> None:
        """Record that the weights of another training step have arrived."""
        ...
