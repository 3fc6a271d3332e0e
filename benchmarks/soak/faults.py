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
    KILL_BORROWER = "kill a borrower in its grant"
    STOP_BORROWER = "stop a borrower in its grant"
    LOOP_BORROWER = "a borrower computes beyond its grant"
    FULL_DISK = "no disk is left for the record of a loan"
    KILL_SERVER = "kill a server"
    STOP_SERVER = "stop a server for a moment"
    KILL_AGENT = "kill the agent beside a server"
    KILL_FOLLOWER = "kill who follows the weights beside a server"
    KILL_PUBLISHER = "kill who publishes the weights"


# What ends the session; after everything else it must go on.
ENDING = frozenset({Kind.KILL_CORES, Kind.KILL_FORK_SERVER, Kind.KILL_CONTROLLER, Kind.INTERRUPT})

# What strikes a borrower while it has the device.
IN_GRANT = frozenset({Kind.KILL_BORROWER, Kind.STOP_BORROWER, Kind.LOOP_BORROWER})

# What no worker is to be lost for.
HARMLESS = frozenset({Kind.SLOW, Kind.STOP_BORROWER, Kind.LOOP_BORROWER, Kind.FULL_DISK})

# What strikes the process of an owner of a lent device, or one that a run and its agents have between them.
OWNED = frozenset({Kind.KILL_SERVER, Kind.STOP_SERVER, Kind.KILL_AGENT, Kind.KILL_FOLLOWER, Kind.KILL_PUBLISHER})

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

LENDING_DECK: Deck = {
    Kind.KILL_BORROWER: 12,
    Kind.STOP_BORROWER: 12,
    Kind.LOOP_BORROWER: 12,
    Kind.FULL_DISK: 2,
    Kind.KILL_SERVER: 2,
    Kind.STOP_SERVER: 4,
    Kind.KILL_ENGINE: 4,
    Kind.KILL_CORE: 4,
    Kind.KILL_MOVING: 6,
    Kind.HANG: 1,
    Kind.SLOW_CONTROLLER: 4,
    Kind.HOG: 4,
    Kind.KILL_CONTROLLER: 3,
    Kind.INTERRUPT: 1,
}

AGENTS_DECK: Deck = {
    Kind.KILL_BORROWER: 6,
    Kind.STOP_BORROWER: 8,
    Kind.LOOP_BORROWER: 8,
    Kind.FULL_DISK: 1,
    Kind.KILL_SERVER: 4,
    Kind.STOP_SERVER: 4,
    Kind.KILL_AGENT: 6,
    Kind.KILL_FOLLOWER: 6,
    Kind.KILL_PUBLISHER: 4,
    Kind.KILL_ENGINE: 3,
    Kind.KILL_CORE: 3,
    Kind.SLOW_CONTROLLER: 3,
    Kind.HOG: 3,
    Kind.KILL_CONTROLLER: 3,
    Kind.INTERRUPT: 1,
}

# Seconds from and to. A worker that hangs is given up after 10 to 20 s; one that is slow must not be.
_SECONDS = {
    Kind.SLOW: (0.5, 5.0),
    Kind.HANG: (45.0, 45.0),
    Kind.SLOW_CONTROLLER: (0.5, 5.0),
    Kind.HOG: (2.0, 8.0),
    Kind.STOP_BORROWER: (0.2, 3.0),
    Kind.LOOP_BORROWER: (0.2, 3.0),
    Kind.STOP_SERVER: (0.5, 4.0),  # the word of its lender lapses after 2
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
