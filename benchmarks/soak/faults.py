"""Faults that strike a run, and their times.

Invariant: a seed gives the same faults in the same order at the same intervals. A number that comes with each fault
picks its target among the processes there by then. Every kind of a deck comes up once in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Each with how often it comes up in a deck, and from how many seconds to how many it lasts. A worker that hangs is
    given up after 10 to 20 s; one that is slow must not be."""

    KILL_ENGINE = "kill an engine", 22
    KILL_HYBRID = "kill a hybrid trainer", 12
    KILL_CORE = "kill a core trainer", 12
    KILL_MOVING = "kill a worker in the middle of a move", 8
    SLOW = "stop a worker for a moment", 12, 0.5, 5.0
    HANG = "stop a worker until it is lost", 4, 45.0, 45.0
    SLOW_CONTROLLER = "stop the controller for a moment", 5, 0.5, 5.0
    HOG = "take the processor away", 5, 2.0, 8.0
    KILL_CORES = "kill all core trainers", 1
    KILL_FORK_SERVER = "kill the fork server", 1
    KILL_CONTROLLER = "kill the controller", 3
    INTERRUPT = "interrupt the run", 1

    def __new__(cls, said: str, often: int, least: float = 0.0, most: float = 0.0) -> Kind:
        kind = str.__new__(cls, said)
        kind._value_ = said
        kind.often, kind.seconds = often, (least, most)
        return kind

    often: int
    seconds: tuple[float, float]


# What ends the session; after everything else it must go on.
ENDING = frozenset({Kind.KILL_CORES, Kind.KILL_FORK_SERVER, Kind.KILL_CONTROLLER, Kind.INTERRUPT})

# What no worker is to be lost for.
HARMLESS = frozenset({Kind.SLOW})


@dataclass(frozen=True, slots=True)
class Fault:
    """`pause` seconds after the fault before. `draw`, in [0, 1), picks its target; `seconds`: how long it lasts."""

    kind: Kind
    pause: float
    draw: float
    seconds: float


def schedule(seed: int, pause: float) -> Iterator[Fault]:
    """Faults without an end, `pause` seconds apart on average."""
    rng = random.Random(f"soak:{seed}")
    while True:
        deck = [kind for kind in Kind for _ in range(kind.often)]
        rng.shuffle(deck)
        for kind in deck:
            yield Fault(kind, rng.uniform(0.2, 1.8) * pause, rng.random(), rng.uniform(*kind.seconds))
