"""MLPs of a layer: a dense MLP, and a mixture of experts.

Invariant: an MLP has a possible shape, and as many parameters as in the checkpoint. This excludes the bias on expert
scores, which no gradient trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware.checks import require_at_least


@dataclass(frozen=True, slots=True)
class MLP:
    """A dense MLP of two matrices, or of three if it is gated."""

    intermediate: int
    gated: bool = True
    bias: bool = False
    kind: Literal["mlp"] = "mlp"

    def __post_init__(self) -> None:
        require_at_least(1, intermediate=self.intermediate)

    @property
    def matrices(self) -> int:
        return _inner(self.gated) + 1

    def parameters(self, hidden: int) -> int:
        bias = _inner(self.gated) * self.intermediate + hidden if self.bias else 0
        return self.matrices * hidden * self.intermediate + bias


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. Each token goes to `active` of the `count` routed experts."""

    count: int
    active: int
    intermediate: int  # width of one expert
    shared_intermediate: int = 0  # width of the experts that all tokens pass; 0: there are none
    groups: int = 1  # into which the experts are divided equally
    active_groups: int = 1  # groups from which a token's experts are chosen
    gated: bool = True
    latent: int = 0  # width to which tokens are projected for routed experts; 0: no projection
    bias: bool = False  # of each routed expert
    router_bias: bool = False
    shared_gate: bool = False  # whether a learned gate weights the shared experts
    beside: bool = False  # whether checkpoints name the shared experts as the layer's MLP, and routed ones separately
    other: int = 0  # further parameters per layer, such as norms and scales, which every device has
    kind: Literal["experts"] = "experts"

    def __post_init__(self) -> None:
        require_at_least(1, groups=self.groups, active_groups=self.active_groups)
        require_at_least(1, count=self.count, active=self.active, intermediate=self.intermediate)
        require_at_least(0, shared_intermediate=self.shared_intermediate, latent=self.latent, other=self.other)
        if self.active > self.count:
            raise ValueError(f"active is {self.active}, but there are {self.count} experts; lower it")
        if self.count % self.groups or self.active_groups > self.groups:
            raise ValueError(
                f"groups is {self.groups} and active_groups {self.active_groups}; set groups to a divisor of the "
                f"{self.count} experts, and active_groups to at most groups"
            )
        if self.active * self.groups > self.count * self.active_groups:
            raise ValueError(f"active is {self.active}, more than the experts in {self.active_groups} groups; lower it")

    @property
    def matrices(self) -> int:
        """Number of matrices of one expert."""
        return _inner(self.gated) + 1

    def width(self, hidden: int) -> int:
        """Width of the input of a routed expert."""
        return self.latent or hidden

    def of_one(self, hidden: int) -> int:
        """Parameters of one routed expert."""
        width = self.width(hidden)
        bias = _inner(self.gated) * self.intermediate + width if self.bias else 0
        return self.matrices * width * self.intermediate + bias

    def of_shared(self, hidden: int) -> int:
        """Parameters that all tokens pass: shared experts, and the projections around routed experts."""
        return self.matrices * hidden * self.shared_intermediate + 2 * hidden * self.latent

    def of_router(self, hidden: int) -> int:
        """Parameters of the router, which every device of a tensor-parallel group has."""
        return (
            hidden * self.count
            + (self.count if self.router_bias else 0)
            + (hidden if self.shared_gate else 0)
            + self.other
        )

    def parameters(self, hidden: int, routed: int) -> int:
        """Parameters of a layer with `routed` routed experts."""
        return routed * self.of_one(hidden) + self.of_shared(hidden) + self.of_router(hidden)


def _inner(gated: bool) -> int:
    """Number of matrices whose input has the hidden width."""
    return 2 if gated else 1
