"""Corrections of kernel tables, which contain times of one kind of work, for even batches without shared blocks.

Invariant: terms correct the kernels of one source. Neutral terms leave every price exactly unchanged.

- Uneven contexts in a batch: decode attention waits for the longest contexts. The batch counts as having more context,
in proportion to the number of requests times the standard deviation of their contexts.
- Contexts that share blocks: after one request has read a block, other requests find it in the L2 cache.
- Prefill and decode together: all tokens of an iteration pass through the linear layers as in one prefill.
- Experts: tables assume that tokens choose experts by a power law. With random weights all experts are equally
frequent, and trained routers lie in between. `decode` scales the time of a mixture-of-experts decode without its
context.
- Prefill in an iteration: attention is not divided along a context, so one multiprocessor reads the longest context
completely, however few tokens attend to it. Work divided in this way takes at most its even share plus its longest
piece (Graham 1969, Bounds on Multiprocessing Timing Anomalies, theorem 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class KernelTerms:
    """Corrections of a grid of kernel times."""

    spread: float = 0.0  # tokens of context that a token of `DecodeBatch.spread` counts as
    shared: float = 0.0  # share saved of a token's price, if another request has the token in the same block
    linear: float | None = None  # linear layers of an iteration with prefill, over the grid's; None: added to decode's
    longest: float = 0.0  # seconds for each token of the longest context, in an iteration with prefill
    decode: float = 1.0  # a decode without its context, over the grid's
    source: str = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"KernelTerms.{field.name} is {value}; give a finite number, 0 or more")
        if self.shared >= 1:
            raise ValueError(
                f"KernelTerms.shared is {self.shared}; give less than 1, because reading a token takes time"
            )

    def slowed(self, factor: float) -> KernelTerms:
        """The terms of kernels that take `factor` times as long. Only `longest` changes, since the other terms are
        ratios.
        """
        return replace(self, longest=factor * self.longest)

    @property
    def uneven(self) -> bool:
        """Whether prices depend on the spread of the contexts of a batch, or on shared blocks."""
        return bool(self.spread or self.shared or self.longest)


NO_TERMS = KernelTerms()


def default_terms(layers: int) -> KernelTerms:
    """The terms of vLLM 0.26 with FlashAttention 3 on an H100, relative to tables of its single kernels."""
    return KernelTerms(
        spread=0.75,
        shared=0.5,
        linear=1.15,
        longest=3e-9 * layers,
        source="default: vLLM 0.26 and FlashAttention 3 on an H100",
    )
