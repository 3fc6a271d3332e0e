"""What a core replica publishes, as a joiner reads it: its state, and the update that leads from each to the next.

Invariant: what is read is whole or refused. Reading is one-way: the core does not know who reads, and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from libra.backends.grpo import board, gradient_ring
from libra.backends.grpo.gradient_ring import NUMBER, SLOTS, Update
from libra.backends.transport.shared_vectors import LayoutError, Vector, attach
from libra.backends.transport.trainer_messages import StatePlace

_PAUSE = 0.001  # seconds between two looks at a state that is being changed
_LOOKS = 30  # in a row: who looks must get back to its own orders


class OverrunError(RuntimeError):
    """The update that was asked for is not there any more: only a new copy of the state leads on."""


class UnreachableError(RuntimeError):
    """The core, or the way to it, is gone."""


@dataclass(frozen=True, slots=True)
class State:
    """A copied state, beside its vectors."""

    number: int
    checksum: int
    steps: int  # of the optimiser
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What is published: vectors of `length` numbers of `dtype`; `signature` is that of their flat layout."""

    length: int
    dtype: str
    signature: int


class Publication(Protocol):
    """Everything that a joiner needs of a core. All of it may raise `UnreachableError`."""

    def at_rest(self) -> bool:
        """Whether the state is in no change now; waits some hundredths of a second for one to end."""

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        """Fill the board's three vectors; None when the state changed meanwhile and they hold no whole one."""

    def has_update(self, number: int) -> bool:
        """Whether the update to state `number` is there yet. Raises `OverrunError` when it is there no more."""

    def copy_update(self, number: int, into: Vector) -> Update:
        """Fill a flat gradient. Raises `OverrunError` when it was overwritten meanwhile."""


class SharedPublication:
    """The publication of a process on the same machine, through its shared memory. A reader with its own way of copying
    asks `holds_state` or `holds_update` afterwards whether it has copied what it was to."""

    def __init__(self, place: StatePlace, shape: Shape) -> None:
        """Raises `LayoutError`, and `OSError` when the process is gone."""
        self._board = attach(place.pid, place.board, board.board_layout(shape.length, shape.dtype))
        if self._board.header[board.SIGNATURE] != shape.signature:
            raise LayoutError(f"process {place.pid} trains another model: all replicas must start from the same one")
        self._ring = attach(place.pid, place.ring, gradient_ring.ring_layout(shape.length, shape.dtype))
        self._numbers = self._ring.header.reshape(SLOTS, gradient_ring.CELLS)
        self._doubles = self._numbers.view(np.float64)
        self._length = shape.length

    def at_rest(self) -> bool:
        for _ in range(_LOOKS):
            if self._board.header[board.SEQUENCE] % 2 == 0:
                return True
            _wait()
        return False

    def state(self) -> State | None:
        """What belongs to the vectors, to be read before them; None in the middle of a change."""
        header = self._board.header
        sequence = int(header[board.SEQUENCE])
        if sequence % 2:
            return None
        rate = float(header.view(np.float64)[board.LEARNING_RATE])
        return State(sequence // 2, int(header[board.CHECKSUM]), int(header[board.STEPS]), rate)

    @property
    def vectors(self) -> list[Vector]:
        """Of the board."""
        return self._board.vectors

    def holds_state(self, number: int) -> bool:
        return bool(self._board.header[board.SEQUENCE] == 2 * number)

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        state = self.state()
        if state is None:
            return None
        for source, target in zip(self.vectors, into, strict=True):
            _copy(source, target)
        return state if self.holds_state(state.number) else None

    def has_update(self, number: int) -> bool:
        # In this order: an update is published before the state it leads to is reached.
        reached = self._board.header[board.SEQUENCE] // 2 >= number
        if self.holds_update(number):
            return True
        if reached:
            raise OverrunError(f"the update to state {number} is gone; {SLOTS - 1} are kept")
        return False

    def update(self, number: int) -> Update:
        """What belongs to the gradient, to be read before it."""
        doubles = self._doubles[number % SLOTS].copy()
        return Update(
            number,
            float(doubles[gradient_ring.LEARNING_RATE]),
            float(doubles[gradient_ring.DENOMINATOR]),
            float(doubles[gradient_ring.NORM]),
        )

    def gradient(self, number: int) -> Vector:
        """The slot's, whatever it holds."""
        return self._ring.vectors[number % SLOTS][: self._length]

    def holds_update(self, number: int) -> bool:
        return bool(self._numbers[number % SLOTS, NUMBER] == number)

    def copy_update(self, number: int, into: Vector) -> Update:
        update = self.update(number)
        _copy(self.gradient(number), into)
        if not self.holds_update(number):
            raise overwritten(number)
        return update


def overwritten(number: int) -> OverrunError:
    return OverrunError(f"the update to state {number} was overwritten while it was copied")


def _copy(source: Vector, target: Vector) -> None:
    np.copyto(target, source)


def _wait() -> None:
    time.sleep(_PAUSE)
