"""New weights for engines that are at work.

Invariant: an engine changes weights between two iterations, all its layers at once; either every context in it is
computed again with the new weights, or none is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from libra.sim.clock import ticks
from libra.sim.link import Link


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Each engine stops at the end of the iteration that is under way at tick `at`, and goes on with new weights.

    The weights come through `link`, if there is one, engine after engine; `pause` is what loading them takes besides.
    With `refresh` the running requests go back to the queue and their KV is computed again; otherwise it is kept.
    """

    at: int
    pause: int  # ticks
    refresh: bool = False
    link: Link | None = None
    weight_bytes: int = 0  # of one engine
    engines: frozenset[int] | None = None  # indices; None: all

    def __post_init__(self) -> None:
        if self.at < 0 or self.pause < 0 or self.weight_bytes < 0:
            raise ValueError(
                f"a weight update at tick {self.at} of {self.weight_bytes} bytes with a pause of {self.pause} ticks;"
                " none of them may be negative"
            )

    @classmethod
    def every(cls, seconds: float, times: int, pause_seconds: float, *, refresh: bool = False) -> tuple[Self, ...]:
        """`times` updates of all engines, `seconds` apart, the first one after that time."""
        return tuple(cls(ticks(seconds * (number + 1)), ticks(pause_seconds), refresh) for number in range(times))

    def until(self, stopped: int) -> int:
        """The tick at which an engine goes on that stopped at tick `stopped`."""
        arrived = stopped if self.link is None else self.link.send(stopped, self.weight_bytes)
        return arrived + self.pause
