"""Faults that strike a run, and their times.

Invariant: a seed gives the same faults in the same order at the same intervals. A number that comes with each fault
picks its target among the processes there by then. Every kind of a deck comes up once in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL_ENGINE = "kill an engine"
    KILL_HYBRID = "kill a hybrid trainer"
    KILL_CORE = "kill a core trainer"
    KILL_MOVING = "kill a worker in the middle of a move"
    SLOW = "stop a worker for a moment"
    HANG = "stop a worker until it is lost"
    SLOW_CONTROLLER = "stop the controller for a moment"
    HOG = "take the processor away"
    KILL_CORES = "kill all core trainers"
    KILL_FORK_SERVER = "kill the fork server"
    KILL_CONTROLLER = "kill the controller"
    INTERRUPT = "interrupt the run"


# What ends the session; after everything else it must go on.
ENDING = frozenset({Kind.KILL_CORES, Kind.KILL_FORK_SERVER, Kind.KILL_CONTROLLER, Kind.INTERRUPT})

# What no worker is to be lost for.
HARMLESS = frozenset({Kind.SLOW})

Deck = Mapping[Kind, int]

DECK: Deck = {
    Kind.KILL_ENGINE: 22,
    Kind.KILL_HYBRID: 12,
    Kind.KILL_CORE: 12,
    Kind.KILL_MOVING: 8,
    Kind.SLOW: 12,
    Kind.HANG: 4,
    Kind.SLOW_CONTROLLER: 5,
    Kind.HOG: 5,
    Kind.KILL_CORES: 1,
    Kind.KILL_FORK_SERVER: 1,
    Kind.KILL_CONTROLLER: 3,
    Kind.INTERRUPT: 1,
}

# Seconds from and to. A worker that hangs is given up after 10 to 20 s; one that is slow must not be.
_SECONDS = {
    Kind.SLOW: (0.5, 5.0),
    Kind.HANG: (45.0, 45.0),
    Kind.SLOW_CONTROLLER: (0.5, 5.0),
    Kind.HOG: (2.0, 8.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`pause` seconds after the fault before. `draw`, in [0, 1), picks its target; `seconds`: how long it lasts."""

    kind: Kind
    pause: float
    draw: float
    seconds: float


def schedule(seed: int, pause: float, kinds: Deck = DECK) -> Iterator[Fault]:
    """Faults without an end, `pause` seconds apart on average."""
    rng = random.Random(f"soak:{seed}")
    while True:
        deck = [kind for kind, count in kinds.items() for _ in range(count)]
        rng.shuffle(deck)
        for kind in deck:
            yield Fault(kind, rng.uniform(0.2, 1.8) * pause, rng.random(), rng.uniform(*_SECONDS.get(kind, (0.0, 0.0))))
