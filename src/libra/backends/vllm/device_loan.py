"""The loan of an engine's device, as used by the engine's worker: through it lending decides when the engine steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from libra.backends.transport.engine_messages import LoanState

if TYPE_CHECKING:
    from libra.backends.vllm.engine import VllmEngine
    from libra.backends.vllm.report import Sampled


class EngineLoan(Protocol):
    """The loan of one rollout engine, created before the engine."""

    scheduler: type[Any]  # vLLM's scheduler, as the engine needs it

    def lend(self, engine: VllmEngine) -> None:
        """Begin to lend to `engine`."""
        ...

    def rest(self) -> float | None:
        """Note that there are no turns; returns the seconds after which to call `settle` anyway. None: no need."""
        ...

    @property
    def changed(self) -> bool:
        """Whether the device was recalled, or lent again, since its state was last reported."""
        ...

    def settle(self) -> list[str]:
        """Between two steps: give memory back, or take free memory. Returns the turns that had to be stopped."""
        ...

    def step(self) -> list[Sampled] | None:
        """Make one step if there is a grant; otherwise return None after a moment."""
        ...

    def state(self) -> LoanState:
        """The state of the loan, for a report."""
        ...

    def trained(self) -> None:
        """Note that the weights of another training step have arrived."""
        ...
